"""Ballast's engine shim: attach to the weights that a sidecar keeps in shared memory, instead of loading them.

    import engine_shim

    model = engine_shim.open("my-model")           # waits, checks, leases
    model.tensors["lm_head.weight"]                # a torch tensor, nothing copied
    engine_shim.attach(module, "my-model")         # bind into an nn.Module
    engine_shim.publish(module, "my-model")        # hand an engine's own state over

An unmodified engine needs none of this: with `BALLAST_POOL` set, `engine_shim.hooks` does it. Importing this package costs
next to nothing and does not import torch.
"""

from __future__ import annotations

from os.path import realpath as _realpath

TYPE_CHECKING = False  # without importing typing, which every interpreter that an engine starts would pay for
if TYPE_CHECKING:
    from typing import Any

    from engine_shim.api import Model, attach, open, publish

__version__ = "0.1.0"
__all__ = ["Model", "attach", "open", "publish"]

# `ballast inject` may point a link to a newer copy while we run: what is imported later is to come from this one.
__path__ = [_realpath(folder) for folder in __path__]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from engine_shim import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
