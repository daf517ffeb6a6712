"""Every family of models: from disk, the first start, which publishes, and one that attaches. Tokens, log probabilities and
every tensor equal."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import ATTACHED, Engines, adopted
from families import NAMES

from sidecar.parity import compare_trees
from tests.conftest import left_behind
from tests.processes import Sidecar

WAYS = ("disk", "first", "attached")


@dataclass
class Runs:
    """What each of the three processes told of each model."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def dump(self, way: str, name: str, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / way / name / f"target-0-{stage}.json").read_text())
        return found


@pytest.fixture(scope="module")
def runs(engines: Engines, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(folder=tmp_path_factory.mktemp("dumps"))
    pool = f"t-sglang-{secrets.token_hex(4)}"
    with Sidecar(pool, *(checkpoints / name for name in NAMES)) as sidecar:
        for name in NAMES:
            sidecar.ready(name)
        for count, name in enumerate(NAMES, 1):
            for way in WAYS:
                dumps = made.folder / way / name
                dumps.mkdir(parents=True)
                made.results[f"{way} {name}"], made.logs[f"{way} {name}"] = engines.run(
                    checkpoints / name, pool if way != "disk" else None, {"BALLAST_PARITY": str(dumps)}
                )
                if way == "first":
                    adopted(sidecar, count)
        yield made
        sidecar.interrupt()
    assert not left_behind(pool)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_start_loads_from_the_pool_and_publishes(runs: Runs, name: str) -> None:
    log = runs.logs[f"first {name}"]
    assert f"{name} comes from memory: generation" in log, log[-3000:]
    assert f"published the state of {name}" in log, log[-3000:]
    assert "not published" not in log


@pytest.mark.parametrize("name", NAMES)
def test_the_next_start_attaches_and_reads_nothing(runs: Runs, name: str) -> None:
    log = runs.logs[f"attached {name}"]
    assert f"{name} {ATTACHED} (loaded)" in log, log[-3000:]
    assert "published" not in log
    assert "loading shards" not in log, "SGLang has read weights"
    assert f"{name} comes from memory: generation" not in log, "the checkpoint's tensors were opened"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS[1:])
def test_tokens_and_log_probabilities_are_those_of_the_disk(runs: Runs, name: str, way: str) -> None:
    disk = runs.results[f"disk {name}"]["answers"]
    assert runs.results[f"{way} {name}"]["answers"] == disk
    told = {json.dumps([row[0] for row in answer]) for answer in disk}
    assert len(told) > 1, "all prompts have the same answer, so this proves nothing"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["loaded", "final"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_every_tensor_is_that_of_the_disk(runs: Runs, name: str, stage: str, way: str) -> None:
    disk, other = runs.dump("disk", name, stage), runs.dump(way, name, stage)
    assert compare_trees(disk, other) == []
    assert len(disk["tensors"]) > 5


def test_what_a_model_makes_of_its_weights_comes_back(runs: Runs) -> None:
    """Latent attention has two tensors that are neither parameters nor buffers, made at the end of loading."""
    made = [row for row in runs.dump("attached", "deepseek-v2", "final")["tensors"] if row[1] == "attribute"]
    assert {row[0].rpartition(".")[2] for row in made} >= {"w_kc", "w_vc"}, made
    assert all(row[8] for row in made), "one has no bytes"
