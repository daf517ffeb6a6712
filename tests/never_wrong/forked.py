"""Engines as real processes that start in milliseconds: forked from one process that has imported torch already.

    with Engine(pool, BALLAST_MODE="require") as engine:
        engine(read, path)                 # runs `read(path)` there and returns what it returns, or raises what it raises
        engine.start(read, path); ...; engine.result()
        engine.lines                       # what our logger has said there
        engine.kill()

A function goes over by name, so it has to be one of a module of `tests` that needs neither pytest nor hypothesis. What it
keeps in `KEPT` lives as long as the process. The hook is installed there if a pool is given, as the `.pth` line does it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "ballast: "
KEPT: dict[str, Any] = {}

# The nursery: one process that forks and does nothing else -------------------------------------------------------


def _nursery(fd: int) -> None:
    """Serves until the other end is closed: for every pair of descriptors that comes, a child."""
    import safetensors.torch
    import torch

    import engine_shim.api
    import engine_shim.ladder
    import sidecar.serve

    assert engine_shim and safetensors and sidecar
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes: the kernel reaps
    requests = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _child(*fds)
            finally:
                os._exit(0)
        for other in fds:
            os.close(other)
        requests.send(array.array("q", [pid]).tobytes())


def _child(connection_fd: int, log_fd: int) -> None:
    for standard in (1, 2):
        os.dup2(log_fd, standard)
    connection = Connection(connection_fd)
    os.environ.update(connection.recv())
    from engine_shim.hooks import bootstrap

    bootstrap.install()
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(*args))
        except Exception as error:
            answer = (False, error)
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
        except Exception as error:  # cannot be pickled
            connection.send((False, RuntimeError(f"{answer[1]!r} cannot be sent: {error}")))


class _Nursery:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST")}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tests.never_wrong.forked", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, env=environ, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._requests = ours
        atexit.register(self.close)

    def fork(self, connection: socket.socket, log: int) -> int:
        socket.send_fds(self._requests, [b"+"], [connection.fileno(), log])
        answer = self._requests.recv(8)
        assert len(answer) == 8, "the process that forks engines has ended"
        return array.array("q", answer)[0]

    def close(self) -> None:
        self._requests.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_nurseries: list[_Nursery] = []


def _the_nursery() -> _Nursery:
    if not _nurseries:
        _nurseries.append(_Nursery())
    return _nurseries[0]


# What tests use ----------------------------------------------------------------------------------------------------


class Died(Exception):
    """The process ended without an answer."""


class Engine:
    """One process. Ended with the `with` block, or when the object goes, unless it has ended before."""

    def __init__(self, pool: str | None = None, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()
        self.pid = _the_nursery().fork(theirs, self._log.fileno())
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._connection = Connection(ours.detach())
        if pool is not None:
            environment["BALLAST_POOL"] = pool
        self._connection.send(environment)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._connection.send((function, args))

    def busy(self, seconds: float) -> bool:
        """Whether there is still no answer after so long."""
        return not self._connection.poll(seconds)

    def result(self, timeout: float = 60) -> Any:
        """The answer to what was started. Raises what the function raised there, or Died."""
        if not self._connection.poll(timeout):
            raise AssertionError(f"no answer after {timeout} s:\n{self.log}")
        try:
            fine, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise Died(self.log) from None
        if fine:
            return value
        raise value

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """What our logger has said, without its prefix. Fails if anybody else has said something."""
        lines = self.log.splitlines()
        assert all(line.startswith(PREFIX) for line in lines), self.log
        return [line.removeprefix(PREFIX) for line in lines]

    def says(self, text: str, timeout: float = 30) -> str:
        """Waits for a line that holds `text`, and returns it."""
        deadline = time.monotonic() + timeout
        while True:
            found = [line for line in self.lines if text in line]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"no line with {text!r} but:\n{self.log}"
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float = 10) -> None:
        assert select.select([self._pidfd], [], [], timeout)[0], f"process {self.pid} does not end"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log, file=sys.stderr)
        self._connection.close()  # ends it in the ordinary way, if it is waiting for us
        if not select.select([self._pidfd], [], [], 5)[0]:
            self.kill()
        os.close(self._pidfd)
        self._log.close()


@contextlib.contextmanager
def engines(pool: str | None, count: int, **environment: str) -> Iterator[list[Engine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Engine(pool, **environment)) for _ in range(count)]


if __name__ == "__main__":
    # Under its real name, where pickled functions and `KEPT` are looked for.
    from tests.never_wrong import forked

    forked._nursery(int(sys.argv[1]))
