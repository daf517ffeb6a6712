"""An engine that hands its own state over, and one that takes it: `python publishing.py publish|attach`, a line on stdin to go.

The state is what the engine made of its weights (here: another element type, and a buffer that no checkpoint has), not what
a file holds.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import engine_shim
from engine_shim.handoff.errors import HandoffError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.program import mapped, of_module, of_tensor

KEY = {"tensor_parallel": [0, 1], "dtype": "bfloat16"}


def build(tied: bool, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def look(model: Any) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(torch.arange(20).reshape(2, 10) % 101).logits
    return {**of_module(model), "output": of_tensor(logits)}


def publish() -> dict[str, Any]:
    told = {}
    for tied in (True, False):
        torch.manual_seed(7 + tied)
        model = build(tied, "cpu")
        engine_shim.publish(model, f"llama-{tied}", key=KEY, wait=30)
        told[f"{tied}"] = look(model)
        # What the engine does with it from now on is its own business.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return told


def attach() -> dict[str, Any]:
    told: dict[str, Any] = {}
    for tied in (True, False):
        for device in ("cpu", "meta"):
            torch.manual_seed(99)
            model = build(tied, device)
            assert engine_shim.attach(model, f"llama-{tied}", key=KEY) is model
            told[f"{tied} {device}"] = {"mapped": mapped([model]), "state": look(model)}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        other = build(tied, "cpu")
        before = of_module(other)
        for key in ({**KEY, "dtype": "float16"}, {**KEY, "more": 1}, {"dtype": "bfloat16"}, None):
            try:
                engine_shim.attach(other, f"llama-{tied}", key=key)
                told[f"{tied} {key}"] = "attached"
            except HandoffError as error:
                told[f"{tied} {key}"] = [type(error).__name__, of_module(other) == before]
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert importlib.import_module("transformers").LlamaForCausalLM  # imported lazily, and slowly
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"publish": publish, "attach": attach}[sys.argv[1]]()))
