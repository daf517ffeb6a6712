"""Ways in which the engines of these tests die, and what they leave behind."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

from tests.never_wrong.forked import KEPT


def hold(model: str) -> int:
    """Attaches, and keeps it."""
    import engine_shim

    KEPT["model"] = engine_shim.open(model)
    return os.getpid()


def die(how: str) -> None:
    """Never returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    if how == "os._exit":
        os._exit(0)
    if how == "SIGSEGV":
        ctypes.string_at(1)
    if how == "a C library's abort":
        ctypes.CDLL(None).abort()
    if how == "out of memory":
        _exhaust()
    if how == "in a thread that calls exit_group":
        ctypes.CDLL(None).syscall(231, 3)  # exit_group, past everything that Python or the C library would do
    if how == "exec of another program":
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(30)"])
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def _exhaust() -> None:
    """As the kernel's OOM killer does it: SIGKILL, in the middle of an allocation."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    hoard = []
    while True:
        hoard.append(bytearray(1 << 16))
        time.sleep(0.001)


def spawn() -> int:
    """An ordinary program, started by an attached engine; it inherits nothing."""
    process = subprocess.Popen(
        ["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False
    )
    KEPT["spawned"] = process
    return process.pid


def fork_and_stay() -> int:
    """A worker that has inherited everything, and lives on."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def forget() -> None:
    KEPT.pop("model")


def parent_of_a_zombie(model: str) -> int:
    """A child that attaches and dies, and that nobody reaps: a zombie, whose number `kill(pid, 0)` still finds."""
    reading, writing = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        hold(model)
        os.write(writing, b"+")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while state(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return pid


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def in_a_container(model: str) -> int:
    """A child with a PID namespace and a user namespace of its own, attached."""
    from tests.storm.namespaces import Identity, fork_as

    reading, writing = os.pipe()

    def attach() -> None:
        hold(model)
        os.write(writing, b"+")
        time.sleep(60)

    pid = fork_as(Identity(0, 0, own_pids=True), attach)
    os.close(writing)
    assert os.read(reading, 1) == b"+"
    return pid


def kill(pid: int) -> None:
    """A child of this process."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def record(directory: str, pool: str, generation: int, pid: int, locked: bool) -> str:
    """A record that says it is of process `pid`."""
    import json
    from pathlib import Path

    from engine_shim.handoff import posix
    from engine_shim.handoff.names import PoolPaths, new_id

    path = PoolPaths(pool, Path(directory)).attachment(new_id())
    fd = posix.create(path)
    if locked:
        assert posix.try_lock_byte(fd, 0)
        KEPT[f"fd {path}"] = fd
    text: dict[str, Any] = {"generation": generation, "model": "m", "pid": pid, "since": 0.0}
    posix.write_exactly(fd, json.dumps(text).encode(), 0, path)
    if not locked:
        os.close(fd)
    return str(path)
