"""Beyond plain dense bf16: other element types, quantised weights, adapters, drafts, pipelines. Tokens equal, every time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run

from engine_shim.handoff.catalog import ENGINE, READY
from tests.conftest import left_behind
from tests.processes import Sidecar

ATTACHED = "comes from memory as it was after loading"
SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def draft(checkpoints: Path) -> dict[str, Any]:
    return {"model": str(checkpoints / "llama-tied"), "num_speculative_tokens": 2, "method": "draft_model"}


# name -> (checkpoint, arguments of the engine, more of the job, states that there are then, environment)
CASES: dict[str, tuple[str, Any, dict[str, Any], int, dict[str, str]]] = {
    "float32": ("qwen3", {"dtype": "float32"}, {}, 1, {}),
    "int8 weights and activations": ("w8a8", {}, {}, 1, {}),
    "an adapter on top": ("llama", {"enable_lora": True, "max_lora_rank": 8}, {"lora": "adapter"}, 1, {}),
    "a draft model": ("llama", lambda folder: {"speculative_config": draft(folder)}, {}, 2, {}),
    "two stages": ("qwen2", {"pipeline_parallel_size": 2}, {}, 2, SPAWNED),
}


@pytest.fixture(scope="module")
def sidecar(checkpoints: Path) -> Iterator[Sidecar]:
    pool = f"t-vllm-{secrets.token_hex(4)}"
    names = ("llama", "llama-tied", "qwen2", "qwen3", "w8a8")
    with Sidecar(pool, *(checkpoints / name for name in names)) as sidecar:
        for name in names:
            sidecar.ready(name)
        yield sidecar
        sidecar.interrupt()
    assert not left_behind(pool)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_disk(sidecar: Sidecar, checkpoints: Path, case: str) -> None:
    name, args, more, count, environ = CASES[case]
    job = {"model": str(checkpoints / name), "args": args(checkpoints) if callable(args) else args, **more}
    if "lora" in job:
        job["lora"] = str(checkpoints / job["lora"])
    before = states(sidecar)
    disk, _ = run([job], **environ)
    first, log = run([job], sidecar.paths.pool, **environ)
    deadline = time.monotonic() + 30
    while len(states(sidecar) - before) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(states(sidecar) - before) == count, log[0][-6000:]
    again, log = run([job], sidecar.paths.pool, **environ)
    assert first[0]["tokens"] == disk[0]["tokens"]
    assert again[0]["tokens"] == disk[0]["tokens"]
    assert log[0].count(ATTACHED) == count, log[0][-6000:]
    if "lora" in job:
        plain, _ = run([{key: value for key, value in job.items() if key != "lora"}], sidecar.paths.pool, **environ)
        assert plain[0]["tokens"] != disk[0]["tokens"], "the adapter changes nothing, so this proves nothing"


def states(sidecar: Sidecar) -> set[int]:
    return {g.number for g in sidecar.catalog.generations if g.kind == ENGINE and g.state == READY}
