"""Every step at which a process of Ballast can die, found in the code, and a fuse that kills it there.

A *site* is a call in `engine_shim` or `sidecar` to one of the PRIMITIVES: what changes shared memory, a kernel lock or a
semaphore. They are found by reading the source, so a new one is noticed before anybody thinks of testing it. A *step* is a
site with the way that leads to it (the same write of the control page means another thing on another way), and with the kind
of object it is done to. Steps are found by running a sequence with a `Recorder`; `Fuse` kills at one of them: before the
call, or in the middle of it where it writes.

Both work from outside: they replace functions in their own process. The code under test has nothing of this in it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import posix_ipc

from engine_shim.handoff import hugepages, maps, posix, semaphores

ROOT = Path(__file__).resolve().parents[2]

# Callee → names of what it offers that others can see the effect of. `os` is for calls that do without `handoff/posix.py`.
PRIMITIVES: dict[str, frozenset[str]] = {
    "posix": frozenset(
        {"create", "write_exactly", "write_parts", "allocate", "rename", "link_new", "remove", "try_flock", "try_lock_byte",
         "unlock_byte", "share"}
    ),
    "os": frozenset(
        {"fchmod", "chmod", "ftruncate", "truncate", "posix_fallocate", "rename", "replace", "link", "symlink", "unlink",
         "remove", "pwrite", "pwritev", "mkfifo", "utime", "fchown", "chown"}
    ),
    "maps": frozenset({"make_private", "make_huge"}),
    "fcntl": frozenset({"flock", "lockf", "fcntl"}),
    "posix_ipc": frozenset({"Semaphore", "unlink_semaphore", "SharedMemory", "unlink_shared_memory"}),
    "semaphore": frozenset({"acquire", "release"}),
    "_libc": frozenset({"sem_clockwait", "sem_timedwait", "sem_wait", "sem_trywait", "sem_post"}),
}  # fmt: skip
# What this layer wraps while a sequence runs; the rest of PRIMITIVES is not to be used, which `sites` would show.
_WRAPPED = ((posix, "posix"), (maps, "maps"), (os, "os"))
WRITES = ("posix.write_exactly", "posix.write_parts", "posix.allocate")

# Below this line of the tower calls are wrapped once, each in its own function; above it they are steps.
BASE = "engine_shim/handoff/posix.py"
# Commands around the protocol: they change nothing in a pool but by way of what is a site already.
COMMANDS = (
    "sidecar/demo.py",
    "sidecar/demo_engine.py",
    "sidecar/parity.py",
    "sidecar/prepare.py",
    "sidecar/cli.py",
    "sidecar/inject.py",
)


@dataclass(frozen=True)
class Site:
    """A call in the source."""

    file: str
    function: str
    call: str
    first: int
    last: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.call}" + (f" #{self.ordinal}" if self.ordinal > 1 else "")


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self._file = file
        self._names: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self.calls: list[Site] = []
        self.functions: dict[int, str] = {}

    def _scope(self, node: Any) -> None:
        self._names.append(node.name)
        lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
        self.functions[min(lines)] = ".".join(self._names)
        self.generic_visit(node)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            callee, name = node.func.value.id, node.func.attr
            if name in PRIMITIVES.get(callee, ()):
                function, call = ".".join(self._names), f"{callee}.{name}"
                self._counts[function, call] += 1
                last = node.end_lineno or node.lineno
                self.calls.append(Site(self._file, function, call, node.lineno, last, self._counts[function, call]))
        self.generic_visit(node)


@functools.cache
def _find() -> tuple[list[Site], dict[tuple[str, int], str]]:
    sites: list[Site] = []
    functions: dict[tuple[str, int], str] = {}
    for folder in ("engine_shim", "sidecar"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            finder = _Finder(file)
            finder.visit(ast.parse(path.read_text()))
            functions.update({(file, line): name for line, name in finder.functions.items()})
            if file != BASE and file not in COMMANDS:
                sites += finder.calls
    return sites, functions


def sites() -> list[Site]:
    """Every call of a primitive in the source, in the order of the files."""
    return _find()[0]


_KINDS = re.compile(r"(\.g)\d+|(\.w)\d+|(\.(?:a|in|d|do|did)\.)[0-9a-f]{16}|\.[0-9a-f]{16}(?=\.tmp)")


def _kind(args: tuple[Any, ...]) -> str:
    """What kind of object a call is about: its name in the pool without what makes it one of many."""
    path = next((str(arg) for arg in args if isinstance(arg, Path)), None)
    if path is None and args and isinstance(args[0], int):
        with contextlib.suppress(OSError):  # a number that is no descriptor
            path = os.readlink(f"/proc/self/fd/{args[0]}").removesuffix(" (deleted)")
    if path is None and args and isinstance(args[0], str):
        path = args[0]
    name = os.path.basename(path or "")
    if not name.startswith("ballast-"):
        return ""
    short = _KINDS.sub(lambda found: found[1] or found[2] or found[3] or "", "." + name.split(".", 1)[1])
    return short.replace("..", ".").strip(".")


@dataclass(frozen=True, order=True)
class Step:
    """A site, the way that leads to it, and what it is done to."""

    way: str
    call: str
    kind: str

    def __str__(self) -> str:
        return f"{self.way}: {self.call}" + (f" [{self.kind}]" if self.kind else "")


def _step(call: str, args: tuple[Any, ...]) -> tuple[Step, Site] | None:
    """The step that the present call is; None if it is not made by the project's own code."""
    all_sites, functions = _find()
    names: list[str] = []
    site: Site | None = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((f"{ROOT}/engine_shim/", f"{ROOT}/sidecar/")):
            short = file[len(str(ROOT)) + 1 :]
            if site is None:
                line = frame.f_lineno
                site = next(
                    (s for s in all_sites if s.file == short and s.call == call and s.first <= line <= s.last), None
                )
                if site is None:
                    return None  # a primitive inside a primitive, or a command's
            name = functions.get((short, frame.f_code.co_firstlineno))
            if name is not None:
                names.append(name)
        frame = frame.f_back
    if site is None:
        return None
    return Step(
        " > ".join(reversed(names)), site.call + (f"#{site.ordinal}" if site.ordinal > 1 else ""), _kind(args)
    ), site


class _Layer:
    """Replaces the primitives of this process, for good: it is meant for processes that are about to die."""

    def met(self, step: Step, site: Site, really: Callable[..., Any], args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def install(self) -> None:
        hugepages.PATIENCE = math.inf  # the steps are to be the same however busy the machine is
        for module, name in _WRAPPED:
            for attribute in PRIMITIVES[name]:
                setattr(module, attribute, self._wrap(getattr(module, attribute), f"{name}.{attribute}"))
        layer = self

        class Semaphore(posix_ipc.Semaphore):  # type: ignore[misc]
            def acquire(self, *args: Any) -> Any:
                layer._look("semaphore.acquire", super().acquire, (self.name,))
                return super().acquire(*args)

            def release(self) -> Any:
                layer._look("semaphore.release", super().release, (self.name,))
                return super().release()

        semaphores._libc.sem_clockwait = self._wrap(semaphores._libc.sem_clockwait, "_libc.sem_clockwait")
        posix_ipc.Semaphore = self._wrap(Semaphore, "posix_ipc.Semaphore")
        posix_ipc.unlink_semaphore = self._wrap(posix_ipc.unlink_semaphore, "posix_ipc.unlink_semaphore")

    def _wrap(self, really: Callable[..., Any], call: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._look(call, really, args)
            return really(*args, **kwargs)

        return wrapped

    def _look(self, call: str, really: Callable[..., Any], args: tuple[Any, ...]) -> None:
        found = _step(call, args)
        if found is not None:
            self.met(*found, really, args)


class Recorder(_Layer):
    """Writes down the steps of a sequence, and how often each is made."""

    def __init__(self) -> None:
        self.steps: Counter[Step] = Counter()
        self.sites: set[str] = set()
        self._lock = threading.Lock()

    def met(self, step: Step, site: Site, really: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self._lock:
            self.steps[step] += 1
            self.sites.add(str(site))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Death:
    """Where to die: before the `turn`-th time of a step (from 1), or in the middle of it. Without a step: after the last."""

    step: Step | None
    turn: int = 1
    middle: bool = False

    def __str__(self) -> str:
        if self.step is None:
            return "after the last step"
        return f"{'in the middle of' if self.middle else 'before'} {self.step}, time {self.turn}"


class Fuse(_Layer):
    """Kills this process at a step."""

    def __init__(self, death: Death) -> None:
        self._death = death
        self._left = death.turn
        self._lock = threading.Lock()

    def met(self, step: Step, site: Site, really: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if step != self._death.step:
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
            if self._death.middle:
                self._half(site.call, really, args)
            die()

    @staticmethod
    def _half(call: str, really: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if call == "posix.allocate":
            fd, offset, length, path = args
            really(fd, offset, length // 2, path)
            return
        fd, data, offset, path = args
        if call == "posix.write_parts":
            half = len(data) // 2
            data = [*data[:half], bytes(data[half])[: len(data[half]) // 2]] if data else []
        else:
            data = bytes(data)[: len(data) // 2]
        really(fd, data, offset, path)


def deaths(steps: Counter[Step], turns: int) -> Iterator[Death]:
    """Every death of a sequence that makes these steps: at the first `turns` times of each step, and at its last."""
    for step in sorted(steps):
        count = steps[step]
        for turn in sorted({*range(1, min(count, turns) + 1)}):
            yield Death(step, turn)
            if step.call.split("#")[0] in WRITES:
                yield Death(step, turn, middle=True)
    yield Death(None)
