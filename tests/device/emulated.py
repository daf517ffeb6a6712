"""The engine's side of the device tests, and the emulated machine that they run on.

Engines are forked (`tests.never_wrong.forked`); `prepare` gives them the emulated driver, and puts host memory in the place of
what torch would look at on a GPU: addresses of the emulated driver are ordinary addresses.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from engine_shim.handoff import holder, manifest
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths
from tests.never_wrong.forked import Engine
from tests.processes import Sidecar

MIB = 1 << 20
SOURCE = Path(__file__).with_name("libcuda.c")

A = "GPU-aaaaaaaa-0000-1111-2222-333333333333"
B = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
M = "MIG-cccccccc-0000-1111-2222-333333333333"

T = TypeVar("T")


def build(folder: Path) -> Path:
    """The emulated driver, compiled. Skips the test where there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("the emulated GPU driver needs a C compiler: apt install gcc, or set CC")
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library


class Machine:
    """A machine with emulated GPUs. At its end, no process may have broken a rule of the driver's."""

    def __init__(self, library: Path, gpus: dict[str, int] | None = None) -> None:
        self.library = library
        self.gpus = gpus or {A: 64 * MIB, B: 64 * MIB}
        self.folder = Path(tempfile.mkdtemp(prefix="emulated-gpus-", dir="/dev/shm"))

    def environ(self, **more: str) -> dict[str, str]:
        """What a process on this machine has in its environment."""
        gpus = ",".join(f"{uuid}={size}" for uuid, size in self.gpus.items())
        path = os.pathsep.join(filter(None, (str(self.library.parent), os.environ.get("LD_LIBRARY_PATH"))))
        return {"EMU_DIR": str(self.folder), "EMU_GPUS": gpus, "LD_LIBRARY_PATH": path, **more}

    def sidecar(self, pool: str, *checkpoints: Path, args: tuple[str, ...] = ("--device", "cuda:all"), **env: str) -> Sidecar:
        return Sidecar(pool, *checkpoints, args=args, env=self.environ(**env))

    def engine(self, pool: str, **env: str) -> Engine:
        """An engine with the emulated driver, ready for functions of `tests.device.gpu_side`."""
        from tests.device import gpu_side

        engine = Engine(pool, **self.environ(**env))
        engine(gpu_side.prepare, str(self.library))
        return engine

    def log(self, what: str = "", pid: int | None = None) -> list[str]:
        """What happened: lines `<pid> <what> …`."""
        try:
            lines = (self.folder / "log").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = [line.split(" ", 1) for line in lines]
        return [line for number, line in rows if line.startswith(what) and pid in (None, int(number))]

    def used(self, uuid: str) -> int:
        """Bytes that are allocated on a GPU."""
        index = list(self.gpus).index(uuid)
        return sum(path.stat().st_size for path in self.folder.glob(f"alloc.{index}.*"))

    def close(self) -> None:
        broken = self.log("violation")
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not broken, broken


def until(look: Callable[[], T], what: str = "", timeout: float = 60) -> T:
    """Calls `look` until it gives something true."""
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {timeout} s in vain: {what or look}"
        time.sleep(0.02)


def contents(paths: PoolPaths, generation: int = 1) -> Manifest | None:
    try:
        return manifest.read(paths.manifest(generation))
    except HandoffError:
        return None


def resident(paths: PoolPaths, generation: int = 1, gpus: set[str] | None = None) -> Manifest:
    """Waits until a generation's manifest has copies on just these GPUs (default: on any), by a living holder."""

    def look() -> Manifest | None:
        found = contents(paths, generation)
        if found is None:
            return None
        living = {one.identifier for one in holder.alive(paths)}
        on = {copy.gpu for copy in found.devices if copy.holder in living}
        stale = any(copy.holder not in living for copy in found.devices)
        return found if not stale and (on == gpus if gpus is not None else on) else None

    return until(look, f"generation {generation} on {gpus or 'any GPU'}")


def the_holder(paths: PoolPaths) -> int:
    """The PID of the pool's holder."""
    return until(lambda: [one.pid for one in holder.alive(paths)], "a holder")[0]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def ended(pid: int) -> None:
    until(lambda: gone(pid), f"process {pid} ends")


def preload(library: str) -> None:
    """The emulated driver for this process: by its soname, whoever asks for libcuda.so.1 gets it."""
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
