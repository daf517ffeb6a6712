"""Hook of safetensors: every name that means `safe_open` gets the stand-in that asks the pool first.

`load_file`, `load_model` and the readers of transformers, diffusers, accelerate and vLLM all go through `safe_open`, so
nothing else has to be touched. Readers of bytes (`safetensors.torch.load`) never see a file and stay.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from engine_shim.safe_open import StandIn, stand_in

NAMES = ("safe_open", "_safe_open_handle")


def patch(module: ModuleType) -> None:
    """Replace the readers of `module`, the package safetensors, wherever a module holds them by name. Idempotent."""
    if sys.byteorder != "little":
        raise NotImplementedError("shared weights are little-endian and this machine is not")
    for name in NAMES:
        original = module.__dict__.get(name)
        if original is not None and not isinstance(original, StandIn):
            _replace(original, stand_in(original, by_handle=name != "safe_open"), _holders(module))


def _holders(package: ModuleType) -> list[Any]:
    """The modules that may hold names of the package: any, unless it is only just being imported."""
    if getattr(package.__spec__, "_initializing", False):
        within = package.__name__ + "."
        return [package, *(module for name, module in list(sys.modules.items()) if name.startswith(within))]
    return list(sys.modules.values())


def _replace(original: Any, replacement: Any, holders: list[Any]) -> None:
    """Rebind the modules' names for `original`, since `from safetensors import safe_open` may be long past."""
    for module in holders:
        try:
            # Not `vars(module)` and not `getattr`: either would make a lazily loaded module load itself.
            names: dict[str, Any] = object.__getattribute__(module, "__dict__")
            bound = [name for name, value in list(names.items()) if value is original]
        except AttributeError:
            continue  # not everything in sys.modules is a module
        for name in bound:
            names[name] = replacement
