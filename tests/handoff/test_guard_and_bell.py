"""The guard lets one writer in at a time, whoever is killed when; the bell wakes, and costs nothing when it does not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from engine_shim.handoff import posix, semaphores
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import Busy, NotFound
from engine_shim.handoff.names import DEFAULT_DIR, PoolPaths
from engine_shim.handoff.semaphores import GLANCE, GUARD_BYTE, Bell, Guard
from tests.handoff import hammer
from tests.never_wrong.forked import Engine, engines


@pytest.fixture
def page(pool_paths: PoolPaths) -> Iterator[ControlPage]:
    """A pool's control page in shared memory; nothing is left of the pool afterwards."""
    page = ControlPage.create_or_open(pool_paths)
    yield page
    page.close()
    pool_paths.control.unlink()
    semaphores.unlink(pool_paths)


def value(name: str) -> int:
    semaphore = posix_ipc.Semaphore(name)
    try:
        return int(semaphore.value)
    finally:
        semaphore.close()


def taken(guard: Guard, timeout: float) -> float:
    """How long it takes to get the guard."""
    began = time.monotonic()
    with guard.hold(timeout):
        return time.monotonic() - began


def test_one_at_a_time(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    with Engine() as other:
        other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        began = time.monotonic()
        with pytest.raises(Busy, match="another process"), guard.hold(0.5):
            pass
        assert 0.45 < time.monotonic() - began < 5
        other(hammer.release_guard)
        assert taken(guard, 5) < 1
    assert value(pool_paths.guard) == 1
    guard.close()


def test_a_killed_holder_is_not_waited_for(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    for _ in range(3):
        with Engine() as other:
            other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
            other.kill()
        assert value(pool_paths.guard) == 0  # leaked: by itself it would keep everybody out for ever
        assert taken(guard, 20) < 2 * GLANCE + 0.5
        assert value(pool_paths.guard) == 1
    guard.close()


def test_a_holder_killed_while_another_waits(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    with Engine() as holder, Engine() as waiter:
        holder(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        waiter.start(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        assert waiter.busy(0.3)
        holder.kill()
        waiter.result(5)
        assert posix.byte_is_locked(page.fd, GUARD_BYTE)
    assert taken(guard, 5) < 2
    guard.close()


def test_nothing_is_lost_between_many_writers(page: ControlPage, pool_paths: PoolPaths) -> None:
    Guard(pool_paths, page.fd, create=True).close()
    counter = pool_paths.dir / "counter"
    try:
        counter.write_text("0")
        with engines(None, 4) as processes:
            for number, process in enumerate(processes):
                process.start(hammer.count_up, pool_paths.pool, str(pool_paths.dir), 40, number == 0)
            for process in processes[1:]:
                process.result()
            processes[0].wait()
        # Three have added all of theirs; the fourth died half-way, holding the guard, having read and not written.
        assert int(counter.read_text()) == 3 * 40 + 20
    finally:
        counter.unlink()


def test_a_leaked_semaphore_is_given_back_by_the_next_sidecar(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    with Engine() as other:
        other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        guard.reset()
        assert value(pool_paths.guard) == 0  # not while somebody really holds it
        other.kill()
    guard.reset()
    guard.reset()
    assert value(pool_paths.guard) == 1
    guard.close()


def test_an_exception_inside_gives_it_back(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    with contextlib.suppress(KeyError), guard.hold(1):
        raise KeyError
    assert value(pool_paths.guard) == 1
    assert not posix.byte_is_locked(page.fd, GUARD_BYTE)
    guard.close()


@pytest.mark.parametrize("way", ["no library", "not made", "removed", "another user's"])
def test_without_a_semaphore_the_lock_alone_does_it(
    page: ControlPage, pool_paths: PoolPaths, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard: Any
    if way == "no library":
        monkeypatch.setattr(semaphores, "posix_ipc", None)
        guard = Guard(pool_paths, page.fd, create=True)
    elif way == "not made":
        guard = Guard(pool_paths, page.fd)
    elif way == "removed":
        guard = Guard(pool_paths, page.fd, create=True)
        posix_ipc.unlink_semaphore(pool_paths.guard)
    else:
        monkeypatch.setattr(posix_ipc, "Semaphore", refused)
        guard = Guard(pool_paths, page.fd, create=True)
    assert taken(guard, 1) < 0.5
    with Engine() as other:
        other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        with pytest.raises(Busy), guard.hold(0.3):
            pass
        other.kill()
    assert taken(guard, 5) < 2
    guard.close()


def refused(*_: Any, **__: Any) -> None:
    raise posix_ipc.PermissionsError("no")


def test_a_semaphore_counted_up_by_a_stranger_lets_nobody_in(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    semaphore = posix_ipc.Semaphore(pool_paths.guard)
    for _ in range(5):
        semaphore.release()
    semaphore.close()
    with Engine() as other:
        other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        with pytest.raises(Busy), guard.hold(0.3):
            pass
    guard.close()


def test_one_put_in_its_place_while_it_is_opened(
    page: ControlPage, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at has to be what was opened; whoever cannot tell goes without."""
    Guard(pool_paths, page.fd, create=True).close()
    really = semaphores._file
    for second in (os.stat(page.paths.control), None):
        looks = [really(pool_paths.guard), second]

        def look(_: str, looks: list[Any] = looks) -> Any:
            found = looks.pop(0)
            if found is None:
                raise NotFound("it is gone")
            return found

        monkeypatch.setattr(semaphores, "_file", look)
        guard = Guard(pool_paths, page.fd)
        assert guard._semaphore is None and not looks
        assert taken(guard, 1) < 0.5
        guard.close()


def test_another_users_is_not_used(page: ControlPage, pool_paths: PoolPaths) -> None:
    guard = Guard(pool_paths, page.fd, create=True)
    assert guard._semaphore is not None
    guard.close()
    file = Path(DEFAULT_DIR, f"sem.{pool_paths.guard[1:]}")
    file.chmod(0o666)
    guard = Guard(pool_paths, page.fd, create=True)
    assert guard._semaphore is None
    guard.reset()
    with guard.hold(1):
        pass
    guard.close()


# The bell


def test_a_ring_wakes_who_waits(page: ControlPage, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphores, "GLANCE", 20.0)
    bell = Bell(pool_paths, create=True)
    with Engine() as other:
        other.start(hammer.ring, pool_paths.pool, 0.2)
        began = time.monotonic()
        assert bell.wait(20)
        assert time.monotonic() - began < 10
        other.result()
    bell.close()


def test_rings_do_not_pile_up(page: ControlPage, pool_paths: PoolPaths) -> None:
    bell = Bell(pool_paths, create=True)
    for _ in range(50):
        bell.ring()
    assert value(pool_paths.bell) == 1
    assert bell.wait(1)
    began = time.monotonic()
    assert not bell.wait(0.1)
    assert time.monotonic() - began >= 0.09
    bell.close()


def test_nobody_waits_longer_than_a_glance(page: ControlPage, pool_paths: PoolPaths) -> None:
    """A ring may be lost, to a waiter that is killed; then the others see for themselves a moment later."""
    bell = Bell(pool_paths, create=True)
    began = time.monotonic()
    assert not bell.wait(60)
    assert time.monotonic() - began < 10 * GLANCE
    assert not bell.wait(-1)
    bell.close()
    bell.close()


@pytest.mark.parametrize("way", ["no library", "not made", "removed"])
def test_without_a_bell_waiting_is_sleeping(
    page: ControlPage, pool_paths: PoolPaths, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "no library":
        monkeypatch.setattr(semaphores, "posix_ipc", None)
    bell = Bell(pool_paths, create=way != "not made")
    if way == "removed":
        posix_ipc.unlink_semaphore(pool_paths.bell)
    else:
        bell.ring()
    began = time.monotonic()
    assert not bell.wait(5)
    assert 0.01 < time.monotonic() - began < 2
    bell.close()


def test_a_signal_while_waiting_is_no_error(
    page: ControlPage, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    bell = Bell(pool_paths, create=True)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert not bell.wait(5)
        guard = Guard(pool_paths, page.fd, create=True)
        with Engine() as other:
            other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(Busy), guard.hold(0.4):
                pass
        guard.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        bell.close()


def test_removing_them_twice(pool_paths: PoolPaths) -> None:
    semaphores.unlink(pool_paths)
    Bell(pool_paths, create=True).close()
    semaphores.unlink(pool_paths)
    semaphores.unlink(pool_paths)
