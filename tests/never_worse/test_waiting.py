"""A sidecar that is still loading is waited for, with a word on how far it is; what is loaded already may be had already."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import engine_shim
from engine_shim import ladder
from engine_shim.handoff.catalog import LOADING, Generation
from engine_shim.handoff.errors import HandoffError, NotReady
from engine_shim.handoff.names import PoolPaths
from sidecar.pool import purge
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine, engines
from tests.never_wrong.logs import Lines, forget_pools
from tests.processes import Sidecar

SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(SHARDS):
        tensors = {f"{number}.w": entry("F32", (1000,), number), f"{number}.b": entry("F16", (7,), number)}
        Checkpoint(tensors).write(folder / f"{number}.safetensors")
    return folder


def shard(folder: Path, number: int) -> str:
    return str(folder / f"{number}.safetensors")


@pytest.fixture
def truth(folder: Path) -> list[dict[str, str]]:
    with Engine() as engine:
        return [engine(engine_side.load, "safe_open", shard(folder, number)) for number in range(SHARDS)]


def test_it_waits_and_then_attaches(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    hold(folder / "0.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name, BALLAST_MODE="require") as by_file,
        Engine(pool_name) as by_name,
    ):
        sidecar.ready("model", LOADING)
        by_file.start(engine_side.load, "safe_open", shard(folder, 0))
        by_name.start(engine_side.load, "open", "model")
        for engine in (by_file, by_name):
            line = engine.says("waiting for the sidecar")
            assert line.startswith("waiting for the sidecar, which has loaded 0 B of ") and line.endswith(
                " of model (0 %)"
            )
            assert engine.busy(0.3)
        release(folder / "0.safetensors")
        assert by_file.result(10) == truth[0]
        assert by_name.result(10) == {name: value for part in truth for name, value in part.items()}
        assert by_file.lines[-1].startswith("model comes from memory: generation 1 ")
        sidecar.interrupt()


def test_shards_that_are_complete_can_be_had(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    hold(folder / "2.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name, BALLAST_MODE="require") as engine,
    ):
        sidecar.ready("model", LOADING)
        for number in (0, 1):
            assert engine(engine_side.load, "safe_open", shard(folder, number), f"kept{number}") == truth[number]
        assert set(engine(engine_side.segments)) == {f"ballast-{pool_name}.g1.w{number}" for number in (0, 1)}
        assert sidecar.ready("model", LOADING).state == LOADING
        engine.start(engine_side.load, "safe_open", shard(folder, 2))
        assert engine.busy(0.3)
        release(folder / "2.safetensors")
        assert engine.result(10) == truth[2]
        assert engine(engine_side.kept, "kept0") == truth[0]
        sidecar.interrupt()


def test_a_fine_tune_is_told_apart_while_loading_too(
    pool_name: str, folder: Path, tmp_path: Path, truth: list[dict[str, str]]
) -> None:
    """Against the part that is in memory; the file of another model is read as ever, without waiting for this one."""
    other = tmp_path / "other"
    other.mkdir()
    tensors = {"0.w": entry("F32", (1000,), 99), "0.b": entry("F16", (7,), 0)}
    Checkpoint(tensors).write(other / "0.safetensors")
    hold(folder / "2.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name) as engine,
        Engine() as plain,
    ):
        sidecar.ready("model", LOADING)
        expected = plain(engine_side.load, "safe_open", shard(other, 0))
        assert expected != truth[0]
        assert engine(engine_side.load, "safe_open", shard(folder, 0)) == truth[0]
        assert engine(engine_side.load, "safe_open", shard(other, 0)) == expected
        assert "other content" in engine.lines[-1]
        release(folder / "2.safetensors")
        sidecar.interrupt()


def test_a_model_that_waits_its_turn_is_waited_for(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    """The second of two checkpoints is announced before its loading begins."""
    first = folder.parent / "first.safetensors"
    Checkpoint({"x": entry("F32", (9,))}).write(first)
    hold(first)
    with (
        Sidecar(pool_name, first, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name, BALLAST_MODE="require") as engine,
    ):
        sidecar.ready("model", LOADING)
        engine.start(engine_side.load, "safe_open", shard(folder, 1))
        assert engine.busy(0.5)
        release(first)
        assert engine.result(10) == truth[1]
        sidecar.interrupt()


def test_a_stopped_sidecar_is_a_living_one(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    hold(folder / "0.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name, BALLAST_MODE="require") as engine,
    ):
        sidecar.ready("model", LOADING)
        os.kill(sidecar.pid, signal.SIGSTOP)
        engine.start(engine_side.load, "safe_open", shard(folder, 0))
        assert engine.busy(1)
        release(folder / "0.safetensors")
        os.kill(sidecar.pid, signal.SIGCONT)
        assert engine.result(10) == truth[0]
        sidecar.interrupt()


def test_a_restart_while_loading_is_waited_for(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    """A container that is killed is started again within seconds; engines that wait meanwhile need not notice."""
    hold(folder / "1.safetensors")
    environment = instrumented(folder.parent, HOLDING)
    with engines(pool_name, 2, BALLAST_MODE="require") as (by_file, by_name):
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            sidecar.ready("model", LOADING)
            by_file.start(engine_side.load, "safe_open", shard(folder, 1))
            by_name.start(engine_side.load, "open", "model")
            by_file.says("waiting for the sidecar")
            by_name.says("waiting for the sidecar")
            sidecar.kill()
        assert by_file.busy(0.5) and by_name.busy(0.5)
        release(folder / "1.safetensors")
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            assert by_file.result(30) == truth[1]
            assert by_name.result(30) == {name: value for part in truth for name, value in part.items()}
            sidecar.interrupt()


def test_a_load_that_fails_ends_the_waiting(pool_name: str, folder: Path) -> None:
    good = folder.parent / "good.safetensors"
    Checkpoint({"x": entry("F32", (9,))}).write(good)
    hold(folder / "2.safetensors")
    with (
        Sidecar(pool_name, good, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        engines(pool_name, 2) as (by_file, by_name),
    ):
        sidecar.ready("good")
        sidecar.ready("model", LOADING)
        by_file.start(engine_side.attempt, "safe_open", shard(folder, 2))
        by_name.start(engine_side.attempt, "open", "model")
        for engine in (by_file, by_name):
            engine.says("waiting for the sidecar")
        with open(folder / "2.safetensors", "r+b") as file:  # somebody is downloading it again
            file.truncate(20)
        release(folder / "2.safetensors")
        name, text = by_name.result(10)
        assert name == "NotReady" and "could not load 'model'" in text
        assert by_file.result(10)[0] == "SafetensorError"  # the file's own fault, in safetensors' words
        sidecar.interrupt()


def test_many_threads_wait_together(pool_name: str, folder: Path, truth: list[dict[str, str]]) -> None:
    hold(folder / "0.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name, BALLAST_MODE="require") as engine,
    ):
        sidecar.ready("model", LOADING)
        engine.start(engine_side.load_in_threads, [shard(folder, number % SHARDS) for number in range(24)])
        assert engine.busy(0.5)
        release(folder / "0.safetensors")
        assert engine.result(20) == [truth[number % SHARDS] for number in range(24)]
        assert len([line for line in engine.lines if "comes from memory" in line]) == 1
        sidecar.interrupt()


# Times, in this process


def test_how_long_it_waits(pool_name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(folder / "0.safetensors")
    with Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar:
        sidecar.ready("model", LOADING)
        monkeypatch.setenv("BALLAST_POOL", pool_name)
        for limit in (0.0, 0.6):
            began = time.monotonic()
            with pytest.raises(NotReady, match="not ready after"):
                engine_shim.open("model", wait=limit)
            assert limit <= time.monotonic() - began < limit + 5
        monkeypatch.setenv("BALLAST_WAIT", "0.3")
        began = time.monotonic()
        with pytest.raises(NotReady):
            engine_shim.open("model")
        assert time.monotonic() - began < 5
        # A dead sidecar is waited for as long as a restart takes, and no longer.
        sidecar.kill()
        monkeypatch.setattr(ladder, "RESTART_GRACE", 0.7)
        began = time.monotonic()
        with pytest.raises(HandoffError):
            engine_shim.open("model", wait=60)
        assert 0.6 < time.monotonic() - began < 10
    forget_pools()
    purge(PoolPaths(pool_name))


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = ladder.Progress()
    for second in range(12):
        now[0] = 100.0 + second
        progress.tell(Generation(1, "m", "checkpoint", LOADING, 12 << 30, second << 30))
    assert lines.take() == [
        f"waiting for the sidecar, which has loaded {done} of 12.00 GiB of m ({share} %)"
        for done, share in (("0 B", 0), ("5.00 GiB", 41), ("10.00 GiB", 83))
    ]
