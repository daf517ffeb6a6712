"""Generations come and go while engines come, go and are killed: what an engine has got is always one version, whole."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

import pytest

from engine_shim import ladder
from engine_shim.handoff import attachment
from engine_shim.handoff.catalog import Catalog, ControlPage
from engine_shim.handoff.errors import NotFound
from engine_shim.handoff.names import PoolPaths
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine, engines
from tests.never_wrong.loading import loading
from tests.never_wrong.logs import Lines


def test_the_order_of_attaching(
    pool_paths: PoolPaths, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record first, then a second look at the catalog: what is being retired is not attached, though it is still there."""
    Checkpoint({"w": entry("F32", (9,))}).write(tmp_path / "m.safetensors")
    monkeypatch.setenv("BALLAST_POOL", pool_paths.pool)
    looks = []
    really = ControlPage.read

    def read(page: ControlPage) -> Catalog:
        looks.append(len(list(attachment.alive(pool_paths))))
        return really(page)

    with loading(pool_paths) as pool:
        pool.load(tmp_path / "m.safetensors")
        view = ladder.Pool(pool_paths)
        [generation] = view.catalog().of_model("m")
        contents = view.manifest(generation)
        with monkeypatch.context() as patch:
            patch.setattr(ControlPage, "read", read)
            held = view.attach(generation, contents)
        assert looks == [1]
        assert view.attach(generation, contents)[0]
        pool.pool.retire(generation.number)
        assert pool.pool.collect() == 0
        with pytest.raises(
            NotFound, match="was replaced just now"
        ):  # a table read by another view, maybe of another pool
            ladder.Pool(pool_paths).attach(generation, contents)
        for other in (view, ladder.Pool(pool_paths)):
            again = other.manifest(generation)
            with pytest.raises(NotFound, match="was retired just now"):
                other.attach(generation, again)
        assert len(list(attachment.alive(pool_paths))) == 1
        assert bytes(held[0])[:4] == entry("F32", (9,))[2][:4]
        del held
        gc.collect()
        assert pool.pool.collect() > 0


def test_engines_under_a_sidecar_that_never_rests(pool_paths: PoolPaths, tmp_path: Path) -> None:
    """Freed is what nobody holds, and only that: an engine that has just attached is never left with a name that is gone."""
    versions = []
    for number in range(2):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        for part in range(3):
            Checkpoint({f"{part}.w": entry("F32", (2000,), 10 * number + part)}).write(folder / f"{part}.safetensors")
        versions.append(folder)
    contents = []
    for folder in versions:
        found: dict[str, str] = {}
        for path in sorted(folder.iterdir()):
            found.update(engine_side.fingerprints(engine_side.by_safe_open(str(path))))
        contents.append(found)
    dice = random.Random(1)
    with loading(pool_paths) as pool, engines(pool_paths.pool, 2) as steady:
        pool.load(versions[0])
        for engine in steady:
            engine.start(engine_side.open_for, 3.0, "m")
        deadline = time.monotonic() + 3.0
        turn = 0
        while time.monotonic() < deadline:
            turn += 1
            with Engine(pool_paths.pool) as victim:
                victim.start(engine_side.open_for, 60.0, "m")
                for _ in range(dice.randint(1, 3)):
                    turn += 1
                    pool.load(versions[turn % 2])
                    pool.pool.collect()
                pool.pool.sweep()
                victim.kill()
        for engine in steady:
            count, seen = engine.result()
            assert count > 20
            assert all(found in contents for found in seen)
            assert len(seen) == 2, "it has seen no change, so nothing was tested"
        assert turn > 10
        for generation in pool.pool.catalog.generations:
            pool.pool.retire(generation.number)
        for engine in steady:
            engine(engine_side.settings, {})
        pool.pool.collect()
        pool.pool.sweep()
        assert not list(attachment.alive(pool_paths))
        assert [name.kind for name in pool_paths.objects()] == ["ctl"]
