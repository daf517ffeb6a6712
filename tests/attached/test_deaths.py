"""Engines die attached, in every way there is: what they held is free again, and nothing that a living one holds.

The kernel's lock on the record says who lives. So nobody is fooled by a zombie, by a number that another process has by now, or
by one that means something else in another container.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_shim.handoff import attachment
from engine_shim.handoff.names import PoolPaths
from tests.attached import deaths
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.forked import Died, Engine
from tests.never_wrong.loading import Loading, loading
from tests.storm.namespaces import reason_against

WAYS = (
    "SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGTERM", "SIGQUIT", "os._exit", "a C library's abort", "out of memory",
    "in a thread that calls exit_group",
)  # fmt: skip


@pytest.fixture
def pool(pool_paths: PoolPaths, tmp_path: Path) -> Iterator[Loading]:
    """A pool with one generation of one model, whose sidecar is this process."""
    Checkpoint({"w": entry("F32", (1000,), 1)}).write(tmp_path / "m.safetensors")
    with loading(pool_paths) as pool:
        pool.load(tmp_path / "m.safetensors")
        yield pool


def records(paths: PoolPaths) -> list[str]:
    return [name.file for name in paths.objects() if name.kind == "attachment"]


def free(pool: Loading) -> bool:
    """Whether the generation can be freed, once it is retired."""
    pool.pool.retire(1)
    pool.pool.collect()
    return pool.pool.catalog.get(1) is None


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", WAYS)
def test_a_death(pool: Loading, how: str) -> None:
    with Engine(pool.paths.pool) as engine:
        engine(deaths.hold, "m")
        assert len(list(attachment.alive(pool.paths))) == 1 and not free(pool)
        engine.start(deaths.die, how)
        with pytest.raises(Died):
            engine.result(20)
        engine.wait()
        assert not list(attachment.alive(pool.paths))  # at once: the kernel is done with it
        assert len(records(pool.paths)) == 1
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)


def test_becoming_another_program(pool: Loading) -> None:
    """The process lives on, under its number; what it held is gone with its program."""
    with Engine(pool.paths.pool) as engine:
        engine(deaths.hold, "m")
        engine.start(deaths.die, "exec of another program")
        eventually(lambda: not list(attachment.alive(pool.paths)))
        os.kill(engine.pid, 0)
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)
        engine.kill()


def test_a_program_that_an_engine_started(pool: Loading) -> None:
    """It outlives the engine and holds nothing, although it was given every descriptor that is not close-on-exec."""
    with Engine(pool.paths.pool) as engine:
        engine(deaths.hold, "m")
        child = engine(deaths.spawn)
        engine.kill()
        try:
            os.kill(child, 0)
            assert not list(attachment.alive(pool.paths))
            pool.pool.sweep()
            assert not records(pool.paths) and free(pool)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_an_engine_forked(pool: Loading) -> None:
    """It has inherited the hold and keeps it: until both are gone, whoever goes first."""
    with Engine(pool.paths.pool) as engine:
        engine(deaths.hold, "m")
        worker = engine(deaths.fork_and_stay)
        engine.kill()
        assert len(list(attachment.alive(pool.paths))) == 1 and not free(pool)
        pool.pool.sweep()
        assert len(records(pool.paths)) == 1
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not list(attachment.alive(pool.paths)))
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)


def test_an_engine_that_lets_go_lets_go_for_its_workers(pool: Loading) -> None:
    """As documented: a release is the parent's to make. What the worker has mapped stays valid without it."""
    with Engine(pool.paths.pool) as engine:
        engine(deaths.hold, "m")
        worker = engine(deaths.fork_and_stay)
        try:
            engine(deaths.forget)
            eventually(lambda: not records(pool.paths))
            assert not list(attachment.alive(pool.paths)) and free(pool)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_zombie(pool: Loading) -> None:
    with Engine(pool.paths.pool) as parent:
        pid = parent(deaths.parent_of_a_zombie, "m")
        os.kill(pid, 0)  # what a check by number would go by
        assert len(records(pool.paths)) == 1
        assert not list(attachment.alive(pool.paths))
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)


@pytest.mark.parametrize("pid", [1, pytest.param(os.getpid(), id="own"), 4_194_304, 0, -1])
@pytest.mark.parametrize("locked", [True, False])
def test_a_number_means_nothing(pool: Loading, pid: int, locked: bool) -> None:
    """Of a process that lives, of this very one, of one that cannot be: the lock alone says whether somebody is there."""
    with Engine() as engine:
        engine(deaths.record, str(pool.paths.dir), pool.paths.pool, 1, pid, locked)
        assert len(list(attachment.alive(pool.paths))) == locked
        pool.pool.sweep()
        assert len(records(pool.paths)) == locked
        assert free(pool) == (not locked)
        engine.kill()
        assert not list(attachment.alive(pool.paths))
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)


@pytest.mark.skipif(reason_against() is not None, reason=reason_against() or "")
def test_in_another_container(pool: Loading) -> None:
    """Number 1 in a PID namespace of its own, 0 in a user namespace of its own; this process's are others."""
    with Engine(pool.paths.pool) as engine:
        pid = engine(deaths.in_a_container, "m")
        [record] = attachment.alive(pool.paths)
        assert record.pid == 1 and not free(pool)
        pool.pool.sweep()
        assert len(records(pool.paths)) == 1
        engine(deaths.kill, pid)
        assert not list(attachment.alive(pool.paths))
        pool.pool.sweep()
        assert not records(pool.paths) and free(pool)
