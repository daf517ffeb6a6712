"""A GPU's memory and vLLM, by vLLM's own code over the emulated driver: mapped weights of target and draft count exactly once,
whatever was forecast, and nothing of vLLM's writes to them."""

from __future__ import annotations

import json
import math
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, PYTHON, engine_environment, run

from tests.device.emulated import MIB, A, Machine, build, contents, resident
from tests.processes import Sidecar


@pytest.fixture(scope="module")
def told(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    library = build(tmp_path_factory.mktemp("driver"))
    machine = Machine(library, {A: 1024 * MIB})
    pool = f"t-vllm-gpu-{secrets.token_hex(4)}"
    model, draft = str(checkpoints / "llama"), str(checkpoints / "llama-tied")
    speculative = {"num_speculative_tokens": 2, "method": "draft_model", "model": draft}
    try:
        with Sidecar(pool, model, draft, args=["--device", A], env=machine.environ()) as sidecar:
            for name in ("llama", "llama-tied"):
                sidecar.ready(name)
            run([{"model": model, "args": {"speculative_config": speculative}}], pool)
            for number in (3, 4):  # the states of target and draft, after the two checkpoints
                resident(sidecar.paths, number, {A})
            sizes = [sum(contents(sidecar.paths, number).segments) for number in (3, 4)]  # type: ignore[union-attr]
            done = subprocess.run(
                [PYTHON, str(HERE / "device_side.py"), str(library), json.dumps({"model": model, "draft": draft})],
                env=engine_environment(pool, **machine.environ()), capture_output=True, text=True, timeout=600, cwd="/",
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            assert lines, done.stdout[-3000:] + done.stderr[-6000:]
            yield {**json.loads(lines[0].split(" ", 1)[1]), "published": sorted(sizes)}
    finally:
        machine.close()


def test_a_draft_is_found_before_it_is_loaded(told: dict[str, Any]) -> None:
    assert told["roles"] == ["target", "draft"]
    assert sorted(told["sizes"]) == told["published"] and told["mapped"]["forecast"] == sum(told["sizes"])


@pytest.mark.parametrize("way", ["mapped", "forecast without the draft", "draft its own", "all its own"])
def test_weights_count_exactly_once(told: dict[str, Any], way: str) -> None:
    assert told[way]["cache"] == math.ceil(told["total"] * 0.5) - sum(told["sizes"])


@pytest.mark.parametrize(
    "call",
    ["reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "load_weights",
     "of the draft"],
)  # fmt: skip
def test_with_graphs_writing_is_refused(told: dict[str, Any], call: str) -> None:
    assert "which other engines share: start the engine with BALLAST_STATE=0" in told["refused"][call]


def test_waking_up_copies_nothing_over_what_is_shared(told: dict[str, Any]) -> None:
    assert told["shared after waking"] is True
    assert told["own buffer after waking"] == [1.0] * 4  # and what is the engine's own comes back


def test_without_graphs_what_is_written_is_private_first(told: dict[str, Any]) -> None:
    assert told["private now"] == [True, True] and told["written"] == [True, True] and told["shared afterwards"] is True


def test_post_processing_writes_to_memory_of_its_own(told: dict[str, Any]) -> None:
    assert told["processed in place"] is True and told["shared after processing"] is True
    assert told["not processed, still shared"] == [f"norm.t{index}" for index in range(4)]


def test_a_load_balancer_that_moves_experts_shares_nothing(told: dict[str, Any]) -> None:
    assert "--enable-eplb" in told["eplb"] and told["eplb counts"] == 0
