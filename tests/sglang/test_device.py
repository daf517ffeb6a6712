"""A GPU's memory and SGLang, by SGLang's own code over the emulated driver: what lies there is mapped, counts exactly once, and
is written to by nobody. Not yet run on a device."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ATTACHED, Engines, adopted

from tests.device.emulated import MIB, A, B, Machine, build, contents, resident
from tests.processes import Sidecar, ballast

MAPPED = "lies in the memory of"
COPIED = "is copied instead of mapped"
SHARED = "which other engines share: start the engine with BALLAST_STATE=0, or with --disable-cuda-graph"
WRITING = [
    "enable_memory_saver", "enable_eplb", "elastic_ep_backend", "cpu_offload_gb", "offload_group_size", "custom_weight_loader",
    "checkpoint_engine_wait_weights_before_ready", "remote_instance_weight_loader_start_seed_via_transfer_engine",
]  # fmt: skip
FRACTION = 0.5  # of memory that SGLang may use


class World:
    """A sidecar that keeps states on GPU A, and what SGLang made of them."""

    def __init__(self, engines: Engines, machine: Machine, sidecar: Sidecar, model: Path, draft: Path | None = None) -> None:
        self._engines, self.machine, self.sidecar = engines, machine, sidecar
        self.model = model
        self.draft = draft
        self.logs: dict[str, str] = {}
        self.told: dict[str, Any] = {}
        self.numbers: list[int] = []  # of the states

    def run(self, name: str, pool: bool = True, gpu: dict[str, Any] | None = None, **job: Any) -> dict[str, Any]:
        args = {"mem_fraction_static": FRACTION, **job.pop("args", {})}
        if self.draft is not None:
            job["draft"] = str(self.draft)
            args["speculative_draft_model_path"] = str(self.draft)
        self.told[name], self.logs[name] = self._engines.run(
            self.model, self.sidecar.paths.pool if pool else None, self.machine.environ(), args=args,
            gpu={"library": str(self.machine.library), **(gpu or {})}, **job,
        )  # fmt: skip
        return self.told[name]  # type: ignore[no-any-return]

    def published(self, count: int) -> list[int]:
        numbers = adopted(self.sidecar, count)
        for number in numbers:
            resident(self.sidecar.paths, number)
        return numbers

    def intact(self) -> bool:
        """Whether every byte on the GPU is what was published."""
        done = ballast("verify", "--device", "--pool", self.sidecar.paths.pool, env=self.machine.environ())
        return done.returncode == 0 and A in done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def world(engines: Engines, library: Path, model: Path, draft: Path | None = None, gpus: str = A) -> Iterator[World]:
    machine = Machine(library, {A: 256 * MIB, B: 256 * MIB})
    pool = f"t-sglang-gpu-{secrets.token_hex(4)}"
    served = [model] if draft is None else [model, draft]
    try:
        with Sidecar(pool, *served, args=["--device", gpus], env=machine.environ()) as sidecar:
            for one in served:
                sidecar.ready(one.name)
            yield World(engines, machine, sidecar, model, draft)
            sidecar.interrupt()
    finally:
        machine.close()


@pytest.fixture(scope="module")
def pair(engines: Engines, library: Path, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Target and draft, published by the first and mapped by the next."""
    draft = tmp_path_factory.mktemp("draft") / "drafter"
    shutil.copytree(checkpoints / "qwen2", draft)
    for made in world(engines, library, checkpoints / "llama", draft):
        made.run("disk", pool=False, gpu={"name": "cuda:1"})
        made.run("first", only="load")
        made.numbers = made.published(2)
        made.run("mapped", gpu={"sleep": True})
        yield made


def parameters(names: list[str]) -> set[str]:
    return {name for name in names if name.endswith("weight") and "norm" not in name}


def test_weights_are_mapped_and_nothing_else(pair: World) -> None:
    first, mapped = pair.told["first"], pair.told["mapped"]
    assert first["shared"] == [[], []] and MAPPED not in pair.logs["first"]
    assert pair.logs["mapped"].count(MAPPED) == 2 and pair.logs["mapped"].count(ATTACHED) == 2
    for tree, shared in zip(mapped["trees"], mapped["shared"], strict=True):
        assert parameters(list(tree)) <= set(shared)
        assert not [name for name in shared if not name.endswith(("weight", "bias"))]  # such as the table of rotations
    assert mapped["trees"] == first["trees"] == pair.told["disk"]["trees"]
    assert mapped["answers"] == pair.told["disk"]["answers"]


def test_weights_count_exactly_once(pair: World) -> None:
    """Of a GPU of the same size SGLang leaves as much unused as after loading from disk, and nothing is counted twice."""
    disk, first, mapped = (pair.told[name] for name in ("disk", "first", "mapped"))
    copies = [sum(contents(pair.sidecar.paths, number).segments) for number in pair.numbers]  # type: ignore[union-attr]
    total = disk["total"]
    assert disk["free"] == total and mapped["free"] == total - sum(copies)
    assert mapped["preloaded"] == copies[0]  # the target's; its draft's runner tells of the other
    assert disk["cache"] == total * FRACTION - disk["own"]
    assert mapped["cache"] == total * FRACTION - sum(copies) - mapped["own"]
    assert first["preloaded"] == 0 and 0 < mapped["own"] < disk["own"] / 2


def test_what_is_wanted_is_kept_before_memory_is_measured(pair: World) -> None:
    assert pair.told["mapped"]["claims"] == pair.numbers
    assert pair.told["first"]["claims"] == [0] and pair.told["disk"]["claims"] == []


def test_release_and_resume_leave_what_is_shared_alone(pair: World) -> None:
    assert pair.intact()
    assert pair.told["mapped"]["shared afterwards"] == pair.told["mapped"]["shared"]


def test_with_graphs_writing_is_refused(pair: World, checkpoints: Path) -> None:
    other = str(checkpoints / "llama-tied")
    graphs = {"disable_cuda_graph": False, "attention_backend": "intel_amx"}  # with torch's own it captures none
    told = pair.run("graphs", gpu={"attempts": other, "arguments": ["log_level", *WRITING]}, args=graphs, only="load")
    assert told["attempts"] and all(SHARED in text for text in told["attempts"].values()), told["attempts"]
    raised = [name for name, text in told["attempts"].items() if text.startswith("Mismatch")]
    assert raised == ["reset_tensors", "load_weights"]  # a request is answered: what it raises would end the scheduler
    assert told["shared afterwards"] == told["shared"] != [[], []]
    assert pair.intact()


def test_without_graphs_what_is_written_is_private_first(pair: World, checkpoints: Path) -> None:
    told = pair.run("written", gpu={"attempts": str(checkpoints / "nothing")}, only="load")
    assert not [text for text in told["attempts"].values() if "other engines" in text]
    assert told["shared"][0] and told["shared afterwards"][0] == [] and told["shared afterwards"][1]
    assert "no longer shared" in pair.logs["written"]
    assert pair.intact()


def test_which_arguments_say_that_an_engine_writes_to_its_weights(pair: World) -> None:
    said = pair.told["graphs"]["arguments"]
    assert said["log_level"] == "" and all("other engines would share" in said[name] for name in WRITING), said


def test_an_engine_that_writes_to_its_weights_copies_them(pair: World) -> None:
    told = pair.run("writing", gpu={"argument": "enable_memory_saver"}, only="load")
    assert told["shared"] == [[], []] and told["trees"] == pair.told["disk"]["trees"]
    assert "other engines would share" in pair.logs["writing"] and ATTACHED in pair.logs["writing"]
    assert told["claims"] == [0] and told["free"] == told["total"]  # and has the room for it
    assert told["cache"] == pair.told["disk"]["cache"]
    pair.published(2)


def test_what_cannot_be_mapped_is_copied_and_its_copy_makes_room(pair: World) -> None:
    """A model that keeps tensors where no walk finds them: they would be without memory."""
    told = pair.run("hoard", gpu={"hoard": True}, only="load")
    assert COPIED in pair.logs["hoard"] and ATTACHED in pair.logs["hoard"]
    assert told["shared"] == [[], []] and told["trees"] == pair.told["disk"]["trees"]
    assert told["cache"] == pair.told["disk"]["cache"]  # what was taken when it was measured is free now, and told of
    pair.published(2)
    assert pair.intact()


@pytest.mark.parametrize("family", ["deepseek-v2", "qwen3-next", "qwen3-moe", "fp8"])
def test_families(engines: Engines, library: Path, checkpoints: Path, family: str) -> None:
    """What is made of weights at the end of loading, views, experts; and weights that post-processing requantises in place."""
    linear = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True} if family == "qwen3-next" else {}
    for made in world(engines, library, checkpoints / family):
        first = made.run("first", only="load", kernels=family == "fp8", args=linear)
        made.published(1)
        mapped = made.run("mapped", only="load", kernels=family == "fp8", args=linear)
        assert MAPPED in made.logs["mapped"] and COPIED not in made.logs["mapped"], made.logs["mapped"]
        assert mapped["trees"] == first["trees"]
        every, shared = set(first["trees"][0]), set(mapped["shared"][0])
        processed = {name for name in every if "_proj" in name} if family == "fp8" else set()
        wanted = {name for name in every if name.endswith(("proj.weight", "embed_tokens.weight", "w13_weight", "w2_weight"))}
        assert wanted - processed <= shared and not shared & processed, sorted(wanted ^ shared)
        assert made.intact()


def test_an_engine_of_several_ranks_copies(engines: Engines, library: Path, checkpoints: Path) -> None:
    """They would have to agree on what is mapped."""
    for made in world(engines, library, checkpoints / "llama", gpus=f"{A},{B}"):
        two: dict[str, Any] = {"only": "load", "ranks": 2, "args": {"tp_size": 2}}
        first = made.run("first", **two)
        numbers = made.published(2)
        on = [{copy.gpu for copy in resident(made.sidecar.paths, number).devices} for number in numbers]
        assert sorted(map(sorted, on)) == [[A], [B]]  # the state of each rank is where that rank was
        second = made.run("second", **two)
        assert "only engines of one map" in made.logs["second"] and MAPPED not in made.logs["second"]
        assert made.logs["second"].count(ATTACHED) == 2 and second["trees"] == first["trees"]
