"""Sidecars and other commands as real processes, for tests that kill, stop and restart them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Union

from engine_shim.handoff.catalog import READY, Catalog, ControlPage, Generation
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import DEFAULT_DIR, PoolPaths

ROOT = Path(__file__).resolve().parent.parent
PathLike = Union[str, "os.PathLike[str]"]


def die_with_parent() -> None:
    """For a forked process: it is killed when the one that forked it is gone, so that a test that fails leaves none behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def environment(pool: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment without any BALLAST_ setting and the width of a screen, which pytest's workers set; with the
    project importable, and with what is given."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST_") and key != "COLUMNS"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    if pool is not None:
        environ["BALLAST_POOL"] = pool
    environ.update(more)
    return environ


def ballast(
    *args: PathLike, env: Mapping[str, str] | None = None, timeout: float = 60, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command of `ballast` to its end. `env` is the whole environment (default: `environment()`)."""
    command = [sys.executable, "-m", "sidecar", *map(os.fspath, args)]
    return subprocess.run(
        command, env=environment() if env is None else env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout, **more,
    )  # fmt: skip


class Sidecar:
    """`ballast serve` as a process of its own. At the end of the `with` block it is interrupted, and so removes its pool.

        with Sidecar(pool, checkpoint, args=["--name", "m"]) as sidecar:
            sidecar.ready("m")
            sidecar.kill()

    A test that ends it in another way also removes the pool: by starting another, or with `ballast("purge", …)`.
    `args` go to `ballast serve`; `env` is added to its environment. `log` is what it has written so far, to stdout and stderr.
    """

    def __init__(
        self,
        pool: str,
        *checkpoints: PathLike,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        directory: PathLike = DEFAULT_DIR,
    ) -> None:
        self.paths = PoolPaths(pool, Path(directory))
        self._before = self._boot()
        self._output = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "sidecar", "serve", *map(os.fspath, checkpoints)]
        command += ["--pool", pool, "--dir", os.fspath(directory), *args]
        self.process = subprocess.Popen(
            command, env=environment(**(env or {})), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    @property
    def catalog(self) -> Catalog:
        """The catalog as it is now. Raises HandoffError where there is none."""
        page = ControlPage.open(self.paths)
        try:
            return page.read()
        finally:
            page.close()

    def _boot(self) -> str | None:
        try:
            return self.catalog.boot
        except HandoffError:
            return None

    def ready(self, model: str, state: str = READY, timeout: float = 30, above: int = 0) -> Generation:
        """Waits until *this* process has a generation of `model` in `state`, with a number greater than `above`.

        Returns the newest such. Fails with the log if the process ends before, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll()
            try:
                now = self.catalog
                for generation in now.of_model(model, state):
                    if generation.number > above and now.boot != self._before:
                        return generation
            except HandoffError:
                pass
            if ended is not None:
                raise AssertionError(f"the sidecar ended with {ended} before {model} was {state}:\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{model} is not {state} after {timeout} s:\n{self.log}")
            time.sleep(0.01)

    def says(self, text: str, timeout: float = 30) -> str:
        """Waits for a line of the log that holds `text`, and returns it."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll()
            for line in self.log.splitlines():
                if text in line:
                    return line
            if ended is not None or time.monotonic() > deadline:
                raise AssertionError(f"no line with {text!r} but:\n{self.log}")
            time.sleep(0.01)

    def signal(self, number: int, timeout: float = 20) -> int:
        """Sends a signal and waits for the end. Returns the exit code, negative for a signal's number."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> int:
        """kill -9: it can clean up nothing."""
        return self.signal(signal.SIGKILL)

    def terminate(self) -> int:
        """As systemd, docker and Kubernetes stop it: the pool stays."""
        return self.signal(signal.SIGTERM)

    def interrupt(self) -> int:
        """As a person stops it at a terminal: the pool goes."""
        return self.signal(signal.SIGINT)

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.interrupt()
        except subprocess.TimeoutExpired:
            self.kill()
        if error is not None:
            print(self.log, file=sys.stderr)  # pytest shows it with the failure
        self._output.close()
