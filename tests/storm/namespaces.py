"""Processes that see each other only through /dev/shm: PID and user namespaces of their own, as containers have them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

_NEWUSER = 0x10000000
_NEWIPC = 0x08000000
_NEWPID = 0x20000000
_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int) -> None:
    if getattr(_libc, name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True)
class Identity:
    """Who a process is: its user outside, and, in a user namespace of its own, what it takes itself for."""

    user: int
    inside: int | None = None  # None: no user namespace
    own_pids: bool = False


def fork_as(identity: Identity, function: Callable[[], None]) -> int:
    """A child of this process that runs `function` under this identity. Needs root. Returns its PID here."""
    if identity.own_pids:
        here = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        _call("unshare", _NEWPID)  # of the children from now on
    try:
        pid = os.fork()
        if pid == 0:
            try:
                _become(identity)
                function()
            finally:
                os._exit(1)
    finally:
        if identity.own_pids:
            _call("setns", here, _NEWPID)
            os.close(here)
    return pid


def _become(identity: Identity) -> None:
    if identity.user:
        os.setgroups([])
        os.setgid(identity.user)
        os.setuid(identity.user)
        _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # another user's process may not write its own maps otherwise
    if identity.inside is not None:
        _call("unshare", _NEWUSER | _NEWIPC)
        for name, line in (
            ("setgroups", "deny"), ("gid_map", f"{identity.inside} {identity.user} 1"),
            ("uid_map", f"{identity.inside} {identity.user} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
        assert os.geteuid() == identity.inside


def reason_against() -> str | None:
    """Why there are no namespaces to be had here; None where there are."""
    if os.geteuid():
        return "PID and user namespaces need root: run the tests as root, or in a container with CAP_SYS_ADMIN"
    try:
        pid = fork_as(Identity(65533, 0, True), lambda: os._exit(7))
    except OSError as error:
        return f"this kernel or container gives no namespaces ({error}): allow unshare, or run on the host"
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        return (
            "user namespaces are switched off here: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone"
        )
    return None
