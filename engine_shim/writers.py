"""Who writes weights in a running engine, and that he never writes to device memory which other engines share.

CUDA knows no read-only mapping. So what an engine may write to becomes its own before it does: at the start whatever is not
plainly a weight that stays as it is, later on all of it. Where captured graphs remember addresses that will not do, and it is
refused. An engine's adapter knows who writes, and calls in here first.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, Callable, Iterable, Sequence

import torch

from engine_shim import device, modules, onboard

log = logging.getLogger("ballast")


def mapped(segments: object) -> bool:
    """Whether what is bound from these lies in memory that other engines share."""
    return isinstance(segments, device.Copy)


def keep_parameters(model: torch.nn.Module, written: Iterable[torch.nn.Module]) -> int:
    """After a state was bound: leaves shared only what parameters look at, and not those of the modules `written`, which are
    processed further. Buffers and other tensors may be an engine's working space. Returns how many bytes are private now."""
    own = {id(inner) for module in written for inner in module.modules()}
    shared = list(onboard.shared_slots(model))
    kept = {_place(slot) for slot in shared if slot.kind == modules.PARAMETER}
    kept -= {_place(slot) for slot in shared if slot.kind == modules.BUFFER or id(slot.owner) in own}
    return onboard.make_private(model, lambda slot: _place(slot) not in kept)


def _place(slot: modules.Slot) -> int:
    return int(slot.tensor.untyped_storage().data_ptr())


def before_writing(what: str, models: Sequence[torch.nn.Module], graphs: bool, remedy: str) -> int:
    """What these models share becomes private: returns how many bytes. Raises Mismatch where `graphs` are captured: they
    remember addresses, and would go on with the old weights, without a word."""
    private = 0
    for model in models:
        if graphs:
            onboard.refuse_writes(model, what, remedy)
        elif nbytes := onboard.make_private(model):
            log.info("%s is about to write to weights: %d bytes that were shared are private now", what, nbytes)
            private += nbytes
    return private


def guard_loading(model: torch.nn.Module, before: Callable[[str, torch.nn.Module], object]) -> None:
    """Has `before` called when somebody calls the model's own `load_weights`, as extensions for reinforcement learning do."""
    own, reference, loads = vars(model), weakref.ref(model), getattr(type(model), "load_weights", None)
    if loads is None:
        return

    @functools.wraps(loads)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        written = reference()
        if written is not None:
            before("load_weights", written)
        return loads(written, *args, **kwargs)

    own["load_weights"] = load_weights
