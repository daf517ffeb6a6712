"""The measured operations, each in a process of its own: `python -m bench.child OPERATION ARGUMENTS-AS-JSON`.

Everything is imported before the clock runs; how long starting and importing took is given as `start`. The last line of
stdout is the result, seconds by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 4 << 20
LAUNCHED = "BENCH_LAUNCHED"  # environment variable: the launcher's monotonic clock, which all processes share


class Clock:
    """Names the stretches between its marks."""

    def __init__(self) -> None:
        launched = os.environ.get(LAUNCHED)
        self.seconds = {"start": time.monotonic() - float(launched)} if launched else {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = time.perf_counter()


def read_every_byte(tensors: Iterable[Any]) -> None:
    """Touches every byte at the speed of memory: the sum of eight-byte words, with torch's usual threads."""
    import torch

    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        flat[:whole].view(torch.int64).sum()
        flat[whole:].sum()


def _start_threads() -> None:
    """torch's threads and kernels, so that the first read is of memory alone."""
    import torch

    read_every_byte([torch.zeros(1 << 20)])


def load_file(files: list[str]) -> dict[str, float]:
    """safetensors' own reader. With the shim switched on by the environment, the same call comes from the pool."""
    from safetensors.torch import load_file

    if os.environ.get("BALLAST_POOL"):
        import engine_shim.ladder  # noqa: F401 - imports are not part of the measurement, ours as little as torch's
    _start_threads()
    clock = Clock()
    shards = [load_file(file) for file in files]
    clock.mark("load")
    _read_twice(clock, [tensor for shard in shards for tensor in shard.values()])
    return clock.seconds


def attach(pool: str, read: bool = True) -> dict[str, float]:
    """`engine_shim.open`, then every tensor as a torch tensor."""
    import engine_shim.api

    _start_threads()
    clock = Clock()
    model = engine_shim.api.open(pool=pool)
    clock.mark("open")
    tensors = model.state_dict()
    clock.mark("views")
    if read:
        _read_twice(clock, tensors.values())
    return clock.seconds


def private(pool: str, share: float = 1.0) -> dict[str, float]:
    """The same bytes, or a share of the tensors, copied to private memory beforehand: how fast are they read there?"""
    import engine_shim.api

    model = engine_shim.api.open(pool=pool)
    wanted = share * model.manifest.nbytes
    copies: list[Any] = []
    filled = 0
    for name in model.tensors:
        if filled >= wanted:
            break
        copies.append(model.tensors[name].clone())
        filled += copies[-1].nbytes
    model.close()
    _start_threads()
    clock = Clock()
    _read_twice(clock, copies)
    clock.seconds["bytes"] = filled
    return clock.seconds


def _read_twice(clock: Clock, tensors: Iterable[Any]) -> None:
    read_every_byte(tensors)
    clock.mark("first")
    read_every_byte(tensors)
    clock.mark("second")


def floor(pool: str) -> dict[str, float]:
    """The least that tensors in shared memory cost: map each segment, one `torch.frombuffer` a tensor, keep it in a
    dictionary. Where they are is known beforehand."""
    import torch

    from engine_shim.handoff import manifest
    from engine_shim.handoff.names import PoolPaths

    paths = PoolPaths.from_environment(pool=pool)
    contents = manifest.read(paths.manifest(1))
    rows = [(row.name, row.segment, row.offset, row.nbytes // 2) for row in contents.tensors]
    segments = [(str(paths.segment(1, index)), size) for index, size in enumerate(contents.segments)]
    del contents
    clock = Clock()
    maps = []
    for path, size in segments:
        fd = os.open(path, os.O_RDONLY)
        maps.append(mmap.mmap(fd, size, mmap.MAP_PRIVATE | 0x4000, mmap.PROT_READ | mmap.PROT_WRITE))  # MAP_NORESERVE
        os.close(fd)
    clock.mark("open")
    frombuffer, bfloat16 = torch.frombuffer, torch.bfloat16
    tensors = {}
    for name, segment, offset, count in rows:
        tensors[name] = frombuffer(maps[segment], dtype=bfloat16, count=count, offset=offset)
    clock.mark("views")
    return clock.seconds


def hold(pool: str | None) -> None:
    """An engine that attaches, reads every byte and stays, until its stdin is closed; without `pool`, one that only
    imports as much."""
    import engine_shim.api

    _start_threads()
    held = None
    if pool:
        held = engine_shim.api.open(pool=pool).state_dict()
        read_every_byte(held.values())
    print(json.dumps({"pid": os.getpid()}), flush=True)
    sys.stdin.read()


def memcpy(files: list[str], target: str, threads: int, how: str) -> dict[str, float]:
    """Copies cached files to new files in shared memory with several threads. `how`: `touch` copies into a map, whose pages
    the kernel makes when they are touched; `allocate` makes all pages first; `write` uses write(2) instead of a map."""
    sources = [_map(file) for file in files]
    for source in sources:
        source[:: mmap.PAGESIZE]  # touches each page, so that the copy meets none that is not mapped
    jobs = [(k, begin) for k, source in enumerate(sources) for begin in range(0, len(source), BLOCK)]
    created: list[int] = []
    clock = Clock()
    try:
        copies: list[tuple[mmap.mmap, ctypes.c_char]] = []
        for k, source in enumerate(sources):
            fd = os.open(f"{target}.{k}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            created.append(fd)
            os.ftruncate(fd, len(source))
        if how == "allocate":
            _in_threads(threads, lambda job: os.posix_fallocate(created[job[0]], job[1], _length(sources, job)), jobs)
        if how != "write":
            maps = [mmap.mmap(fd, len(source)) for fd, source in zip(created, sources, strict=True)]
            copies = [(m, ctypes.c_char.from_buffer(m)) for m in maps]
            from_ = [ctypes.addressof(ctypes.c_char.from_buffer(source)) for source in sources]
            to = [ctypes.addressof(first) for _, first in copies]
            _in_threads(
                threads,
                lambda job: ctypes.memmove(to[job[0]] + job[1], from_[job[0]] + job[1], _length(sources, job)),
                jobs,
            )
        else:
            views = [memoryview(source) for source in sources]
            _in_threads(
                threads,
                lambda job: os.pwrite(created[job[0]], views[job[0]][job[1] : job[1] + BLOCK], job[1]),
                jobs,
            )
        clock.mark("copy")
    finally:
        for k in range(len(created)):
            os.unlink(f"{target}.{k}")
    return clock.seconds


def touch(nbytes: int) -> dict[str, float]:
    """Takes memory, touches every page of it and gives it back."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    clock = Clock()
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages; it only takes longer then
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = b"\1" * (nbytes // mmap.PAGESIZE)
    clock.mark("touch")
    return clock.seconds


def _map(file: str) -> mmap.mmap:
    """Private and writable, since ctypes gives no address of a read-only map. Nothing writes."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _length(sources: list[mmap.mmap], job: tuple[int, int]) -> int:
    return min(BLOCK, len(sources[job[0]]) - job[1])


def read_direct(files: list[str], threads: int) -> dict[str, float]:
    """Reads files past the page cache with several threads: what the disk gives to more than one reader."""
    fds = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    jobs = [(fd, begin) for fd in fds for begin in range(0, os.fstat(fd).st_size, BLOCK)]
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(threads)]
    clock = Clock()

    def work(index: int) -> None:
        for fd, begin in jobs[index::threads]:
            os.preadv(fd, [buffers[index]], begin)

    _in_threads(threads, work, range(threads))
    clock.mark("read")
    return clock.seconds


def _in_threads(threads: int, function: Callable[[Any], object], jobs: Iterable[Any]) -> None:
    with ThreadPoolExecutor(threads) as executor:
        for _ in executor.map(function, jobs):
            pass


def runai(files: list[str]) -> dict[str, float]:
    """runai-model-streamer, as its README has it: every tensor handed out is copied, since its buffer is used again."""
    import torch  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer

    clock = Clock()
    tensors = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor.clone()
    clock.mark("load")
    return clock.seconds


def fastsafetensors(files: list[str]) -> dict[str, float]:
    """fastsafetensors without GPUDirect: to host memory, each tensor copied out of its buffers before they are freed."""
    import torch  # noqa: F401
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    clock = Clock()
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name).clone() for name in loader.get_keys()}
    buffers.close()
    loader.close()
    clock.mark("load")
    assert tensors
    return clock.seconds


OPERATIONS: dict[str, Callable[..., dict[str, float] | None]] = {
    function.__name__: function
    for function in (load_file, attach, private, floor, hold, memcpy, read_direct, touch, runai, fastsafetensors)
}


def main() -> None:
    operation, arguments = sys.argv[1:]
    result = OPERATIONS[operation](**json.loads(arguments))
    if result is not None:
        print(json.dumps(result), flush=True)
        os._exit(0)  # taking a process with gigabytes apart is not measured, and takes its time


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    main()
