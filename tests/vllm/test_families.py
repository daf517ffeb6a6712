"""Every family of models: from disk, the first start, which publishes, and one that attaches. Tokens and every tensor equal."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from families import FAMILIES

from sidecar.parity import compare_trees
from tests.conftest import left_behind
from tests.processes import Sidecar

NAMES = list(FAMILIES)
RUNS = ("disk", "first", "attached")


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
def runs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(folder=tmp_path_factory.mktemp("dumps"))
    pool = f"t-vllm-{secrets.token_hex(4)}"
    with Sidecar(pool, *(checkpoints / name for name in NAMES)) as sidecar:
        for name in NAMES:
            sidecar.ready(name)
        for way in RUNS:
            jobs = []
            for name in NAMES:
                dumps = made.folder / way / name
                dumps.mkdir(parents=True)
                jobs.append(
                    {"model": str(checkpoints / name), "embed": name == "bert", "env": {"BALLAST_PARITY": str(dumps)}}
                )
            results, logs = run(jobs, pool if way != "disk" else f"none-{pool}", BALLAST_WAIT="20" if way != "disk" else "0")
            for name, result, log in zip(NAMES, results, logs, strict=True):
                made.results[f"{way} {name}"], made.logs[f"{way} {name}"] = result, log
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
def test_the_next_start_attaches(runs: Runs, name: str) -> None:
    log = runs.logs[f"attached {name}"]
    level = "loaded and processed" if "moe" in name or name == "mixtral" else "loaded"
    assert f"{name} comes from memory as it was after loading ({level})" in log, log[-3000:]
    assert "published" not in log
    assert "Loading weights took" not in log


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", RUNS[1:])
def test_answers_are_those_of_the_disk(runs: Runs, name: str, way: str) -> None:
    what = "embeddings" if name == "bert" else "tokens"
    disk = runs.results[f"disk {name}"][what]
    assert runs.results[f"{way} {name}"][what] == disk
    assert len({json.dumps(answer) for answer in disk}) > 1, "all prompts have the same answer, so this proves nothing"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["loaded", "final"])
@pytest.mark.parametrize("way", RUNS[1:])
def test_every_tensor_is_that_of_the_disk(runs: Runs, name: str, stage: str, way: str) -> None:
    disk, other = runs.dump("disk", name, stage), runs.dump(way, name, stage)
    if way == "attached" and stage == "loaded":  # experts are bound as post-processing left them
        for dump in (disk, other):
            dump["tensors"] = [row for row in dump["tensors"] if "experts" not in row[0]]
    assert compare_trees(disk, other) == []
    assert len(disk["tensors"]) > 5
