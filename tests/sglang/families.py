"""Small checkpoints of the families that SGLang is tested with: random weights from a configuration.

    python families.py FOLDER [NAME...]      # writes FOLDER/NAME for each
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.vllm import families as shared
from tests.vllm.families import HEADS, HIDDEN

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
shared.FAMILIES["gemma"] = ("GemmaForCausalLM", shared._config("GemmaConfig", head_dim=HIDDEN // HEADS))

NAMES = ("llama", "llama-tied", "qwen2", "qwen3-moe", "gemma", "deepseek-v2")


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or NAMES:
        shared.build(name, folder / name)


if __name__ == "__main__":
    main()
