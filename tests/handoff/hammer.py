"""What other processes do in the tests of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from pathlib import Path

from engine_shim.handoff import attachment, maps, posix
from engine_shim.handoff.attachment import Token
from engine_shim.handoff.catalog import READY, Catalog, ControlPage, Generation
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.semaphores import Bell, Guard
from tests.never_wrong.forked import KEPT


def write_catalogs(directory: str, pool: str) -> None:
    """For ever: catalogs whose numbers agree with each other and with no other catalog's."""
    page = ControlPage.open(PoolPaths(pool, Path(directory)), write=True)
    number = 10 + int(time.time() * 1000) % (1 << 40)
    while True:
        number += 1
        lines = tuple(Generation(n, f"m{n}", "checkpoint", READY, 0, number) for n in range(1 + number % 9 + 1))
        page.write(Catalog("ab" * 16, number, 0, lines))


def create_pages(directory: str, pool: str, times: int) -> None:
    paths = PoolPaths(pool, Path(directory))
    for _ in range(times):
        page = ControlPage.create_or_open(paths)
        assert page.current
        page.close()


def hold_guard(pool: str, directory: str) -> None:
    """Takes the guard and keeps it."""
    paths = PoolPaths(pool, Path(directory))
    page = ControlPage.open(paths, write=True)
    stack = KEPT["guard"] = contextlib.ExitStack()
    stack.enter_context(Guard(paths, page.fd, create=True).hold(5))
    KEPT["page"] = page


def release_guard() -> None:
    KEPT["guard"].close()


def count_up(pool: str, directory: str, times: int, die: bool) -> None:
    """Adds to a number in a file, in a way that loses additions unless the guard keeps others out; or dies in between."""
    paths = PoolPaths(pool, Path(directory))
    page = ControlPage.open(paths, write=True)
    guard = Guard(paths, page.fd)
    counter = paths.dir / "counter"
    for turn in range(times):
        with guard.hold(20):
            number = int(counter.read_text())
            if die and turn == times // 2:
                os.kill(os.getpid(), 9)
            time.sleep(0)
            counter.write_text(str(number + 1))


def ring(pool: str, after: float) -> None:
    time.sleep(after)
    Bell(PoolPaths(pool)).ring()


def take(pool: str, directory: str, generation: int, model: str) -> str:
    token = Token.take(PoolPaths(pool, Path(directory)), generation, model, "test", 3)
    KEPT.setdefault("tokens", []).append(token)
    return token.record.identifier


def watch(pool: str, directory: str, seconds: float) -> tuple[int, list[int | None]]:
    """Looks at the one attachment there is, and sweeps: how often, and which generations it was seen to hold (None: none)."""
    paths = PoolPaths(pool, Path(directory))
    looks, seen = 0, set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = [record.generation for record in attachment.alive(paths)]
        seen.add(found[0] if len(found) == 1 else None)
        if attachment.sweep(paths):
            seen.add(None)
        looks += 1
    return looks, sorted(seen, key=str)


def take_many(pool: str, directory: str, times: int) -> int:
    """Takes attachments while others sweep; says how many of them were not seen as alive at once."""
    paths = PoolPaths(pool, Path(directory))
    lost = 0
    for _ in range(times):
        token = Token.take(paths, 1, "m")
        path = paths.attachment(token.record.identifier)
        fd = os.open(path, os.O_RDONLY)
        lost += not posix.byte_is_locked(fd, 0)
        os.close(fd)
        token.release()
        lost += path.exists()
    return lost


def sweep_for(pool: str, directory: str, seconds: float) -> int:
    paths = PoolPaths(pool, Path(directory))
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        count += attachment.sweep(paths)
    return count


def fork_and_end() -> int:
    """Leaves a child behind that has inherited everything; says its process number."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def fork_and_release() -> None:
    """A child lets go of what it has inherited, and ends."""
    pid = os.fork()
    if pid == 0:
        for token in KEPT["tokens"]:
            token.release()
        os._exit(0)
    os.waitpid(pid, 0)


def release() -> None:
    for token in KEPT.pop("tokens"):
        token.release()


def fields(record: attachment.Record) -> dict[str, object]:
    return dataclasses.asdict(record)


def limited_map(path: str, size: int) -> str:
    """Maps a file where there is no address space left for it; says how that ends."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * posix.PAGE
    fd = os.open(path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, resource.RLIM_INFINITY))
    try:
        maps.private(fd, size)
    except HandoffError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.close(fd)
    return "mapped"
