"""An engine that hands its own state over, and one that takes it: `python publishing.py publish|attach`, a line on stdin to go.

The state is what the engine made of its weights (another element type, buffers that no checkpoint has, integers instead of
floats, fused projections), not what a file holds.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import engine_shim
from engine_shim import modules
from engine_shim.handoff.errors import HandoffError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.program import mapped, of_module, of_tensor

KEY = {"tensor_parallel": [0, 1], "dtype": "bfloat16"}


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def quantised() -> Any:
    """Linear weights as torchao's integers, whose tensors are made of others."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama(tied=False)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def denoiser() -> Any:
    """The network of a diffusers pipeline, its three projections fused into one."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    model = model.to(torch.bfloat16).eval()
    model.fuse_qkv_projections()
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "tied": functools.partial(llama, True),
    "untied": functools.partial(llama, False),
    "compiled": lambda: torch.compile(llama(True), backend="eager"),
    "quantised": quantised,
    "denoiser": denoiser,
}


def build(kind: str, device: str) -> Any:
    with torch.device(device):
        return KINDS[kind]()


def of_state(model: Any) -> dict[str, str]:
    return {slot.label: of_tensor(slot.tensor) for slot in modules.slots(modules.root(model))}


def look(kind: str, model: Any) -> dict[str, Any]:
    with torch.no_grad():
        if kind == "denoiser":
            generator = torch.Generator().manual_seed(1)
            image, text = (torch.randn(s, generator=generator).bfloat16() for s in ((1, 4, 8, 8), (1, 5, 32)))
            output = model(image, 3, text).sample
        else:
            output = model(torch.arange(20).reshape(2, 10) % 101).logits
    inner = modules.root(model)
    if kind != "quantised":
        return {**of_module(inner), "output": of_tensor(output)}
    classes = [type(parameter).__name__ for parameter in inner.parameters()]
    return {"state": of_state(inner), "classes": classes, "output": of_tensor(output)}


def spoil(model: Any) -> None:
    """What an engine does with its weights is its own business."""
    with torch.no_grad():
        for slot in modules.slots(modules.root(model)):
            slot.tensor.zero_()


def publish(kind: str) -> dict[str, Any]:
    torch.manual_seed(7)
    model = build(kind, "cpu")
    engine_shim.publish(model, kind, key=KEY, wait=30)
    told = look(kind, model)
    spoil(model)
    return told


def attach(kind: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for device in ("cpu", "meta"):
        torch.manual_seed(99)
        model = build(kind, device)
        assert engine_shim.attach(model, kind, key=KEY) is model
        told[device] = {"state": look(kind, model)}
        if kind != "quantised":
            told[device]["mapped"] = mapped([modules.root(model)])
        spoil(model)
    others = [({**KEY, "dtype": "float16"}, kind), ({**KEY, "more": 1}, kind), ({"dtype": "bfloat16"}, kind), (None, kind)]
    if kind == "quantised":  # the same class and key, and yet another tree
        others.append((KEY, "untied"))
    for key, built in others:
        other = build(built, "cpu")
        before = of_state(other)
        try:
            engine_shim.attach(other, kind, key=key)
            told[f"{built} {key}"] = "attached"
        except HandoffError as error:
            told[f"{built} {key}"] = [type(error).__name__, of_state(other) == before]
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in KINDS:
        build(kind, "meta")  # imports what it takes, slowly
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({kind: {"publish": publish, "attach": attach}[sys.argv[1]](kind) for kind in KINDS}))
