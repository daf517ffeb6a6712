"""Small checkpoints of each family of models: random weights from a configuration, a tokenizer trained on a few lines.

    python families.py FOLDER NAME...      # writes FOLDER/NAME for each; the quantised ones and adapter from llama

Random weights have a large spread, so that greedy decoding does not fall into one token: equal tokens then mean something.
"""

from __future__ import annotations

import functools
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


def _blip2() -> Any:
    """A vision tower, a transformer that asks it, and a language model; one more word stands for a place in the image."""
    import transformers

    vision = transformers.Blip2VisionConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN, image_size=28,
        patch_size=14,
    )  # fmt: skip
    asking = transformers.Blip2QFormerConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN,
        encoder_hidden_size=HIDDEN,
    )  # fmt: skip
    text = transformers.OPTConfig(**{**COMMON, "ffn_dim": FFN, "word_embed_proj_dim": HIDDEN})
    return transformers.Blip2Config(
        vision_config=vision, qformer_config=asking, text_config=text, num_query_tokens=4, image_token_index=len(tokenizer())
    )


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _config("LlamaConfig", tie_word_embeddings=False)),
    "llama-tied": ("LlamaForCausalLM", _config("LlamaConfig", tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", _config("Qwen2Config", tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", _config("Qwen3Config", head_dim=HEAD, tie_word_embeddings=False)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _config("Qwen3MoeConfig", head_dim=HEAD, tie_word_embeddings=False, **MOE)),
    "mixtral": ("MixtralForCausalLM", _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)),
    "gemma2": ("Gemma2ForCausalLM", _config("Gemma2Config", head_dim=HEAD, query_pre_attn_scalar=HEAD)),
    "gemma3": ("Gemma3ForCausalLM", _config("Gemma3TextConfig", head_dim=HEAD, query_pre_attn_scalar=HEAD)),
    "phi": ("PhiForCausalLM", _config("PhiConfig", partial_rotary_factor=0.5, tie_word_embeddings=False)),
    "phi3": ("Phi3ForCausalLM", _config("Phi3Config", tie_word_embeddings=False)),
    "opt": (
        "OPTForCausalLM",
        _config("OPTConfig", ffn_dim=FFN, word_embed_proj_dim=HIDDEN, do_layer_norm_before=True),
    ),
    "gpt2": ("GPT2LMHeadModel", _config("GPT2Config", n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=256)),
    "bert": ("BertModel", _config("BertConfig")),
    "blip2": ("Blip2ForConditionalGeneration", _blip2),
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
    words = tokenizer()
    words.save_pretrained(folder)
    if name == "blip2":
        words.add_special_tokens({"additional_special_tokens": ["<image>"]})
        images = transformers.BlipImageProcessor(size={"height": 28, "width": 28})
        transformers.Blip2Processor(images, words, num_query_tokens=4).save_pretrained(folder)
    return folder


def _compressed(kind: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


GROUP = 32  # weights that share a scale, in the formats of four bits
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
QUANTISED: dict[str, dict[str, Any]] = {
    "w8a8": _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, PER_TOKEN),
    "w4a16": _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def _packed(values: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Eight numbers of four bits in an int32, along the last dimension."""
    import torch

    eight = values.to(torch.int64).reshape(*values.shape[:-1], -1, 8)
    word = torch.zeros(eight.shape[:-1], dtype=torch.int64)
    for place, index in enumerate(order):
        word |= eight[..., index] << 4 * place
    return (word - ((word >> 31) << 32)).to(torch.int32)


def _quantised(kind: str, name: str, weight: Any) -> dict[str, Any]:
    """What a format writes instead of one weight of shape (outputs, inputs)."""
    import torch

    full, (rows, columns) = weight.float(), weight.shape
    base = name.removesuffix(".weight")
    if kind == "w8a8":
        scale = full.abs().amax(dim=1, keepdim=True) / 127
        return {name: (full / scale).round().to(torch.int8), f"{name}_scale": scale.to(weight.dtype)}
    groups = full.reshape(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(dim=2) / 7
    values = ((groups / scale[..., None]).round().clamp(-8, 7) + 8).reshape(rows, columns)
    scale = scale.to(weight.dtype)
    if kind == "w4a16":
        shape = torch.tensor([rows, columns])
        return {f"{base}.weight_packed": _packed(values), f"{base}.weight_scale": scale, f"{base}.weight_shape": shape}
    eights = torch.full((columns // GROUP, rows), 8)
    if kind == "gptq":
        made = {"qweight": _packed(values).t(), "qzeros": _packed(eights - 1), "g_idx": torch.arange(columns).int() // GROUP}
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        made = {"qweight": _packed(values.t(), order), "qzeros": _packed(eights, order)}
    made["scales"] = scale.t()
    return {f"{base}.{part}": tensor.contiguous() for part, tensor in made.items()}


def quantise(kind: str, source: Path, folder: Path) -> Path:
    """The same checkpoint with its Linear weights as `kind` of QUANTISED writes them."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            tensors.update(_quantised(kind, name, tensor) if name.endswith("_proj.weight") else {name: tensor})
    _beside(source, folder, quantization_config=QUANTISED[kind])
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
    made = {**{kind: functools.partial(quantise, kind) for kind in QUANTISED}, "adapter": adapter}
    for name in sys.argv[2:]:
        path = made[name](folder / "llama", folder / name) if name in made else build(name, folder / name)
        print(json.dumps({name: str(path)}), flush=True)


if __name__ == "__main__":
    main()
