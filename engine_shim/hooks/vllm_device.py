"""vLLM on a GPU: which one this worker has, what of its budget lies there already, and who must not write to it.

Apart from `vllm.py`, which knows keys and ladders, so that what depends on device memory is in one place. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Optional

import torch

from engine_shim import device, onboard
from engine_shim.handoff.names import PoolPaths

log = logging.getLogger("ballast")


def gpu() -> Optional[device.Gpu]:
    """This worker's GPU; None where vLLM runs on something else. Raises DeviceError."""
    from vllm.platforms import current_platform

    return device.gpu(torch.cuda.current_device()) if current_platform.is_cuda() else None


def external(key: Callable[[], str], paths: PoolPaths) -> int:
    """For `get_external_weight_memory`: bytes of this rank's state that lie on its GPU in a holder's memory. vLLM asks in the
    worker, once its groups are there and before it measures free memory, and takes them off what it may allocate itself.

    Never raises: 0 means that the engine holds its own weights.
    """
    try:
        where = gpu()
        return 0 if where is None else onboard.external_weight_memory([key()], where, "vllm", paths)
    except Exception as error:
        log.info("no weights are counted as lying on the GPU already: %s", error)
        log.debug("the whole story", exc_info=True)
        return 0


def guard(segments: object) -> None:
    """After a state was bound from `segments`: has vLLM's weight updates leave shared device memory alone."""
    if not isinstance(segments, device.Copy):
        return
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("reload_weights", "update_weights"):
        original = getattr(Worker, name)
        if not hasattr(original, "__wrapped__"):
            setattr(Worker, name, _guarded(original))


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model_runner.get_model()
        if self.vllm_config.model_config.enforce_eager:
            log.info("weights are updated: %d bytes are made private first", onboard.make_private(model))
        else:  # captured CUDA graphs remember addresses: they would go on with the old weights, without a word
            onboard.refuse_writes(model, "a weight update", "start the engine with BALLAST_STATE=0, or with --enforce-eager")
        return original(self, *args, **kwargs)

    return update
