"""Maps: private where that is said, at the addresses and for as long as somebody looks at them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_shim.handoff import maps
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from tests.handoff import hammer
from tests.never_wrong.forked import Engine

SIZE = 2 * maps.HUGE_PAGE


@pytest.fixture
def path(pool_paths: PoolPaths) -> Iterator[Path]:
    path = pool_paths.segment(1, 0)
    path.write_bytes(bytes(i % 251 for i in range(4096)) * (SIZE // 4096))
    yield path
    path.unlink()


def opened(path: Path) -> maps.Buffer:
    fd = os.open(path, os.O_RDONLY)
    try:
        return maps.private(fd, SIZE)
    finally:
        os.close(fd)


def mapped(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_private_map(path: Path) -> None:
    before = path.read_bytes()
    one, other = opened(path), opened(path)
    assert bytes(one) == before
    assert ctypes.addressof(one) % maps.HUGE_PAGE == 0
    one[5000] = 255
    assert bytes(other) == before == path.read_bytes()
    assert bytes(opened(path)) == before
    assert one[5000] == 255


def test_it_lives_as_long_as_anything_looks_at_it(path: Path) -> None:
    buffer = opened(path)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=100, offset=4096)
    view = tensor[10:]
    assert mapped(path) == 1
    del buffer, tensor
    gc.collect()
    assert mapped(path) == 1
    assert view.tolist() == list(range(10, 100))
    del view
    gc.collect()
    assert mapped(path) == 0


def test_no_address_space_is_kept(path: Path) -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    opened(path)
    gc.collect()
    before = size()
    for _ in range(50):
        opened(path)
    gc.collect()
    assert size() - before < 10 * SIZE // 4096


def test_a_shared_map_sees_what_is_written(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    buffer = maps.shared(fd, SIZE)
    os.pwrite(fd, b"\xff\xfe", 7000)
    os.close(fd)
    assert bytes(buffer[7000:7002]) == b"\xff\xfe"


def test_made_private_in_place(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    buffer = maps.writable(fd, SIZE)
    view = memoryview(buffer).cast("B")
    view[100:103] = b"abc"
    maps.make_private(buffer, fd)
    assert bytes(buffer[100:103]) == b"abc"
    view[100:103] = b"xyz"
    assert path.read_bytes()[100:103] == b"abc"
    os.close(fd)


def resident(path: Path, what: str = "Rss:") -> int:
    """Bytes of the file that this process has mapped, by /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = words[-1] == str(path)
        elif inside and words[0] == what:
            total += int(words[1]) << 10
    return total


def test_pages_before_they_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are mapped, and none is copied."""
    before = path.read_bytes()
    monkeypatch.setattr(maps, "_POPULATED", 1 << 20)
    buffer = opened(path)
    assert resident(path) == 0
    maps.populate(buffer)
    assert (resident(path), resident(path, "Anonymous:")) == (SIZE, 0)
    assert bytes(buffer) == before
    # A kernel that cannot is asked once.
    asked: list[int] = []
    monkeypatch.setattr(maps._libc, "madvise", lambda *given: asked.append(given[0]) or -1)
    maps.populate(buffer)
    assert len(asked) == 1


def test_huge_pages_change_no_byte(path: Path) -> None:
    """Whether the kernel makes them is the kernel's business."""
    before = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    buffer = maps.shared(fd, SIZE)
    for offset in range(0, SIZE, maps.HUGE_PAGE):
        maps.make_huge(buffer, offset, maps.HUGE_PAGE)
    assert path.read_bytes() == before == bytes(buffer)
    assert 0 <= maps.in_memory(buffer, 100, 5000) <= 1
    os.close(fd)


def test_a_map_that_the_kernel_refuses(path: Path) -> None:
    """Of a file that may only be read: no writable map, no change to one that is there, nothing of it left in memory."""
    fd = os.open(path, os.O_RDONLY)
    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(20):
        with pytest.raises(HandoffError, match="of a file cannot be mapped: Permission denied"):
            maps.writable(fd, SIZE)
    assert Path("/proc/self/maps").read_text().count("\n") < before + 10
    buffer = maps.shared(fd, SIZE)
    os.close(fd)
    with pytest.raises(HandoffError, match="a map cannot be made private: Bad file descriptor"):
        maps.make_private(buffer, fd)
    assert bytes(buffer[:4]) == path.read_bytes()[:4]
    with pytest.raises(HandoffError, match="bytes cannot be mapped"):
        maps.shared(fd, 1 << 60)


def test_where_the_kernel_does_not_tell_all_is_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(path, os.O_RDONLY)
    buffer = maps.shared(fd, SIZE)
    os.close(fd)
    monkeypatch.setattr(maps._libc, "mincore", lambda *_: -1)
    assert maps.in_memory(buffer, 0, SIZE) == 1


def test_no_address_space(path: Path) -> None:
    with Engine() as engine:
        assert "ulimit -v" in engine(hammer.limited_map, str(path), SIZE)


def test_where_memory_of_its_own_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = mmap.mmap(-1, 4 * SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own.madvise(mmap.MADV_DONTFORK, SIZE, SIZE)  # the kernel keeps a part with another advice apart
    shared = mmap.mmap(-1, SIZE)
    of_a_file = opened(path)

    def lies_in_it(buffer: Any, nbytes: int, memory: Callable[[], list[tuple[int, int]]] = maps.own_memory) -> bool:
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return any(start <= place and place + nbytes <= end for start, end in memory())

    assert lies_in_it(own, 4 * SIZE)
    assert not lies_in_it(shared, SIZE) and not lies_in_it(of_a_file, SIZE)
    assert lies_in_it(shared, SIZE, maps.shared_memory)
    assert not lies_in_it(own, SIZE, maps.shared_memory) and not lies_in_it(of_a_file, SIZE, maps.shared_memory)
    found = maps.own_memory()
    assert found == sorted(found) and all(end < start for (_, end), (start, _) in pairwise(found))

    def no_proc(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(maps, "open", no_proc, raising=False)
    assert maps.own_memory() == []
