"""SGLang on a GPU: which one this rank has, what must not share its memory with other engines, and what is built without any.

Apart from `sglang.py`, which knows keys and ladders, so that what depends on device memory is in one place. Not yet run on a
GPU; `tests/sglang/test_device.py` runs it with SGLang's own code over the emulated driver.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from typing import Any, Callable, Optional, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from engine_shim import device, ladder, onboard, writers
from engine_shim.handoff.errors import HandoffError, Mismatch
from engine_shim.handoff.names import PoolPaths

log = logging.getLogger("ballast")

REMEDY = "start the engine with BALLAST_STATE=0, or with --disable-cuda-graph"

# Arguments with which an engine writes to its weights, frees or moves them while it runs, or shows others where they are.
_OWN = {
    "enable_memory_saver": "--enable-memory-saver takes its weights off the GPU and back",
    "enable_eplb": "its load balancer (--enable-eplb) moves experts about in place",
    "elastic_ep_backend": "--elastic-ep-backend moves experts about in place",
    "cpu_offload_gb": "--cpu-offload-gb keeps weights in host memory",
    "offload_group_size": "--offload-group-size keeps weights in host memory",
    "ple_offload_embedding": "--ple-offload-embedding keeps weights in host memory",
    "custom_weight_loader": "--custom-weight-loader names functions that write to weights",
    "checkpoint_engine_wait_weights_before_ready": "its weights come from a checkpoint engine",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": "its weights are registered with a transfer engine",
}

# All that post-processing may call and yet, on a GPU of NVIDIA's and as far as `_plain_experts` allows, leave weights what and
# where they are. A later SGLang that does more than this is taken to write.
_HARMLESS = frozenset({"_is_cpu", "_is_cpu_amx_available", "_amx_process_weight_after_loading"})
_HARMLESS_EXPERTS = _HARMLESS | frozenset(
    {
        "_use_aiter", "get_moe_runner_backend", "is_auto", "is_aiter", "_aiter_ck_moe_supported", "_skip_aiter_moe_shuffle",
        "copy_or_rebind_param", "shuffle_weight", "w13_weight", "data", "torch", "cuda", "empty_cache", "w2_weight", "hasattr",
        "Parameter", "w13_weight_bias", "float", "w2_weight_bias", "use_deep_gemm", "dtype", "bfloat16", "get_moe_a2a_backend",
        "is_deepep", "is_pplx", "_is_npu", "_is_hip", "dispatcher", "set_quant_config", "is_mori", "use_flashinfer_cutlass",
        "sglang.srt.layers.moe.moe_runner.flashinfer_cutlass", "materialize_swiglu_params_for_cutlass", "moe_runner_config",
        "int", "num_local_experts", "device", "_cutlass_swiglu_params", "_maybe_apply_flashinfer_trtllm_bf16_block_layout",
        "w13_kernel", "process_weights_after_loading", "w2_kernel", "_maybe_interleave_w13_for_fused_swiglu",
    }
)  # fmt: skip


def on_cuda() -> bool:
    """Whether the engine runs on GPUs of NVIDIA's: in all of its ranks the same."""
    from sglang.srt.runtime_context import get_device
    from sglang.srt.utils.common import is_cuda

    return bool(is_cuda() and get_device().device == "cuda")


def gpu() -> Optional[device.Gpu]:
    """This rank's GPU; None where SGLang runs on something else. Raises DeviceError."""
    return device.gpu(torch.cuda.current_device()) if on_cuda() else None


def gpu_or_none() -> Optional[device.Gpu]:
    """The same, never an error: without a driver that can share memory, weights come from host memory."""
    try:
        return gpu()
    except Exception as error:
        log.info("no weights are looked for in a GPU's memory: %s: %s", type(error).__name__, error)
        return None


def check() -> None:
    """Raises Mismatch if this engine cannot share a GPU's memory, by its arguments."""
    for name, why in _OWN.items():
        if _argument(name):
            raise Mismatch(f"{why}, which other engines would share")
    # They would have to agree: SGLang does not start where one GPU has much less free memory than another, and what one rank
    # refuses while the others go on leaves them waiting for it.
    if (ranks := _ranks()) > 1:
        raise Mismatch(f"it has {ranks} ranks, and only engines of one map what lies on a GPU")


def maps() -> bool:
    """Whether this rank may bind what lies on its GPU. Says why not."""
    if gpu_or_none() is None:
        return False
    try:
        check()
    except Exception as error:
        log.info("weights are copied to the GPU, not mapped there: %s", error)
        return False
    return True


def _argument(name: str) -> Any:
    from sglang.srt.runtime_context import get_context

    try:
        value = get_context().config_leaf(name)
    except (AttributeError, ValueError):
        return None  # this SGLang has no such argument
    return value if not isinstance(value, (int, float)) else value > 0


def _ranks() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().world_group.world_size)


def graphs() -> bool:
    """Whether something has been captured, or will be, that remembers the addresses of weights: by the arguments, or in a way
    of a model's own."""
    config = _argument("cuda_graph_config")
    captured = [getattr(getattr(config, phase, None), "backend", None) != "disabled" for phase in ("decode", "prefill")]
    if any(captured) or _argument("enable_torch_compile"):
        return True
    return any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())


# Before anything is loaded


def claim(keys: Callable[[], Sequence[str]], paths: PoolPaths) -> None:
    """Before SGLang measures its free memory: the copies with these keys stay on this rank's GPU, all else that nobody uses
    goes, and nothing is added while the engine starts. Never raises."""
    where = gpu_or_none()
    if where is None:
        return
    try:
        ladder.pool(paths).control()  # raises NotFound where there is no pool
        wanted: Sequence[str] = ()
        try:
            check()
            wanted = keys()
        except (HandoffError, RuntimeError, OSError) as error:
            log.info("no copy is asked for on %s: %s", where.uuid, error)
        onboard.external_weight_memory(wanted, where, "sglang", paths)
    except Exception as error:
        log.info("nobody is asked to make room on %s: %s", where.uuid, error)


class Skeleton(TorchFunctionMode):
    """Builds a model without memory, and remembers what was made: none of it may be left once the model has its weights."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device.type == "meta":
            storage = found.untyped_storage()
            if storage._cdata not in self._made:
                self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return found

    def build(self, original: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        with self, torch.device("meta"):
            return original()

    def left(self) -> int:
        """How many of the tensors without memory somebody still has."""
        if self._alive():
            gc.collect()
        return self._alive()

    def _alive(self) -> int:
        return sum(not one.expired() for one in self._made.values())  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """The model is built again, with memory: what its classes remember from one to the next is thrown away. Raises Mismatch
        if something is left all the same, which the next model would take for weights."""
        if not self.left():
            return
        ropes = getattr(sys.modules.get("sglang.srt.layers.rotary_embedding.factory"), "_ROPE_DICT", {})
        for key in [key for key, rope in ropes.items() if any(buffer.is_meta for buffer in rope.buffers())]:
            del ropes[key]
        for one in gc.get_objects():
            if type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("sglang."):
                one.cache_clear()
        if left := self.left():
            raise Mismatch(f"{left} tensors of a model without memory are left: restart the engine with BALLAST_STATE=0")


# Who must not write to it


def transforms(module: torch.nn.Module) -> bool:
    """Whether SGLang's post-processing may do something to this module's weights."""
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if method is None:
        return False
    process = getattr(type(method), "process_weights_after_loading", None)
    if process is QuantizeMethodBase.process_weights_after_loading:
        return False
    names = set(getattr(getattr(process, "__code__", None), "co_names", ("something else",)))
    if type(method) is unquant.UnquantizedFusedMoEMethod:
        return not (names <= _HARMLESS_EXPERTS and _plain_experts(method))
    return not names <= _HARMLESS


def _plain_experts(method: Any) -> bool:
    """Whether unquantised experts are used as they were loaded."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.quantization import unquant

    elsewhere = any(getattr(unquant, name, False) for name in ("_use_aiter", "_is_hip", "_is_npu", "_is_xpu"))
    interleaved = envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get()
    return not (elsewhere or interleaved or method.use_flashinfer_trtllm_moe)


def before_writing(what: str, model: torch.nn.Module) -> int:
    """Something is about to write to a model: what it shares becomes private, and how many bytes were is returned. Raises
    Mismatch where it must not be written to."""
    if not _shares(model):
        return 0
    return writers.before_writing(what, [model], graphs(), REMEDY)


def _shares(model: torch.nn.Module) -> bool:
    return any(True for _ in onboard.shared_slots(model))


def refusal(what: str, models: Sequence[torch.nn.Module]) -> Optional[str]:
    """Why these models cannot be written to; None if they can. For requests, which are answered: what they raise would end the
    scheduler."""
    if not (any(map(_shares, models)) and graphs()):
        return None
    return f"{what} would write to weights which other engines share: {REMEDY}"
