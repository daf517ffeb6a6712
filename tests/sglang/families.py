"""Small checkpoints of the families that SGLang is tested with: random weights from a configuration.

    python families.py FOLDER [NAME...]      # writes FOLDER/NAME for each; the quantised ones of QUANTISED from llama
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.vllm import families as shared
from tests.vllm.families import HEADS, HIDDEN, LAYERS

# Latent attention and routed and shared experts, in the least size that has all of it.
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "num_key_value_heads": HEADS, "head_dim": 16, "moe_layer_freq": 1, "scoring_func": "softmax",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
shared.FAMILIES["deepseek-v2"] = ("DeepseekV2ForCausalLM", shared._config("DeepseekV2Config", **_LATENT))
shared.FAMILIES["qwen3-next"] = (
    "Qwen3NextForCausalLM",
    shared._config(
        "Qwen3NextConfig", head_dim=HIDDEN // HEADS, full_attention_interval=LAYERS,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        shared_expert_intermediate_size=64, tie_word_embeddings=False, **shared.MOE,
    ),
)  # fmt: skip
shared.FAMILIES["gemma"] = ("GemmaForCausalLM", shared._config("GemmaConfig", head_dim=HIDDEN // HEADS))

_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # what four bits of floating point can be, without the sign
BLOCK = 64  # rows and columns that share a scale
shared.QUANTISED.update(
    {
        "fp8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        "fp8-channel": shared._compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
        "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "nvfp4": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "group_size": 16,
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
    }
)  # fmt: skip
QUANTISED = ("fp8", "fp8-block", "fp8-channel", "modelopt-fp8", "nvfp4", "w8a8", "w4a16", "gptq", "awq")
_by_vllm_too = shared._quantised


def _quantised(kind: str, name: str, weight: Any) -> dict[str, Any]:
    """What a format writes instead of one weight of shape (outputs, inputs)."""
    full = weight.float()
    if kind in ("fp8", "modelopt-fp8", "fp8-channel"):
        largest = full.abs().amax(dim=1, keepdim=True) if kind == "fp8-channel" else full.abs().max()
        scale = largest / 448
        made = {name: (full / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        if kind != "fp8-channel":
            made[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
        return made
    if kind == "fp8-block":
        blocks = full.reshape(full.shape[0] // BLOCK, BLOCK, full.shape[1] // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).reshape(full.shape)
        return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    if kind == "nvfp4":
        groups = full.reshape(full.shape[0], -1, 16)
        whole = full.abs().max() / (448 * 6)
        scale = (groups.abs().amax(dim=2) / 6 / whole).to(torch.float8_e4m3fn)
        nearest = (groups / (scale.float() * whole)[..., None]).reshape(full.shape)
        code = (nearest.abs()[..., None] - _FP4).abs().argmin(dim=-1) + 8 * (nearest < 0)
        packed = (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8)
        rest = {"input_scale": torch.tensor(0.01), "weight_scale_2": whole}
        return {
            name: packed, f"{name}_scale": scale, **{name.removesuffix("weight") + part: value for part, value in rest.items()}
        }
    return _by_vllm_too(kind, name, weight)


shared._quantised = _quantised

LINEAR = "qwen3-next"  # a CPU cannot run its linear attention; it can load it
NAMES = ("llama", "llama-tied", "qwen2", "qwen3-moe", "gemma", "deepseek-v2")


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or (*NAMES, LINEAR, *QUANTISED):
        if name in QUANTISED:
            shared.quantise(name, folder / "llama", folder / name)
        else:
            shared.build(name, folder / name)


if __name__ == "__main__":
    main()
