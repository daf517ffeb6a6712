"""Processes that a measurement needs: children that measure, a real sidecar, engines that stay attached."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.child import LAUNCHED
from bench.machine import PYTHON
from engine_shim.handoff import catalog
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import HandoffError, NotFound
from engine_shim.handoff.names import DEFAULT_DIR, PoolPaths, pools
from sidecar.pool import purge

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "engine_shim" / "hooks" / "site"
PREFIX = "bench-"  # of the pools made here
SHARED_MEMORY = Path(DEFAULT_DIR)
SCRATCH = "ballast_bench-"  # of the folder for other copies; not a name that a pool's object can have
MODEL = "measured"
_READY_TIMEOUT = 900.0
_SPARE = 1 << 30  # bytes of free memory that are left alone
_STOP_TIMEOUT = 60.0
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def environment(shim: str | None = None) -> dict[str, str]:
    """An environment that runs this tree's code. With `shim`, a pool's name, any Python in it has the shim on."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BALLAST_", "PYTHON"))}
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if shim:
        # A fall-back to the disk must fail here instead of being measured as Ballast.
        clean |= {"BALLAST_POOL": shim, "BALLAST_MODE": "require", "BALLAST_LOG": "WARNING"}
        path.insert(0, str(SITE))
    return clean | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}


def measure(operation: str, shim: str | None = None, **arguments: object) -> dict[str, float]:
    """Runs one operation of `bench.child` in a fresh process and returns its seconds."""
    run = subprocess.run(
        [PYTHON, "-m", "bench.child", operation, json.dumps(arguments)],
        env=environment(shim) | {LAUNCHED: str(time.monotonic())},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{operation} failed ({run.returncode}): {run.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def settle(nbytes: int) -> None:
    """Makes sure that about `nbytes` of free memory are really there before something is measured that will take them.

    A virtual machine's memory may be the host's until it is first touched, and again some seconds after it was freed; that
    costs up to twenty times as much as the page itself, and whoever comes first would pay it for all.
    """
    room = min(nbytes, machine.memory_free() - _SPARE) // (2 << 20) * (2 << 20)
    if room > 0:
        measure("touch", nbytes=room)


def fill_page_cache(folder: Path) -> None:
    """Leaves little memory free, by reading a file of holes in `folder`, which takes no disk.

    So memory is as on a machine that has been up for a while: there for the taking, and none of it new to a virtual machine.
    """
    with open(folder / "holes", "a+b", buffering=0) as holes:
        holes.truncate(machine.memory_total())
        holes.seek(0)
        buffer = bytearray(4 << 20)
        while machine.memory_free() > _SPARE and holes.readinto(buffer):
            pass


@dataclass(frozen=True)
class Memory:
    """One look at a process, in bytes. `beyond` is what it has resident except pages of shared memory."""

    resident: int
    shared_memory: int
    proportional: int
    private: int
    page_tables: int

    @property
    def beyond(self) -> int:
        return self.resident - self.shared_memory


def memory_of(pid: int) -> Memory:
    """From /proc/PID/status and /proc/PID/smaps_rollup. Raises OSError once the process is gone."""
    status = _fields(f"/proc/{pid}/status")
    rollup = _fields(f"/proc/{pid}/smaps_rollup")
    return Memory(
        status["VmRSS"],
        status["RssShmem"],
        rollup["Pss"],
        rollup["Private_Clean"] + rollup["Private_Dirty"],
        status["VmPTE"],
    )


def _fields(path: str) -> dict[str, int]:
    with open(path) as file:
        return {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", file.read(), re.MULTILINE)}


class Sampler(threading.Thread):
    """Looks at a process's memory until it is told to stop; keeps the most that it had resident beside shared memory.

    The kernel's own mark (VmHWM) would miss nothing between two looks, but counts what is mapped of shared memory.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._done.wait(0.03):
            try:
                status = _fields(f"/proc/{self._pid}/status")
                self.most = max(self.most, status["VmRSS"] - status["RssShmem"])
            except (OSError, KeyError):
                return

    def stop(self) -> None:
        self._done.set()
        self.join()


@dataclass(frozen=True)
class Served:
    """A pool that is ready, and how it came to be. Seconds, bytes."""

    pool: str
    process: float  # from the start of `ballast serve` until the weights are ready
    loading: float  # of that, from the first read to the last
    peak: int  # the most that the sidecar had resident beside shared memory
    after: Memory
    objects: int  # what the pool takes up in shared memory, all told

    @property
    def paths(self) -> PoolPaths:
        return PoolPaths.from_environment(pool=self.pool)


@contextmanager
def sidecar(checkpoint: Path) -> Iterator[Served]:
    """A real `ballast serve`, until it is ready; at the end, however that comes, nothing of it is left."""
    paths = PoolPaths.from_environment(pool=f"{PREFIX}{os.getpid()}")
    with tempfile.TemporaryFile() as log:
        launched = time.monotonic()
        process = subprocess.Popen(
            [PYTHON, "-m", "sidecar", "serve", str(checkpoint), "--pool", paths.pool, "--name", MODEL],
            env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent,
        )  # fmt: skip
        sampler = Sampler(process.pid)
        sampler.start()
        try:
            try:
                began, ready = _wait_until_ready(paths, process)
            except (HandoffError, TimeoutError) as error:
                log.seek(0)
                raise SystemExit(f"the sidecar did not get ready ({error}): {log.read().decode()[-2000:]}") from None
            sampler.stop()
            objects = sum((paths.dir / name.file).stat().st_blocks * 512 for name in paths.objects())
            after = memory_of(process.pid)
            yield Served(paths.pool, ready - launched, ready - began, sampler.most, after, objects)
        finally:
            sampler.stop()
            _stop(process, signal.SIGINT)
            purge(paths, force=True)


def _die_with_parent() -> None:
    """In the child: have the kernel send SIGINT, on which a sidecar removes its pool, should this run be killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))


def _wait_until_ready(paths: PoolPaths, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """When loading began and when the weights were ready, on the monotonic clock, to some milliseconds."""
    page: ControlPage | None = None
    began = None
    deadline = time.monotonic() + _READY_TIMEOUT
    try:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise HandoffError(f"it ended with {process.returncode}")
            try:
                page = page or ControlPage.open(paths)
                states = [generation.state for generation in page.read().of_model(MODEL)]
            except NotFound:
                states = []
            now = time.monotonic()
            if began is None and states:
                began = now
            if catalog.READY in states:
                return began or now, now
            if catalog.FAILED in states:
                raise HandoffError("it could not load the checkpoint")
            time.sleep(0.004)
        raise TimeoutError(f"not within {_READY_TIMEOUT:.0f} s")
    finally:
        if page is not None:
            page.close()


def _stop(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def engine(pool: str | None) -> Iterator[int]:
    """A process that has read every byte of the pool's weights and holds them; its PID."""
    process = subprocess.Popen(
        [PYTHON, "-m", "bench.child", "hold", json.dumps({"pool": pool})],
        env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("an engine did not start")
        yield json.loads(line)["pid"]
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in shared memory for this run's own copies. Whatever a killed run left there goes first, and its pools."""
    for name in pools():
        if name.startswith(PREFIX):
            with suppress(HandoffError):  # Busy: of a run that goes on
                purge(PoolPaths(name), force=True)
    for left in SHARED_MEMORY.glob(f"{SCRATCH}*"):
        if not Path("/proc", left.name.removeprefix(SCRATCH)).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = SHARED_MEMORY / f"{SCRATCH}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def files(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]


def installed(module: str, env: Mapping[str, str]) -> bool:
    """Whether a child could import `module`."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], env=dict(env), cwd=ROOT).returncode == 0
