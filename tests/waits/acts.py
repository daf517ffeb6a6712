"""What other processes do in the tests of this folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

JUMPING = "from tests.waits.acts import jump\njump()\n"


def jump() -> None:
    """From now on every look of this process at the wall clock says something else: an hour ahead, an hour behind, now, a
    century ago."""
    jumps = itertools.cycle((3600.0, -3600.0, 0.0, -3.2e9))
    really, really_ns = time.time, time.time_ns
    time.time = lambda: really() + next(jumps)
    time.time_ns = lambda: really_ns() + int(next(jumps) * 1e9)


def pause_before_the_second_look() -> None:
    """The next record that this process takes is followed by a long sleep."""
    from engine_shim.handoff.attachment import Token

    take = Token.take

    def paused(*args: object, **more: object) -> Token:
        token = take(*args, **more)  # type: ignore[arg-type]
        Token.take = take  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        return token

    Token.take = paused  # type: ignore[method-assign, assignment]


def pause_with_the_guard() -> None:
    """The next publication of this process sleeps in the middle of being committed."""
    from engine_shim.handoff import posix

    rename = posix.rename

    def paused(source: Path, target: Path) -> None:
        if ".in." in target.name:
            posix.rename = rename
            os.kill(os.getpid(), signal.SIGSTOP)
        rename(source, target)

    posix.rename = paused


def publish() -> None:
    import engine_shim
    from tests.crash import dying

    engine_shim.publish(dying.module(5), "published")


def write_alone(pool: str, directory: str, seconds: float, folder: str) -> tuple[int, int]:
    """Takes the guard again and again; says how often, and how often somebody else was in there too."""
    from engine_shim.handoff.catalog import ControlPage
    from engine_shim.handoff.errors import Busy
    from engine_shim.handoff.names import PoolPaths
    from engine_shim.handoff.semaphores import Guard

    paths = PoolPaths(pool, Path(directory))
    page = ControlPage.open(paths, write=True)
    guard = Guard(paths, page.fd)
    deadline = time.monotonic() + seconds
    times = clashes = 0
    inside = Path(folder, "inside")
    while time.monotonic() < deadline:
        try:
            with guard.hold(0.5):
                times += 1
                try:
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    clashes += 1
                time.sleep(0.001)
                inside.unlink(missing_ok=True)
        except Busy:
            continue  # its holder is stopped, and lives
    return times, clashes


def post_and_take(pool: str, seconds: float) -> int:
    """Posts both semaphores, and takes them away, as nobody should; says how often."""
    import random

    import posix_ipc

    dice = random.Random(5)
    deadline = time.monotonic() + seconds
    count = 0
    names = [posix_ipc.Semaphore(f"/ballast-{pool}.{name}") for name in ("guard", "bell")]
    while time.monotonic() < deadline:
        semaphore = dice.choice(names)
        if dice.random() < 0.5:
            semaphore.release()
        else:
            with contextlib.suppress(posix_ipc.BusyError):
                semaphore.acquire(0)
        count += 1
        time.sleep(dice.random() * 0.002)
    return count
