"""A state is for one configuration: whatever changes the weights changes the key, and what does not leaves it alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, PYTHON, engine_environment

from tests.processes import Sidecar

Keys = dict[str, dict[str, Any]]

# What differs from the base -> the part of the key that must tell.
OTHER: dict[str, str] = {
    "float32": "dtype",
    "another length": "model",
    "an overridden configuration": "config",
    "another revision": "model",
    "two ranks": "parallel",
    "rank 1 of 2": "tp_rank",
    "two stages": "parallel",
    "stage 1 of 2": "pp_rank",
    "expert rank": "ep_rank",
    "data rank": "dp_rank",
    "loading otherwise": "loading",
    "an adapter's shape": "lora",
    "another environment": "environment",
    "packing off": "environment",
    "a prefix": "prefix",
    "the draft": "role",
    "a fine-tune": "checkpoint",
    "another configuration file": "checkpoint",
    "another family": "class",
    "another vLLM": "version",
    "another torch": "torch",
    "another transformers": "transformers",
    "another device": "device",
    "another processor": "capability",
    "quantised": "quantization",
    "quantised otherwise": "quantization_config",
}
BASES = {"quantised otherwise": "quantised"}  # where it is not the base that something differs from
SAME = ("another name", "another seed", "compiled", "a copy elsewhere", "another thread binding")


@pytest.fixture(scope="module")
def keys(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    folder = tmp_path_factory.mktemp("keys")
    base = str(checkpoints / "llama")
    copy = folder / "copy"
    shutil.copytree(base, copy)
    tuned = folder / "tuned"
    shutil.copytree(base, tuned)
    shard = sorted(tuned.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    for index in range(len(data) - 20001, len(data), 2):  # a little of one tensor, everywhere; names, sizes and header stay
        data[index] ^= 1
    shard.write_bytes(data)
    reworded = folder / "reworded"
    shutil.copytree(base, reworded)
    config = json.loads((reworded / "config.json").read_text())
    (reworded / "config.json").write_text(json.dumps({**config, "a_note": 1}))
    otherwise = folder / "otherwise"
    shutil.copytree(checkpoints / "gptq", otherwise)
    config = json.loads((otherwise / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (otherwise / "config.json").write_text(json.dumps(config))
    draft = {"speculative_config": {"model": base, "num_speculative_tokens": 2, "method": "draft_model"}}

    def job(model: str | Path = base, **more: Any) -> dict[str, Any]:
        return {"model": str(model), **more}

    jobs = {
        "base": job(),
        "float32": job(args={"dtype": "float32"}),
        "another length": job(args={"max_model_len": 64}),
        "an overridden configuration": job(args={"hf_overrides": {"rms_norm_eps": 0.001}}),
        "another revision": job(args={"revision": "v2"}),
        "two ranks": job(args={"tensor_parallel_size": 2}),
        "rank 1 of 2": job(groups={"_TP": (1, 2)}),
        "two stages": job(args={"pipeline_parallel_size": 2}),
        "stage 1 of 2": job(groups={"_PP": (1, 2)}),
        "expert rank": job(groups={"_EP": (1, 2)}),
        "data rank": job(groups={"_DP": (1, 2)}),
        "loading otherwise": job(args={"model_loader_extra_config": {"enable_multithread_load": True}}),
        "an adapter's shape": job(args={"enable_lora": True, "max_lora_rank": 8}),
        "another environment": job(env={"VLLM_CPU_INT4_W4A8": "0"}),
        "packing off": job(env={"VLLM_CPU_MOE_PREPACK": "0"}),
        "a prefix": job(prefix="draft_model"),
        "the draft": job(args=draft, draft=True),
        "a fine-tune": job(tuned),
        "another configuration file": job(reworded),
        "another family": job(checkpoints / "qwen3"),
        "another vLLM": job(**{"as": {"vllm:__version__": "0.99"}}),
        "another torch": job(**{"as": {"torch:__version__": "9.9"}}),
        "another transformers": job(**{"as": {"transformers:__version__": "9.9"}}),
        "another device": job(**{"as": {"vllm.platforms:current_platform.device_type": "cuda"}}),
        "another processor": job(**{"as": {"torch:backends.cpu.get_cpu_capability": "AVX9"}}),
        "quantised": job(checkpoints / "gptq"),
        "quantised otherwise": job(otherwise),
        "another name": job(args={"served_model_name": "other"}),
        "another seed": job(args={"seed": 7}),
        "compiled": job(args={"enforce_eager": False}),
        "a copy elsewhere": job(copy),
        "another thread binding": job(env={"VLLM_CPU_OMP_THREADS_BIND": "0-1"}),
    }
    pool = f"t-vllm-{secrets.token_hex(4)}"
    with Sidecar(pool, base) as sidecar:
        sidecar.ready("llama")
        environ = engine_environment(pool)
        done = subprocess.run(
            [PYTHON, str(HERE / "keys.py"), json.dumps(jobs)], env=environ, capture_output=True, text=True, timeout=300,
            cwd="/", stdin=subprocess.DEVNULL,
        )  # fmt: skip
        sidecar.interrupt()
    found: Keys = {}
    for line in done.stdout.splitlines():
        if line.startswith("KEY "):
            found.update(json.loads(line[4:]))
    assert set(found) == set(jobs), done.stdout[-3000:] + done.stderr[-6000:]
    yield found


@pytest.mark.parametrize("change", OTHER)
def test_what_changes_the_weights_changes_the_key(keys: Keys, change: str) -> None:
    base, other = keys[BASES.get(change, "base")], keys[change]
    differing = {name for name in base if base[name] != other.get(name)}
    assert OTHER[change] in differing, differing


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_change_the_weights_leaves_the_key(keys: Keys, change: str) -> None:
    assert keys[change] == keys["base"]


def test_the_key_has_every_part_that_a_state_depends_on(keys: Keys) -> None:
    wanted = {
        "engine", "version", "torch", "class", "dtype", "quantization", "quantization_config", "config", "device", "capability",
        "checkpoint", "role", *(f"{g}_{w}" for g in ("tp", "pp", "dp", "ep") for w in ("rank", "size")),
    }  # fmt: skip
    assert wanted <= set(keys["base"])
    assert not any(os.environ["HOME"] in str(value) for value in keys["base"].values()), "a path has got into the key"
