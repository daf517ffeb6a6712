"""vLLM's own code over the emulated driver, in one process without a model runner: what `test_device.py` asks of it.

    python device_side.py LIBRARY '{"model": ..., "draft": ...}'

Real are vLLM's configuration, its loader's key, `request_memory`, `memory_profiling` and the worker's methods; what torch would
ask a GPU is asked of the emulated driver. Prints `RESULT {...}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.device import gpu_side

GPU = "cuda:0"


def emulate(library: str) -> None:
    from engine_shim import device
    from engine_shim.hooks import vllm_device

    gpu_side.prepare(library)
    vllm_device.gpu = lambda: device.gpu(GPU)
    accelerator: Any = torch.accelerator
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(accelerator, name, lambda *_: None)
    accelerator.memory_stats = lambda *_: {}
    accelerator.memory_reserved = lambda *_: 0
    accelerator.get_memory_info = lambda *_: gpu_side.memory(GPU)


def configured(job: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True, "model": job["model"]}
    draft = {"speculative_config": {"num_speculative_tokens": 2, "method": "draft_model", "model": job["draft"]}}
    return EngineArgs(**args, **draft).create_engine_config()


def worker(config: Any, models: list[torch.nn.Module]) -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    made = object.__new__(Worker)
    made.vllm_config, made.model_config, made.cache_config = config, config.model_config, config.cache_config
    made.parallel_config, made.rank, made.device = config.parallel_config, 0, torch.device("cpu")
    made.weight_transfer_engine = None
    made.model_runner = SimpleNamespace(
        model_memory_usage=0, profile_run=lambda **_: None, get_model=lambda: models[0], model=models[0] if models else None,
        get_draft_model=lambda: models[1] if len(models) > 1 else None,
    )  # fmt: skip
    return made


def room_for_cache(config: Any, load: Any) -> dict[str, int]:
    """What vLLM's worker makes of its memory, in its order: forecast, snapshot, request; then `load`; then the profile."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    forecast = get_model_loader(config.load_config).get_external_weight_memory(config)
    one = worker(config, [])
    one.init_snapshot = MemorySnapshot(device="cpu")
    one.requested_memory = request_memory(one.init_snapshot, config.cache_config, forecast)
    kept = load()
    found = {"forecast": forecast, "cache": int(one.determine_available_memory())}
    del kept
    gc.collect()
    return found


def budgets(config: Any) -> dict[str, Any]:
    """The same engine several ways: everything mapped; with half of the forecast missing; with a handle that does not open;
    with all weights its own."""
    from vllm.model_executor.model_loader import get_model_loader

    from engine_shim import device, state
    from engine_shim.handoff.names import PoolPaths
    from engine_shim.hooks import vllm as hook
    from engine_shim.hooks.vllm_device import _told
    from engine_shim.ladder import Settings

    paths, settings = PoolPaths.from_environment(), Settings.read()
    keys = hook._expected(get_model_loader(config.load_config), config, settings, paths)
    where = device.gpu(GPU)
    found = [state.find(key, paths=paths) for key in keys]
    roles = [str(one.contents.engine["role"]) for one in found if one is not None]
    sizes = [sum(one.contents.segments) for one in found if one is not None]

    def mapped(which: list[str]) -> Any:
        return lambda: [state.find(key, paths=paths, where=where) for key in which]

    result: dict[str, Any] = {"roles": roles, "sizes": sizes, "total": where.total}
    result["mapped"] = room_for_cache(config, mapped(keys))
    with replaced(hook, "_expected", lambda *_: keys[:1]):
        result["forecast without the draft"] = room_for_cache(config, mapped(keys))
    with allocated(sizes[1]) as own:
        result["draft its own"] = room_for_cache(config, lambda: [mapped(keys[:1])(), own()])
    with allocated(sum(sizes)) as own, replaced(hook, "_expected", lambda *_: []):
        result["all its own"] = room_for_cache(config, own)
    result["told"] = list(_told.values())
    return result


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def allocated(size: int) -> Any:
    """Memory of this process's own, once it is called for; given back at the end."""
    from engine_shim import device

    driver, pointer = device.driver(), ctypes.c_uint64()

    def take() -> None:
        with driver.context(0).current():
            driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))

    yield take
    with driver.context(0).current():
        driver.call("cuMemFree_v2", pointer)


# Who writes


class Mapped(torch.nn.Module):
    """A model of a published state's tensors, in shared device memory, half of them buffers."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        rows = [row for row in found.contents.tensors if row.nbytes > 1 << 14][:4]
        for index, row in enumerate(rows):
            tensor = found.segments.view(row)
            if index % 2:
                self.register_buffer(f"t{index}", tensor)
            else:
                self.register_parameter(f"t{index}", torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for parameter in self.parameters():
            parameter.data.fill_(1)


def in_place() -> Any:
    """A method of quantisation that writes to the weights themselves after loading, as requantising does."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class InPlace(QuantizeMethodBase):
        def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
            pass

        def apply(self, layer: torch.nn.Module, *_: Any, **__: Any) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            layer.t0.data.fill_(3)  # type: ignore[operator, union-attr]

    return InPlace()


def processed(found: Any, config: Any) -> tuple[torch.nn.Module, list[int]]:
    """vLLM's own post-processing over a model of shared memory whose first layer is quantised in that way."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from engine_shim.hooks import vllm as hook

    model = torch.nn.Module()
    model.layer, model.norm = Mapped(found), Mapped(found)
    model.layer.quant_method = in_place()
    step = object.__new__(hook._Start)
    step._undo = []
    step._own_before_processing(model, frozenset())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    step._unwrap()
    return model, sums(model.layer)


def sums(model: torch.nn.Module) -> list[int]:
    return [int(tensor.contiguous().view(torch.uint8).long().sum()) for tensor in model.state_dict().values()]


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def writers(config: Any) -> dict[str, Any]:
    """Everything of a worker's that writes weights, on a model of shared memory; and what that memory holds afterwards."""
    from vllm.model_executor.model_loader import get_model_loader

    from engine_shim import device, onboard, state
    from engine_shim.handoff.names import PoolPaths
    from engine_shim.hooks import vllm as hook
    from engine_shim.hooks import vllm_device
    from engine_shim.ladder import Settings

    paths = PoolPaths.from_environment()
    keys = hook._expected(get_model_loader(config.load_config), config, Settings.read(), paths)
    where = device.gpu(GPU)
    found = [state.find(key, paths=paths, where=where) for key in keys]
    truth = [sums(Mapped(one)) for one in found]

    def models(eager: bool) -> list[torch.nn.Module]:
        config.model_config.enforce_eager = eager
        made = [Mapped(one) for one in found]
        for model, one in zip(made, found, strict=True):
            vllm_device.guard(model, one.segments, eager)  # type: ignore[union-attr]
        return list(made)

    result: dict[str, Any] = {}
    with_graphs = models(False)
    one = worker(config, with_graphs)
    calls = {
        "reload_weights": one.reload_weights, "reset_weights": one.reset_weights,
        "start_weight_update": one.start_weight_update, "start_draft_weight_update": one.start_draft_weight_update,
        "update_weights": lambda: one.update_weights({}), "load_weights": lambda: with_graphs[0].load_weights([]),
    }  # fmt: skip
    result["refused"] = {name: refused(call) for name, call in calls.items()}
    draft_only = worker(config, [torch.nn.Linear(2, 2), with_graphs[1]])
    result["refused"]["of the draft"] = refused(draft_only.start_draft_weight_update)

    # Asleep at level 2 and awake again: nothing is copied over what is mapped, which others may have made something else of.
    sleeper = worker(config, with_graphs)
    sleeper._sleep_mode_backend = SimpleNamespace(suspend=lambda level: None, resume=lambda tags: None)
    sleeper.synchronize_device = lambda: None
    sleeper._sleep_saved_parameters = {}
    with_graphs[0].register_buffer("own", torch.ones(4))
    sleeper.sleep(level=2)
    target, draft = with_graphs
    sleeper._sleep_saved_parameters = {"t0": torch.zeros_like(target.t0), "draft.t0": torch.zeros_like(draft.t0)}
    sleeper._sleep_saved_buffers["t1"].zero_()
    sleeper._sleep_saved_draft_buffers["t1"].zero_()
    with_graphs[0].own.zero_()  # type: ignore[operator]
    sleeper.wake_up()
    result["own buffer after waking"] = with_graphs[0].own.tolist()  # type: ignore[operator]
    result["shared after waking"] = [sums(Mapped(one)) for one in found] == truth

    eager = models(True)
    worker(config, eager).reset_weights()
    eager[1].load_weights([])  # type: ignore[operator]
    result["private now"] = [not list(onboard.shared_slots(model)) for model in eager]
    result["written"] = [sums(model) != before for model, before in zip(eager, truth, strict=True)]
    result["shared afterwards"] = [sums(Mapped(one)) for one in found] == truth
    model, now = processed(found[0], config)
    result["processed in place"] = now != truth[0] and set(model.layer.t0.flatten().tolist()) == {3.0}  # type: ignore[operator, union-attr]
    result["not processed, still shared"] = sorted({slot.label for slot in onboard.shared_slots(model)})
    result["shared after processing"] = [sums(Mapped(one)) for one in found] == truth
    config.parallel_config.enable_eplb = True
    result["eplb"] = refused(lambda: vllm_device.check(config))
    result["eplb counts"] = get_model_loader(config.load_config).get_external_weight_memory(config)
    return result


def main() -> None:
    library, job = sys.argv[1], json.loads(sys.argv[2])
    emulate(library)
    config = configured(job)
    config.cache_config.gpu_memory_utilization = 0.5
    config.cache_config.kv_cache_memory_bytes = None  # which says it outright, as the CPU's configuration does
    print("RESULT", json.dumps({**budgets(config), **writers(config)}), flush=True)


if __name__ == "__main__":
    main()
