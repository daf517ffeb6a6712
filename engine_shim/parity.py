"""What `ballast parity` compares: a module tree told in full, every tensor with a digest of its bytes.

An engine writes it where BALLAST_PARITY names a folder, once after its weights were loaded and once after post-processing.
Reading every byte takes its time; nobody sets the variable in service.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from engine_shim import modules

OWN = "loaded by "


def own(engine: str) -> str:
    """The rung of an engine that read its weights itself."""
    return OWN + engine


def wanted() -> bool:
    return bool(os.environ.get("BALLAST_PARITY"))


def dump(module: torch.nn.Module, stage: str, rank: int, role: str, rung: str) -> None:
    """Writes `<role>-<rank>-<stage>.json`: how the weights came, one row for each tensor, the plain attributes."""
    rows = []
    for described, slot in zip(modules.describe(module), modules.slots(modules.root(module))):
        rows.append([*described, digest(slot.tensor), modules.tensor_attributes(slot.tensor)])
    attributes = {
        f"{path}.{name}": modules.told(value) for (path, name), value in modules.module_attributes(module).items()
    }
    path = Path(os.environ["BALLAST_PARITY"], f"{role}-{rank}-{stage}.json")
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps({"rung": rung, "tensors": rows, "attributes": attributes}))
    new.rename(path)


def digest(tensor: torch.Tensor) -> Any:
    """Of a tensor's elements in order; None for one without bytes of its own."""
    plain = tensor.detach()
    if plain.device.type == "meta" or plain.layout != torch.strided:
        return None
    try:
        flat = plain.cpu().contiguous().view(-1).view(torch.uint8)
    except RuntimeError:
        return None
    state = hashlib.blake2b(digest_size=16)
    for piece in modules.TensorStorage(flat.untyped_storage()).pieces() if flat.numel() else ():
        offset = flat.storage_offset()
        state.update(piece[offset : offset + flat.numel()])
    return state.hexdigest()
