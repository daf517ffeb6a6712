"""Small checkpoints of each family of models: random weights from a configuration, a tokenizer trained on a few lines.

    python families.py FOLDER NAME...      # writes FOLDER/NAME for each; w8a8 and adapter are made from llama

Random weights have a large spread, so that greedy decoding does not fall into one token: equal tokens then mean something.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 128, 2, 4, 2, 32, 256, 512

COMMON = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _config(kind: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(**{**COMMON, **more})

    return make


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _config("LlamaConfig", tie_word_embeddings=False)),
    "llama-tied": ("LlamaForCausalLM", _config("LlamaConfig", tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", _config("Qwen2Config", tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", _config("Qwen3Config", head_dim=HEAD, tie_word_embeddings=False)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _config("Qwen3MoeConfig", head_dim=HEAD, tie_word_embeddings=False, **MOE)),
    "mixtral": ("MixtralForCausalLM", _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)),
    "gemma2": ("Gemma2ForCausalLM", _config("Gemma2Config", head_dim=HEAD, query_pre_attn_scalar=HEAD)),
    "gemma3": ("Gemma3ForCausalLM", _config("Gemma3TextConfig", head_dim=HEAD, query_pre_attn_scalar=HEAD)),
    "phi3": ("Phi3ForCausalLM", _config("Phi3Config", tie_word_embeddings=False)),
    "opt": (
        "OPTForCausalLM",
        _config("OPTConfig", ffn_dim=FFN, word_embed_proj_dim=HIDDEN, do_layer_norm_before=True),
    ),
    "gpt2": ("GPT2LMHeadModel", _config("GPT2Config", n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=256)),
    "bert": ("BertModel", _config("BertConfig")),
}


def build(name: str, folder: Path, seed: int = 0, dtype: str = "bfloat16", tweak: Callable[[Any], None] | None = None) -> Path:
    """Writes a checkpoint. Another `seed` gives other weights with the same names, shapes and configuration."""
    import torch
    import transformers

    architecture, config = FAMILIES[name]
    made = config()
    made.architectures = [architecture]
    if tweak is not None:
        tweak(made)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(made)
    # No two families share a file: Ballast would rightly serve one from the other.
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "embed" in label and name.startswith("gemma"):  # scaled up and tied: larger, and a token repeats itself
                parameter.normal_(0, 0.02, generator=generator)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.12, generator=generator)
            elif label.endswith("bias"):
                parameter.normal_(0, 0.05, generator=generator)
            else:
                parameter.normal_(1, 0.05, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="300KB")
    tokenizer().save_pretrained(folder)
    return folder


W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def quantise(source: Path, folder: Path) -> Path:
    """The same checkpoint with int8 weights and activations, as compressed-tensors writes them."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = tensor
                continue
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(tensor.dtype)
    _beside(source, folder, quantization_config=W8A8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def adapter(source: Path, folder: Path) -> Path:
    """A LoRA adapter that changes the answers of a Llama checkpoint."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        for name, size in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(8, HIDDEN, generator=generator).to(torch.bfloat16)
            tensors[f"{where}.lora_B.weight"] = torch.randn(size, 8, generator=generator).to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(source)}))
    return folder


def _beside(source: Path, folder: Path, **more: Any) -> None:
    """Everything of a checkpoint but its weights, with additions to its configuration."""
    folder.mkdir(parents=True)
    for path in source.glob("*.json"):
        if not path.name.endswith(".index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def tokenizer() -> Any:
    """Trained on a few lines; the vocabulary fits every family."""
    import tokenizers
    import transformers

    lines = [
        "the sea was calm and the ship kept her ballast aboard", "a cargo of weights, one two three four five six",
        "Ballast keeps a model's weights while engines come and go", "greedy tokens are the same or they are wrong",
    ]  # fmt: skip
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "<unk>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(lines, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<s>", unk_token="<unk>", pad_token="<s>"
    )


def main() -> None:
    folder = Path(sys.argv[1])
    made = {"w8a8": quantise, "adapter": adapter}
    for name in sys.argv[2:]:
        path = made[name](folder / "llama", folder / name) if name in made else build(name, folder / name)
        print(json.dumps({name: str(path)}), flush=True)


if __name__ == "__main__":
    main()
