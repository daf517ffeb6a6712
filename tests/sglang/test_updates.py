"""Weights are replaced in an engine that is attached: right results, the shared copy untouched, and it is said."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ATTACHED, Engines, adopted

from engine_shim.handoff import attachment
from tests.processes import Sidecar, ballast

MODEL = "qwen2"


@pytest.fixture
def served(engines: Engines, checkpoints: Path, tmp_path: Path, pool: str) -> Iterator[tuple[Sidecar, Path, Path]]:
    """A sidecar that has the state of a model, that model, and a fine-tune of it."""
    from safetensors.torch import load_file, save_file

    tuned = tmp_path / "tuned"
    shutil.copytree(checkpoints / MODEL, tuned)
    for shard in tuned.glob("*.safetensors"):
        tensors = {name: (tensor.float() * 0.9).to(tensor.dtype) for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, {"format": "pt"})
    with Sidecar(pool, checkpoints / MODEL) as sidecar:
        sidecar.ready(MODEL)
        engines.run(checkpoints / MODEL, pool)
        adopted(sidecar, 1)
        yield sidecar, checkpoints / MODEL, tuned
        sidecar.interrupt()


def shared_bytes(sidecar: Sidecar) -> str:
    """A digest of every published byte."""
    state = hashlib.blake2b()
    for path in sorted(sidecar.paths.dir.glob(f"ballast-{sidecar.paths.pool}.g*.w*")):
        state.update(path.read_bytes())
    return state.hexdigest()


def notes(sidecar: Sidecar) -> list[str]:
    return [record.note for record in attachment.alive(sidecar.paths)]


def test_update_from_disk(engines: Engines, served: tuple[Sidecar, Path, Path]) -> None:
    sidecar, model, tuned = served
    before = shared_bytes(sidecar)
    right, _ = engines.run(tuned)
    engine = engines.start(model, sidecar.paths.pool, update=str(tuned), then="hang")
    result = engine.result()
    assert ATTACHED in engine.log
    assert result["update"][0] is True, result["update"]
    assert result["updated"] == right["answers"] != result["answers"]
    assert shared_bytes(sidecar) == before
    assert "update_weights_from_disk: this engine's weights are no longer shared" in engine.log, engine.log[-3000:]
    assert notes(sidecar) == ["no longer shared: update_weights_from_disk"]
    shown = ballast("status", "--pool", sidecar.paths.pool)
    assert "no longer shared: update_weights_from_disk" in " ".join(shown.stdout.split())
    told = json.loads(ballast("status", "--pool", sidecar.paths.pool, "--json").stdout)
    assert "no longer shared" in json.dumps(told)
    # Another engine gets what was published, while the first goes on with its own.
    result, log = engines.run(model, sidecar.paths.pool)
    disk, _ = engines.run(model)
    assert ATTACHED in log and result["answers"] == disk["answers"]
    engine.kill()


def test_update_from_tensors_of_the_engine_that_published(engines: Engines, served: tuple[Sidecar, Path, Path]) -> None:
    sidecar, model, _ = served
    before = shared_bytes(sidecar)
    tensors = {"model.norm.weight": 0.5}
    right, _ = engines.run(model, tensors=tensors)
    result, log = engines.run(model, sidecar.paths.pool, tensors=tensors)
    assert ATTACHED in log
    assert result["updated"] == right["updated"] != result["answers"]
    assert result["answers"] == right["answers"]
    assert shared_bytes(sidecar) == before
    assert "update_weights_from_tensor: this engine's weights are no longer shared" in log


def test_an_update_that_fails_is_told_as_well(engines: Engines, served: tuple[Sidecar, Path, Path], tmp_path: Path) -> None:
    """SGLang reads the old weights again: they are right, and the engine's own."""
    sidecar, model, tuned = served
    for shard in sorted(tuned.glob("*.safetensors"))[1:]:
        shard.write_bytes(b"\0" * 100)
    _, log = engines.run(model, sidecar.paths.pool, update=str(tuned), fails=True)
    assert ATTACHED in log
    assert "no longer shared" in log, log[-3000:]


def test_an_engine_that_shares_nothing_says_nothing(engines: Engines, served: tuple[Sidecar, Path, Path]) -> None:
    _, model, tuned = served
    _, log = engines.run(model, update=str(tuned))
    assert "no longer shared" not in log
