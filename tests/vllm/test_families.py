"""Every family of models and format: from disk, the first start, which publishes, and one that attaches after that one was
killed. Tokens and every tensor equal. With BALLAST_TEST_VLLM_FULL, each attaches once more beside an engine that is attached.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import FULL, Engine
from families import FAMILIES, QUANTISED

from sidecar.parity import compare_trees
from tests.conftest import left_behind
from tests.processes import Sidecar

WAYS = ("first", "attached", *(("beside",) if FULL else ()))


@dataclass(frozen=True)
class Case:
    model: str
    args: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ("target",)

    def job(self, checkpoints: Path, dumps: Path) -> dict[str, Any]:
        args, more = dict(self.args), dict(self.more)
        if "speculative_config" in args:
            args["speculative_config"] = {**args["speculative_config"], "model": str(checkpoints / "llama-tied")}
        if "lora" in more:
            more["lora"] = str(checkpoints / more["lora"])
        return {"model": str(checkpoints / self.model), "args": args, **more, "env": {"BALLAST_PARITY": str(dumps)}}


CASES: dict[str, Case] = {
    **{name: Case(name) for name in (*FAMILIES, *QUANTISED)},
    "bert": Case("bert", more={"embed": True}),
    "blip2": Case("blip2", more={"image": True}),
    "float32": Case("qwen3", {"dtype": "float32"}),
    "adapter": Case("llama", {"enable_lora": True, "max_lora_rank": 8}, {"lora": "adapter"}),
    "draft": Case(
        "llama", {"speculative_config": {"num_speculative_tokens": 2, "method": "draft_model"}}, roles=("target", "draft")
    ),
}
ROLES = [(name, role) for name, case in CASES.items() for role in case.roles]


@dataclass
class Runs:
    """What each of the processes told of each case."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def dump(self, way: str, name: str, role: str, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / way / name / f"{role}-0-{stage}.json").read_text())
        return found

    def jobs(self, way: str, checkpoints: Path) -> list[dict[str, Any]]:
        found = []
        for name, case in CASES.items():
            dumps = self.folder / way / name
            dumps.mkdir(parents=True)
            found.append(case.job(checkpoints, dumps))
        return found

    def keep(self, way: str, engine: Engine) -> None:
        for name, result, log in zip(CASES, engine.results, engine.logs(), strict=True):
            self.results[f"{way} {name}"], self.logs[f"{way} {name}"] = result, log


@pytest.fixture(scope="module")
def runs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(folder=tmp_path_factory.mktemp("dumps"))
    pool = f"t-vllm-{secrets.token_hex(4)}"
    models = sorted({case.model for case in CASES.values()})
    with Sidecar(pool, *(checkpoints / model for model in models)) as sidecar:
        for model in models:
            sidecar.ready(model)
        with Engine(made.jobs("disk", checkpoints), f"none-{pool}", BALLAST_WAIT="0") as engine:
            engine.finish()
            made.keep("disk", engine)
        for way in WAYS[:2]:
            with Engine(made.jobs(way, checkpoints), pool) as engine:
                engine.wait_for("DONE", len(CASES))
                engine.kill()
                made.keep(way, engine)
        if FULL:
            _side_by_side(made, checkpoints, pool)
        yield made
        sidecar.interrupt()
    assert not left_behind(pool)


def _side_by_side(made: Runs, checkpoints: Path, pool: str) -> None:
    """Two engines in step: the one answers and stays, the other attaches and answers, both end the case."""
    steps = made.folder / "steps"
    steps.mkdir()
    first = made.jobs("holding", checkpoints)
    second = made.jobs("beside", checkpoints)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        one["until"] = str(steps / f"answered-{number}")
        other["after"] = str(steps / f"held-{number}")
        other["until"] = one["until"]
    with Engine(first, pool) as holding, Engine(second, pool) as beside:
        for number in range(len(CASES)):
            holding.wait_for("RESULT", number + 1)
            (steps / f"held-{number}").touch()
            beside.wait_for("RESULT", number + 1)
            (steps / f"answered-{number}").touch()
        beside.finish()
        made.keep("beside", beside)
        holding.finish()


@pytest.mark.parametrize("name", CASES)
def test_the_first_start_loads_from_the_pool_and_publishes(runs: Runs, name: str) -> None:
    log, case = runs.logs[f"first {name}"], CASES[name]
    if name == "draft":  # its target is the same model as without a draft: that state was published by then
        assert log.count(f"{case.model} comes from memory as it was after loading") == 1, log[-3000:]
        assert log.count("published the state of llama-tied") == 1, log[-3000:]
    else:
        told = (f"{case.model} comes from memory: generation", f"the pool holds no state of {case.model} ")
        assert any(line in log for line in told), log[-3000:]
        assert log.count("published the state of ") == 1 and "as it was after loading" not in log, log[-3000:]
    assert "not published" not in log


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS[1:])
def test_the_next_start_attaches(runs: Runs, name: str, way: str) -> None:
    log, model = runs.logs[f"{way} {name}"], CASES[name].model
    level = "loaded and processed" if "moe" in model or model == "mixtral" else "loaded"
    assert f"{model} comes from memory as it was after loading ({level})" in log, log[-3000:]
    assert log.count("comes from memory as it was after loading") == len(CASES[name].roles)
    assert "published" not in log
    assert "Loading weights took" not in log


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_disk(runs: Runs, name: str, way: str) -> None:
    what = "embeddings" if name == "bert" else "tokens"
    disk = runs.results[f"disk {name}"][what]
    assert runs.results[f"{way} {name}"][what] == disk
    assert len({json.dumps(answer) for answer in disk}) > 1, "all prompts have the same answer, so this proves nothing"
    if name == "adapter":
        assert disk != runs.results["disk llama"][what], "the adapter changes nothing, so this proves nothing"


@pytest.mark.parametrize(("name", "role"), ROLES)
@pytest.mark.parametrize("stage", ["loaded", "final"])
@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_is_that_of_the_disk(runs: Runs, name: str, role: str, stage: str, way: str) -> None:
    disk, other = runs.dump("disk", name, role, stage), runs.dump(way, name, role, stage)
    if way != "first" and stage == "loaded":  # experts are bound as post-processing left them
        for dump in (disk, other):
            dump["tensors"] = [row for row in dump["tensors"] if "experts" not in row[0]]
    assert compare_trees(disk, other) == []
    assert len(disk["tensors"]) > 5
