"""The clock on the wall may jump, back and forth, at any moment: nobody waits longer, and nothing wrong is served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from engine_shim.handoff import identity, manifest, semaphores
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.identity import Stat
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.semaphores import GLANCE, Bell, Guard
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import instrumented
from tests.handoff import hammer
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.never_wrong.loading import loading
from tests.processes import Sidecar
from tests.waits import acts

HOUR = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        Checkpoint({f"{number}.w": entry("F32", (1000,), number)}).write(folder / f"{number}.safetensors")
    return folder


@pytest.fixture
def page(pool_paths: PoolPaths) -> Iterator[ControlPage]:
    page = ControlPage.create_or_open(pool_paths)
    yield page
    page.close()
    pool_paths.control.unlink()
    semaphores.unlink(pool_paths)


class ByTheWallClock(posix_ipc.Semaphore):  # type: ignore[misc]
    """A semaphore that waits as sem_timedwait(3) does when the clock is set back by an hour in that moment."""

    def acquire(self, timeout: float | None = None) -> None:
        if self.value == 0:
            time.sleep(30 if timeout else 0)
            raise posix_ipc.BusyError("the time has not come")
        super().acquire(0)


def wait_by_sem_timedwait(*_: Any) -> int:
    time.sleep(30)
    return -1


@pytest.mark.parametrize("library", ["glibc", "a C library without sem_clockwait"])
def test_a_clock_that_is_set_back_makes_nobody_wait(
    page: ControlPage, pool_paths: PoolPaths, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix_ipc, "Semaphore", ByTheWallClock)
    if library != "glibc":
        monkeypatch.setattr(semaphores, "_CLOCKWAIT", False)
    elif not semaphores._CLOCKWAIT:
        pytest.skip("this C library has no sem_clockwait(3): nothing but the other way is used")
    bell = Bell(pool_paths, create=True)
    began = time.monotonic()
    assert not bell.wait(60)
    assert GLANCE * 0.9 < time.monotonic() - began < 10 * GLANCE
    bell.ring()
    assert bell.wait(60)
    bell.close()
    guard = Guard(pool_paths, page.fd, create=True)
    with Engine() as other:
        other(hammer.hold_guard, pool_paths.pool, str(pool_paths.dir))
        other.kill()
    began = time.monotonic()
    with guard.hold(20):
        assert time.monotonic() - began < 10 * GLANCE
    guard.close()


def test_a_process_whose_clock_jumps(pool_name: str, folder: Path) -> None:
    """A sidecar and an engine, neither of which ever sees the right time: they load, attach, update and restart."""
    with Engine() as plain:
        truth = {**plain(engine_side.load, "safe_open", str(folder / "0.safetensors")),
                 **plain(engine_side.load, "safe_open", str(folder / "1.safetensors"))}  # fmt: skip
    environment = instrumented(folder.parent, acts.JUMPING)
    with Engine(pool_name, BALLAST_MODE="require", BALLAST_WAIT="20") as engine:
        engine(acts.jump)
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            sidecar.ready("model")
            assert engine(engine_side.load, "open", "model", "kept") == truth
            for number in range(2):
                path = str(folder / f"{number}.safetensors")
                assert engine(engine_side.load, "safe_open", path).items() <= truth.items()
            new = folder / "new"
            Checkpoint({"1.w": entry("F32", (1000,), 7)}).write(new)
            os.rename(new, folder / "1.safetensors")
            assert sidecar.ready("model", above=1).number == 2
            now = engine(engine_side.load, "open", "model")
            assert now["0.w"] == truth["0.w"] and now["1.w"] != truth["1.w"]
            assert engine(engine_side.kept, "kept") == truth
            sidecar.kill()
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            sidecar.ready("model")
            assert engine(engine_side.load, "open", "model") == now
            assert sidecar.interrupt() == 0


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
def test_a_wrong_clock_never_makes_two_states_of_a_file_the_same(
    pool_paths: PoolPaths, tmp_path: Path, offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar's clock is an hour off the one that stamps files. What it then cannot tell by their times it does not
    trust to them: a file that is written to right after it was read is another."""
    path = tmp_path / "m.safetensors"
    Checkpoint({"w": entry("F32", (3000,), 1)}).write(path)
    really = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: really() + int(offset * 1e9))
    with loading(pool_paths) as pool:
        generation = pool.load(path)
        shard = manifest.read(pool_paths.manifest(generation.number)).shards[0]
        if offset < 0:
            assert shard.identity.stat is None  # a file from the future: its times prove nothing
        Checkpoint({"w": entry("F32", (3000,), 2)}).write(path)
        now = Stat.of(os.stat(path))
        assert now != shard.identity.stat
        assert identity.digest(path.read_bytes()) and generation.number == 1


def test_times_in_shared_memory_are_for_people(pool_name: str, folder: Path) -> None:
    """A pool from the year 1870, adopted by a sidecar that knows what time it is."""
    past = "import time\ntime.time = lambda: -3.2e9\n"
    with Sidecar(pool_name, folder, env=instrumented(folder.parent, past)) as sidecar:
        generation = sidecar.ready("model")
        assert generation.since < 0
        sidecar.kill()
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name, BALLAST_MODE="require", BALLAST_WAIT="5") as engine:
        assert sidecar.ready("model").number == 1
        assert engine(engine_side.load, "open", "model")
        assert sidecar.interrupt() == 0
