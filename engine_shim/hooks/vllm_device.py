"""vLLM on a GPU: which one this worker has, what of its budget lies there already, and who must not write to it.

Apart from `vllm.py`, which knows keys and ladders, so that what depends on device memory is in one place. Not yet run on a GPU;
`tests/vllm/test_device.py` runs it with vLLM's own code over the emulated driver.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch

from engine_shim import device, onboard, writers
from engine_shim.handoff.errors import Mismatch
from engine_shim.handoff.names import PoolPaths

log = logging.getLogger("ballast")

# What a worker can be asked that writes weights in place: also the first step of an update, which takes the places to write to.
_WRITERS = ("reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "reset_weights")
# What sleeping at level 2 sets aside, and waking up copies back over the weights.
_SET_ASIDE = ("_sleep_saved_buffers", "_sleep_saved_parameters", "_sleep_saved_draft_buffers")


def gpu() -> Optional[device.Gpu]:
    """This worker's GPU; None where vLLM runs on something else. Raises DeviceError."""
    from vllm.platforms import current_platform

    return device.gpu(torch.cuda.current_device()) if current_platform.is_cuda() else None


def check(vllm_config: Any) -> None:
    """Raises Mismatch if this engine writes to its weights while it runs, so that it cannot share a GPU's memory."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise Mismatch("its load balancer (--enable-eplb) moves experts about in place, which other engines would share")


# How much of the budget lies there already

_told: dict[int, int] = {}  # GPU -> bytes that vLLM has taken off its budget


def external(vllm_config: Any, keys: Callable[[], Sequence[str]], paths: PoolPaths) -> int:
    """For `get_external_weight_memory`: bytes of this rank's states that lie on its GPU in a holder's memory. vLLM asks in the
    worker, once its groups are there and before it measures free memory, and takes them off what it may allocate itself.

    That is a forecast: a draft's state may turn out to be another, or a handle not open. So before vLLM sizes its cache, what
    it was told is replaced by what is mapped indeed. Never raises: 0 means that the engine holds its own weights.
    """
    where, found = None, 0
    try:
        where = gpu()
        if where is not None:
            check(vllm_config)
            found = onboard.external_weight_memory(keys(), where, "vllm", paths)
    except Exception as error:
        log.info("no weights are counted as lying on the GPU already: %s", error)
        log.debug("the whole story", exc_info=True)
    if where is not None:
        _told[where.ordinal] = found
        _patch("determine_available_memory", _exact)
    return found


def _exact(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            where = gpu()
            if where is not None:
                mapped, told = onboard.mapped(where), _told.get(where.ordinal, 0)
                if mapped != told:
                    log.info("%d bytes of weights were expected to be mapped on this GPU, and %d are", told, mapped)
                self.requested_memory += told - mapped
                _told[where.ordinal] = mapped
        except Exception as error:
            log.warning("the bytes that are mapped on this GPU cannot be counted: %s", error)
        return original(self, *args, **kwargs)

    return determine_available_memory


def _patch(name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a method of vLLM's worker, once. One that this vLLM has not is left out."""
    from vllm.v1.worker.gpu_worker import Worker

    original = vars(Worker).get(name)
    if original is not None and not getattr(original, "_ballast", False):
        made = wrapped(original)
        vars(made)["_ballast"] = True
        setattr(Worker, name, made)


# Who must not write to it


def transforms(module: torch.nn.Module) -> bool:
    """Whether vLLM's post-processing does something to this module's weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    nothing = QuantizeMethodBase.process_weights_after_loading
    return isinstance(method, QuantizeMethodBase) and type(method).process_weights_after_loading is not nothing


def guard(model: torch.nn.Module, segments: object, eager: bool) -> None:
    """After a state was bound from `segments`: has whatever writes weights leave shared device memory alone. `eager`: no CUDA
    graphs are captured."""
    if not writers.mapped(segments):
        return
    for name in _WRITERS:
        _patch(name, _guarded)
    _patch("wake_up", _waking)
    _patch("determine_available_memory", _exact)
    # A worker's extension, as reinforcement learning brings one, calls the model itself.
    writers.guard_loading(model, lambda what, written: _before_writing(what, [written], eager))


def _models(worker: Any) -> list[torch.nn.Module]:
    """Target and draft."""
    draft = getattr(worker, "get_draft_model", lambda: None)()
    return [worker.model_runner.get_model(), *([] if draft is None else [draft])]


def _before_writing(what: str, models: Sequence[torch.nn.Module], eager: bool) -> None:
    """What these models share becomes private. Raises Mismatch where that will not do."""
    writers.before_writing(what, models, not eager, "start the engine with BALLAST_STATE=0, or with --enforce-eager")


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        _before_writing(original.__name__, _models(self), bool(self.vllm_config.model_config.enforce_eager))
        return original(self, *args, **kwargs)

    return write


def _waking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sleep takes from a GPU what vLLM's own allocator has there, and nothing else: what is mapped stays, and is what it was.
    So nothing has to be copied back over it, and must not."""

    @functools.wraps(original)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = {id(slot.tensor) for model in _models(self) for slot in onboard.shared_slots(model)}
        if shared:
            for attribute, tensors in zip(_SET_ASIDE, _named(self)):
                kept = getattr(self, attribute, None) or {}
                for name in [name for name in kept if id(tensors.get(name)) in shared]:
                    del kept[name]
        return original(self, *args, **kwargs)

    return wake_up


def _named(worker: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors of the target, and of the draft, by the names under which a worker sets them aside."""
    target, *drafts = _models(worker)
    yield dict(target.named_buffers())
    parameters: dict[str, torch.Tensor] = dict(target.named_parameters())
    for draft in drafts:
        parameters.update((f"draft.{name}", parameter) for name, parameter in draft.named_parameters())
    yield parameters
    yield {name: buffer for draft in drafts for name, buffer in draft.named_buffers()}
