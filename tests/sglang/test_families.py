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
from families import LINEAR
from families import NAMES as SMALL

from sidecar.parity import compare_trees, read_dumps
from tests.conftest import left_behind
from tests.processes import Sidecar

SMOLLM2 = "SmolLM2"  # the real one
NAMES = (*SMALL, SMOLLM2)
WAYS = ("disk", "first", "attached")


@dataclass
class Runs:
    """What each of the three processes told of each model."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
    models: dict[str, Path] = field(default_factory=dict)

    def dump(self, way: str, name: str, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / way / name / f"target-0-{stage}.json").read_text())
        return found


@pytest.fixture(scope="module")
def runs(
    engines: Engines, checkpoints: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    made = Runs(folder=tmp_path_factory.mktemp("dumps"))
    made.models = {**{name: checkpoints / name for name in SMALL}, SMOLLM2: smollm2}
    pool = f"t-sglang-{secrets.token_hex(4)}"
    with Sidecar(pool, *made.models.values()) as sidecar:
        for model in made.models.values():
            sidecar.ready(model.name)
        for count, (name, model) in enumerate(made.models.items(), 1):
            for way in WAYS:
                dumps = made.folder / way / name
                dumps.mkdir(parents=True)
                made.results[f"{way} {name}"], made.logs[f"{way} {name}"] = engines.run(
                    model, pool if way != "disk" else None, {"BALLAST_PARITY": str(dumps)}
                )
                if way == "first":
                    adopted(sidecar, count)
        yield made
        sidecar.interrupt()
    assert not left_behind(pool)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_start_loads_from_the_pool_and_publishes(runs: Runs, name: str) -> None:
    log, called = runs.logs[f"first {name}"], runs.models[name].name
    assert f"{called} comes from memory: generation" in log, log[-3000:]
    assert f"published the state of {called}" in log, log[-3000:]
    assert "not published" not in log


@pytest.mark.parametrize("name", NAMES)
def test_the_next_start_attaches_and_reads_nothing(runs: Runs, name: str) -> None:
    log, called = runs.logs[f"attached {name}"], runs.models[name].name
    assert f"{called} {ATTACHED} (loaded)" in log, log[-3000:]
    assert "published" not in log
    assert "loading shards" not in log, "SGLang has read weights"
    assert f"{called} comes from memory: generation" not in log, "the checkpoint's tensors were opened"


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


def test_views_for_convolutions_come_back_as_views(
    engines: Engines, checkpoints: Path, pool: str, tmp_path: Path
) -> None:
    """Linear attention keeps its convolution's weight in a second shape. Loading only."""
    told = {}
    with Sidecar(pool, checkpoints / LINEAR) as sidecar:
        sidecar.ready(LINEAR)
        for way in WAYS:
            (tmp_path / way).mkdir()
            environ = {"BALLAST_PARITY": str(tmp_path / way)}
            _, log = engines.run(
                checkpoints / LINEAR, pool if way != "disk" else None, environ, only="load",
                args={"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
            )  # fmt: skip
            told[way] = read_dumps(tmp_path / way)
            if way == "first":
                adopted(sidecar, 1)
        assert ATTACHED in log, log[-3000:]
        sidecar.interrupt()
    for way in WAYS[1:]:
        for stage, dump in told["disk"].items():
            assert compare_trees(dump, told[way][stage]) == [], f"{way} {stage}"
    rows = {row[0]: row for row in told["attached"]["target-0-final"]["tensors"]}
    views = {name: row for name, row in rows.items() if name.endswith(".conv_weights")}
    assert views
    for name, row in views.items():
        whole = rows[name.replace("attn.conv_weights", "conv1d.weight")]
        assert row[7] == whole[7] and row[4] != whole[4], "it is a copy now"
