"""Whatever is wrong, an engine ends with the weights that it would have had, and one line says why; or it stops with that."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import FAILED, LOADING
from engine_shim.handoff.names import PoolPaths
from sidecar.pool import purge
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.processes import Sidecar

SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(SHARDS):
        Checkpoint({f"{number}.w": entry("F32", (1000 + number,), number)}).write(folder / f"{number}.safetensors")
    return folder


def load(engine: Engine, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for number in range(SHARDS):
        found.update(engine(engine_side.load, "safe_open", str(folder / f"{number}.safetensors")))
    return found


@pytest.fixture
def truth(folder: Path) -> dict[str, str]:
    with Engine() as engine:
        return load(engine, folder)


# What can be wrong: each context prepares it, and the environment that an engine starts in


@contextmanager
def no_pool(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    yield {}


@contextmanager
def no_directory(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    yield {"BALLAST_DIR": str(folder / "absent")}


@contextmanager
def other_model(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    other = folder.parent / "other.safetensors"
    Checkpoint({"x": entry("F32", (5,))}).write(other)
    with Sidecar(pool, other) as sidecar:
        sidecar.ready("other")
        yield {}
        sidecar.interrupt()


@contextmanager
def changed_files(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    """Changed before they were loaded anew: what the sidecar holds is another version."""
    copy = folder.parent / "before"
    shutil.copytree(folder, copy)
    for number in range(SHARDS):
        Checkpoint({f"{number}.w": entry("F32", (1000 + number,), 50)}).write(copy / f"{number}.safetensors")
    with Sidecar(pool, copy) as sidecar:
        sidecar.ready("before")
        yield {}
        sidecar.interrupt()


@contextmanager
def failed(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    """One file of the model is no longer what its header promises; the engine wants the others."""
    good = folder.parent / "good.safetensors"
    Checkpoint({"x": entry("F32", (5,))}).write(good)
    (folder / "9.safetensors").write_bytes(b"\x10")
    with Sidecar(pool, good, folder) as sidecar:
        sidecar.ready("good")
        sidecar.ready("model", FAILED)
        yield {}
        sidecar.interrupt()


@contextmanager
def still_loading(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    hold(folder / "0.safetensors")
    with Sidecar(pool, folder, env=instrumented(folder.parent, HOLDING)) as sidecar:
        sidecar.ready("model", LOADING)
        yield {"BALLAST_WAIT": "0.5"}
        release(folder / "0.safetensors")
        sidecar.interrupt()


@contextmanager
def died_loading(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    hold(folder / "0.safetensors")
    with Sidecar(pool, folder, env=instrumented(folder.parent, HOLDING)) as sidecar:
        sidecar.ready("model", LOADING)
        sidecar.kill()
    yield {"BALLAST_WAIT": "1"}
    purge(PoolPaths(pool))


@contextmanager
def just_started(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    """A control page without a catalog: its sidecar died as soon as this."""
    from engine_shim.handoff.catalog import ControlPage

    page = ControlPage.create_or_open(PoolPaths(pool))
    page.close()
    yield {}
    purge(PoolPaths(pool))


@contextmanager
def unknown_model(pool: str, folder: Path) -> Iterator[dict[str, str]]:
    with Sidecar(pool, folder) as sidecar:
        sidecar.ready("model")
        yield {"BALLAST_MODEL": "another"}
        sidecar.interrupt()


Wrong = Callable[[str, Path], AbstractContextManager[dict[str, str]]]
CASES = [
    (no_pool, "start the sidecar with 'ballast serve'"),
    (no_directory, "check BALLAST_DIR"),
    (other_model, "does not hold it (it holds other)"),
    (changed_files, "other content, as a fine-tune has"),
    (failed, "the sidecar could not load 'model'"),
    (still_loading, "the sidecar has not finished loading 'model' after BALLAST_WAIT"),
    (died_loading, "the sidecar died while loading 'model'; restart it with 'ballast serve'"),
    (just_started, "its sidecar is just starting, or died doing so"),
    (unknown_model, "does not hold it (it holds model)"),
]


@pytest.mark.parametrize(("wrong", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_engine_has_its_weights_and_one_line(
    pool_name: str, folder: Path, truth: dict[str, str], wrong: Wrong, words: str
) -> None:
    with (
        wrong(pool_name, folder) as environment,
        Engine(pool_name, **environment) as engine,
        Engine(pool_name, BALLAST_MODE="require", **environment) as strict,
    ):
        # Both at once, since some of them wait.
        path = str(folder / "0.safetensors")
        strict.start(engine_side.attempt, "safe_open", path)
        assert load(engine, folder) == truth
        said = [line for line in engine.lines if not line.startswith("waiting for")]
        assert len(said) == 1 and words in said[0], engine.lines
        assert said[0].startswith(f"{folder} is not taken from memory: ")
        assert said[0].endswith(" (loading without Ballast)")

        name, text = strict.result()
        assert name == "HandoffError" and words in text
        assert text.endswith("(BALLAST_MODE=require: not loading without Ballast)")
        assert not [line for line in strict.lines if not line.startswith("waiting for")]
        assert engine(engine_side.segments) == {} == strict(engine_side.segments)


@pytest.mark.parametrize("mode", ["off", " OFF "])
def test_off_is_off(pool_name: str, folder: Path, truth: dict[str, str], mode: str) -> None:
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        with Engine(pool_name, BALLAST_MODE=mode) as engine:
            assert load(engine, folder) == truth
            assert engine(engine_side.segments) == {} and engine.log == ""
        with Engine(pool_name) as engine:  # switched off in the middle of it
            assert load(engine, folder) == truth
            lines = engine.lines
            engine(engine_side.settings, {"BALLAST_MODE": mode})
            assert load(engine, folder) == truth
            assert engine.lines == lines
        sidecar.interrupt()


def test_a_dead_sidecars_pool_is_still_good(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """What is whole stays whole, whoever lives: engines go on attaching between a sidecar's death and its restart."""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        sidecar.kill()
    with Engine(pool_name, BALLAST_MODE="require") as engine:
        assert load(engine, folder) == truth
        assert engine(engine_side.load, "open", "model") == truth
        # But what it does not hold is not waited for.
        began = time.monotonic()
        name, _ = engine(engine_side.attempt, "open", "other")
        assert name == "NotFound" and time.monotonic() - began < 5
    purge(PoolPaths(pool_name))


def test_settings_that_make_no_sense(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    settings: list[tuple[dict[str, str], str]] = [
        ({"BALLAST_MODE": "sometimes"}, "BALLAST_MODE=sometimes is none of auto, require and off; taken as auto"),
        ({"BALLAST_WAIT": "a while"}, "BALLAST_WAIT is not a number of seconds; taken as 600"),
        ({"BALLAST_WAIT": "-5"}, ""),
        ({"BALLAST_WAIT": "nan"}, "BALLAST_WAIT is not a number of seconds; taken as 600"),
        ({"BALLAST_WAIT": "inf"}, ""),
        ({"BALLAST_LOG": "loudly"}, ""),
        ({"BALLAST_WAIT": ""}, ""),
    ]
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        for environment, line in settings:
            with Engine(pool_name, **environment) as engine:
                assert load(engine, folder) == truth
                said = engine.lines
                assert said[-1].startswith("model comes from memory") and said[:-1] == ([line] if line else [])
        sidecar.interrupt()


def test_the_log_has_levels(pool_name: str, folder: Path) -> None:
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        for level, count in (("WARNING", 0), ("ERROR", 0), ("debug", 1), ("INFO", 1)):
            with Engine(pool_name, BALLAST_LOG=level) as engine:
                load(engine, folder)
                assert len([line for line in engine.lines if "comes from memory" in line]) == count
        sidecar.interrupt()


def test_files_that_are_none(pool_name: str, folder: Path) -> None:
    """The original says what is wrong with them, in its own words."""
    (folder / "broken.safetensors").write_bytes(b"broken")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    paths = [folder / name for name in ("absent.safetensors", "broken.safetensors", "folder.safetensors")]
    with Sidecar(pool_name, folder / "0.safetensors") as sidecar, Engine() as plain, Engine(pool_name) as engine:
        sidecar.ready("0")
        for path in [*map(str, paths), "", "\0", "x" * 5000]:
            expected = plain(engine_side.attempt, "safe_open", path)
            assert expected is not None
            assert engine(engine_side.attempt, "safe_open", path) == expected
        sidecar.interrupt()
