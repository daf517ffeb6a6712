"""Semaphores make waiting cheap and decide nothing: leaked, posted late, posted by strangers or lost, they let nobody in who
should wait, and keep nobody out."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from engine_shim.handoff import semaphores
from engine_shim.handoff.catalog import LOADING, ControlPage
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.semaphores import GLANCE, Bell, Guard
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.handoff import hammer
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine, engines
from tests.processes import Sidecar
from tests.waits import acts


@pytest.fixture
def page(pool_paths: PoolPaths) -> Iterator[ControlPage]:
    page = ControlPage.create_or_open(pool_paths)
    Guard(pool_paths, page.fd, create=True).close()
    Bell(pool_paths, create=True).close()
    yield page
    page.close()
    pool_paths.control.unlink()
    semaphores.unlink(pool_paths)


def test_a_late_post_lets_nobody_in(page: ControlPage, pool_paths: PoolPaths) -> None:
    """A holder that was stopped, and may be thought dead, posts when it goes on: after its successor has begun."""
    semaphore = posix_ipc.Semaphore(pool_paths.guard)
    with engines(None, 3) as (first, second, third):
        first(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        os.kill(first.pid, signal.SIGSTOP)
        second.start(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        assert second.busy(1)  # stopped is not dead
        os.kill(first.pid, signal.SIGCONT)
        first(hammer.release_guard)
        second.result(5)
        semaphore.release()  # what `first` would do if it were stopped between unlocking and posting, and went on now
        assert semaphore.value == 1
        third.start(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        assert third.busy(1)
        second(hammer.release_guard)
        third.result(5)
    semaphore.close()


def test_two_writers_never_meet(page: ControlPage, pool_paths: PoolPaths, tmp_path: Path) -> None:
    """Writers that are stopped, resumed and killed, and somebody who posts and takes the semaphores as he likes."""
    seconds = 4.0
    dice = random.Random(3)
    place = (pool_paths.pool, str(pool_paths.dir), seconds, str(tmp_path))
    with engines(None, 3) as writers, Engine() as vandal:
        for writer in writers:
            writer.start(acts.write_alone, *place)
        vandal.start(acts.post_and_take, pool_paths.pool, seconds)
        deadline = time.monotonic() + seconds - 1
        while time.monotonic() < deadline:
            pid = dice.choice(writers).pid
            os.kill(pid, signal.SIGSTOP)
            time.sleep(dice.random() * 0.05)
            os.kill(pid, signal.SIGCONT)
            with Engine() as victim:  # killed anywhere, also while it holds the guard
                victim.start(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
                time.sleep(dice.random() * 0.05)
                victim.kill()
        answers = [writer.result() for writer in writers]
        assert vandal.result() > 100
    assert sum(times for times, _ in answers) > 50
    assert [clashes for _, clashes in answers] == [0, 0, 0]


def test_a_semaphore_that_is_gone_or_full(page: ControlPage, pool_paths: PoolPaths) -> None:
    """Removed by hand, made anew by another, or at its highest value: everybody goes on."""
    guard = Guard(pool_paths, page.fd)
    semaphores.unlink(pool_paths)
    with guard.hold(1):
        pass
    with posix_ipc_semaphore(pool_paths.guard, posix_ipc.SEMAPHORE_VALUE_MAX) as full:
        other = Guard(pool_paths, page.fd)
        with other.hold(1):
            pass
        assert full.value >= posix_ipc.SEMAPHORE_VALUE_MAX - 1
        other.close()
    guard.close()


def posix_ipc_semaphore(name: str, value: int) -> posix_ipc.Semaphore:
    return _Held(name, posix_ipc.O_CREAT, initial_value=value)


class _Held(posix_ipc.Semaphore):  # type: ignore[misc]
    """posix_ipc's own `with` acquires; this one closes."""

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("how", ["lost", "rung twice", "rung all the time", "removed"])
def test_the_bell(pool_name: str, tmp_path: Path, how: str) -> None:
    """Two engines wait for one model. Whatever becomes of the bell, both have it a glance after it is ready."""
    path = tmp_path / "m.safetensors"
    Checkpoint({"w": entry("F32", (1000,), 1)}).write(path)
    hold(path)
    with (
        Sidecar(pool_name, path, env=instrumented(tmp_path, HOLDING)) as sidecar,
        engines(pool_name, 2, BALLAST_MODE="require", BALLAST_WAIT="20") as both,
        Engine() as vandal,
    ):
        sidecar.ready("m", LOADING)
        for engine in both:
            engine.start(engine_side.load, "open", "m")
            engine.says("waiting for the sidecar")
        bell = posix_ipc.Semaphore(sidecar.paths.bell)
        if how == "removed":
            posix_ipc.unlink_semaphore(sidecar.paths.bell)
        if how == "rung all the time":
            vandal.start(acts.post_and_take, pool_name, 1.0)
        if how == "rung twice":
            bell.release()
            bell.release()
        release(path)
        began = time.monotonic()
        if how == "lost":  # somebody takes every ring
            while sidecar.catalog.get(1).state == LOADING:  # type: ignore[union-attr]
                try:
                    bell.acquire(0)
                except posix_ipc.BusyError:
                    time.sleep(0.001)
        sidecar.ready("m")
        assert both[0].result(10) == both[1].result(10)
        assert time.monotonic() - began < 3 + 5 * GLANCE
        if how == "rung all the time":
            vandal.result()
        bell.close()
        sidecar.interrupt()
