"""A state is for one configuration: whatever changes the weights changes the key, and what does not leaves it alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Engines

from tests.processes import Sidecar

Keys = dict[str, dict[str, Any]]

# Every field of SGLang's own fingerprint -> the part of our key that says the same. Its model path is our content.
FINGERPRINT = {
    "model_path": "checkpoint", "model_arch": "architecture", "tp_size": "tp_size", "tp_rank": "tp_rank", "pp_size": "pp_size",
    "pp_rank": "pp_rank", "dp_size": "dp_size", "ep_size": "ep_size", "moe_dp_size": "moe_dp_size",
    "moe_dp_rank": "moe_dp_rank", "moe_ep_rank": "moe_ep_rank", "attn_dp_size": "attn_dp_size",
    "enable_dp_lm_head": "enable_dp_lm_head", "attn_cp_size": "attn_cp_size", "moe_dense_tp_size": "moe_dense_tp_size",
    "moe_a2a_backend": "moe_a2a_backend", "quant_method": "quantization", "quant_config_hash": "quantization_config",
    "dtype": "dtype", "revision": "revision", "device_capability": "capability", "torch_version": "torch",
}  # fmt: skip

# What differs from the base -> the part of the key that must tell.
OTHER: dict[str, str] = {
    "float32": "dtype",
    "another length": "context_length",
    "an overridden configuration": "config",
    "an override that says what is so": "overrides",
    "another revision": "revision",
    "two ranks": "tp_size",
    "rank 1 of 2": "tp_rank",
    "two stages": "pp_size",
    "stage 1 of 2": "pp_rank",
    "two replicas": "dp_size",
    "two expert ranks": "ep_size",
    "expert rank 1": "moe_ep_rank",
    "experts replicated": "moe_dp_size",
    "attention in two replicas": "attn_dp_size",
    "attention's replica 1": "attn_dp_rank",
    "attention's context split": "attn_cp_size",
    "a head for each replica": "enable_dp_lm_head",
    "dense layers split otherwise": "moe_dense_tp_size",
    "another exchange of tokens": "moe_a2a_backend",
    "another runner of experts": "arguments of exec.moe",
    "another attention backend": "arguments of exec.kernel",
    "another matrix kernel": "arguments of exec.kernel",
    "a head in float32": "arguments of exec.features",
    "offloading": "arguments of exec.offload",
    "shared experts apart": "arguments of exec.moe",
    "quantised": "quantization",
    "another cache type": "arguments of model",
    "loading otherwise": "loading",
    "the language model only": "arguments of disagg",
    "another implementation": "arguments of model",
    "another environment": "environment",
    "experts placed otherwise": "experts",
    "a draft": "role",
    "a layer of a draft": "role",
    "a fine-tune": "checkpoint",
    "another configuration file": "checkpoint",
    "another family": "class",
    "another SGLang": "version",
    "another torch": "torch",
    "another transformers": "transformers",
    "other kernels": "kernels",
    "another kind of processor": "capability",
    "another architecture": "architecture",
    "quantised otherwise": "quantization_config",
}
SAME = (
    "another name", "another seed", "another port", "a copy elsewhere", "another thread binding", "more memory for the cache",
    "graphs off", "another log level", "the format said", "another scheduler",
)  # fmt: skip
FILES = {"scales.json": "{}", "copied.json": "{}", "changed.json": "[]"}  # files that an argument names


@pytest.fixture(scope="module")
def keys(engines: Engines, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    folder = tmp_path_factory.mktemp("keys")
    base = checkpoints / "llama"
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
    for name, content in FILES.items():
        (folder / name).write_text(content)
    two = {"tp_size": 2}
    split = {"tp_size": 2, "attn_tp_size": 1, "moe_tp_size": 1, "tp_rank": 0}
    jobs: dict[str, dict[str, Any]] = {
        "base": {},
        "float32": {"args": {"dtype": "float32"}},
        "another length": {"args": {"context_length": 64}},
        "an overridden configuration": {"args": {"json_model_override_args": '{"rms_norm_eps": 0.001}'}},
        "an override that says what is so": {
            "args": {"json_model_override_args": json.dumps({"hidden_size": config["hidden_size"]})}
        },
        "another revision": {"args": {"revision": "v2"}},
        "two ranks": {"args": two},
        "rank 1 of 2": {"args": two, "rank": 1},
        "two stages": {"args": {"pp_size": 2}},
        "stage 1 of 2": {"args": {"pp_size": 2}, "rank": 1},
        "two replicas": {"args": {"dp_size": 2}},
        "two expert ranks": {"args": {**two, "ep_size": 2}},
        "expert rank 1": {"args": {**two, "ep_size": 2}, "rank": 1},
        "experts replicated": {
            "parallel": {**split, "attn_tp_size": 2, "attn_tp_rank": 1, "moe_dp_size": 2, "moe_dp_rank": 1, "tp_rank": 1}
        },
        "attention in two replicas": {"parallel": {**split, "attn_dp_size": 2, "moe_tp_size": 2}},
        "attention's replica 1": {"parallel": {**split, "attn_dp_size": 2, "moe_tp_size": 2, "attn_dp_rank": 1, "tp_rank": 1}},
        "attention's context split": {"parallel": {**split, "attn_cp_size": 2, "moe_tp_size": 2}},
        "a head for each replica": {"parallel": {"enable_dp_lm_head": True}},
        "dense layers split otherwise": {"parallel": {"moe_dense_tp_size": 1}},
        "another exchange of tokens": {"leaves": {"moe_a2a_backend": "deepep"}},
        "another runner of experts": {"leaves": {"moe_runner_backend": "triton"}},
        "another attention backend": {"leaves": {"attention_backend": "triton"}},
        "another matrix kernel": {"leaves": {"fp8_gemm_runner_backend": "triton"}},
        "a head in float32": {"leaves": {"enable_fp32_lm_head": True}},
        "offloading": {"leaves": {"cpu_offload_gb": 1}},
        "shared experts apart": {"leaves": {"disable_shared_experts_fusion": True}},
        "quantised": {"config": {"quantization": "fp8"}},
        "another cache type": {"leaves": {"kv_cache_dtype": "fp8_e5m2"}},
        "loading otherwise": {"args": {"model_loader_extra_config": '{"enable_multithread_load": false}'}},
        "the language model only": {"leaves": {"language_model_only": True}},
        "another implementation": {"leaves": {"model_impl": "transformers"}},
        "another environment": {"env": {"SGLANG_MOE_PADDING": "1"}},
        "experts placed otherwise": {"placement": [[1, 0, 2, 3]]},
        "a draft": {"draft": True},
        "a layer of a draft": {"draft": True, "draft_model_idx": 1},
        "a fine-tune": {"model": str(tuned)},
        "another configuration file": {"model": str(reworded)},
        "another family": {"model": str(checkpoints / "qwen2")},
        "another SGLang": {"installed": {"sglang:__version__": "0.5.99"}},
        "another torch": {"installed": {"torch:__version__": "2.99.0"}},
        "another transformers": {"installed": {"transformers:__version__": "9.0"}},
        "other kernels": {"installed": {"importlib.metadata:version": "9.0"}},
        "another kind of processor": {"installed": {"torch.backends.cpu:get_cpu_capability": "AVX9"}},
        "another architecture": {"architecture": "OtherForCausalLM"},
        "quantised otherwise": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        **{name: {"leaves": {"quantization_param_path": str(folder / name)}} for name in FILES},
        "another name": {"args": {"served_model_name": "other"}},
        "another seed": {"args": {"random_seed": 7}},
        "another port": {"args": {"port": 31234, "host": "0.0.0.0", "nccl_port": 31235}},
        "a copy elsewhere": {"model": str(copy)},
        "another thread binding": {"env": {"SGLANG_CPU_OMP_THREADS_BIND": "0-1", "SGLANG_RUN_ID": "x"}},
        "more memory for the cache": {"args": {"max_total_tokens": 4096, "mem_fraction_static": 0.6}},
        "graphs off": {"leaves": {"enable_torch_compile": True}},
        "another log level": {"args": {"log_level": "warning"}},
        "the format said": {"args": {"load_format": "safetensors"}},
        "another scheduler": {"args": {"schedule_policy": "lpm", "chunked_prefill_size": 512}},
    }
    pool = f"t-sglang-{secrets.token_hex(4)}"
    with Sidecar(pool, base) as sidecar:
        sidecar.ready("llama")
        found, _ = engines.run(base, pool, keys=jobs)
        sidecar.interrupt()
    assert set(found) == set(jobs) and set(jobs) == {"base", *OTHER, *SAME, *FILES}
    yield found


@pytest.mark.parametrize("change", OTHER)
def test_what_changes_the_weights_changes_the_key(keys: Keys, change: str) -> None:
    base, other = keys["base"], keys[change]
    differing = {name for name in {*base, *other} if base.get(name) != other.get(name)}
    assert OTHER[change] in differing, differing


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_change_the_weights_leaves_the_key(keys: Keys, change: str) -> None:
    assert keys[change] == keys["base"]


def test_a_file_that_an_argument_names_counts_by_its_content(keys: Keys) -> None:
    assert keys["scales.json"] == keys["copied.json"] != keys["base"]
    assert keys["scales.json"]["arguments of model"] != keys["changed.json"]["arguments of model"]


def test_the_key_holds_the_fingerprint_of_sglangs_own_cache(keys: Keys, engines: Engines, checkpoints: Path) -> None:
    """Every field that the installed SGLang's cache compares, whatever a later version adds, and more."""
    told, _ = engines.run(checkpoints / "llama", fingerprint=True)
    assert set(told["fields"]) == set(FINGERPRINT), "SGLang's fingerprint has other fields now: teach the key about them"
    assert set(FINGERPRINT.values()) <= set(keys["base"])
    more = {"version", "kernels", "transformers", "config", "overrides", "context_length", "loading", "experts", "environment"}
    assert more <= set(keys["base"])
    unset = {"quantization", "moe_dense_tp_size"}
    assert all(keys["base"][name] is not None for name in FINGERPRINT.values() if name not in unset)


def test_no_path_and_no_secret_is_in_the_key(keys: Keys, checkpoints: Path) -> None:
    text = json.dumps(keys["base"])
    assert str(checkpoints) not in text
    assert not os.environ.get("HOME", "/").strip("/") or os.environ["HOME"] + "/" not in text
