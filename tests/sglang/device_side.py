"""SGLang's own code over the emulated driver, in a child of engine.py: what `test_device.py` asks of it.

Real are SGLang's runner, loader, post-processing, weight updaters and accounting of memory, and the driver's rules; what torch
would look at on a GPU is host memory (tests/device/gpu_side.py): the model runs on the very bytes that the holder has.
"""

from __future__ import annotations

import ctypes
import hashlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.device import gpu_side

_GIB = 1 << 30


def emulate(library: str, name: str) -> Any:
    """This process has the GPU of that name; SGLang measures its memory there."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    from engine_shim import device
    from engine_shim.hooks import sglang_device

    gpu_side.prepare(library)
    where = device.gpu(name)
    sglang_device.on_cuda, sglang_device.gpu = (lambda: True), (lambda: where)
    for module in (bootstrap, configurator):
        module.get_available_gpu_memory = lambda *_, **__: gpu_side.memory(name)[0] / _GIB
    return where


def tree(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Every tensor of a model: type, shape, strides and bytes."""
    from engine_shim import modules

    found = {}
    for slot in modules.slots(model):
        data = slot.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        found[slot.label] = [str(slot.tensor.dtype), list(slot.tensor.shape), list(slot.tensor.stride()), digest]
    return found


def shared(model: torch.nn.Module) -> list[str]:
    from engine_shim import onboard

    return sorted({slot.label for slot in onboard.shared_slots(model)})


def own_bytes(model: torch.nn.Module) -> int:
    """What the model's storages, each once, take of a GPU beside what is mapped there."""
    from engine_shim import modules

    mapped = set(shared(model))
    storages = (slot.tensor.untyped_storage() for slot in modules.slots(model) if slot.label not in mapped)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def allocate(where: Any, size: int) -> None:
    from engine_shim import device

    driver, pointer = device.driver(), ctypes.c_uint64()
    with driver.context(where.ordinal).current():
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))


def cache(runner: Any) -> int:
    """SGLang's room for its cache, in a scheduler's order: it adds what its runners tell of, and measures."""
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    runners = [one for one in (runner, getattr(runner, "draft_runner", None)) if one is not None]
    runner.account_preloaded_weights(sum(one.preloaded_weights_bytes for one in runners))
    fake = SimpleNamespace(
        device="cuda", gpu_id=0, mambaish_config=None, post_capture_kv_active=False,
        model_config=SimpleNamespace(is_multimodal=False),
    )  # fmt: skip
    configurator.get_parallel = lambda: SimpleNamespace(launch_world_size=1, world_group=SimpleNamespace(cpu_group=None))
    return int(configurator.KVCacheConfigurator._profile_available_bytes(fake, runner.pre_model_load_memory))


def hoard() -> None:
    """Has each normalisation layer keep a tensor where no walk through the modules finds it."""
    from sglang.srt.layers.layernorm import RMSNorm

    original = RMSNorm.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.hoard = [torch.ones(3)]

    RMSNorm.__init__ = init


def scheduler(*runners: Any) -> Any:
    """SGLang's manager of weight updates over these runners: what requests come to."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    class Workers:
        def __init__(self, role: str, held: Any) -> None:
            self.weight_update_runners = lambda: [(role, one) for one in held]
            self.model_runner = held[0] if held else None

    made = object.__new__(SchedulerWeightUpdaterManager)
    made.tp_worker, made.draft_worker = Workers("target", runners[:1]), Workers("draft", runners[1:])
    made.tp_cpu_group, made.metrics_collector, made._session = None, None, None
    made.scheduler = SimpleNamespace(
        record_weight_version_change=lambda **_: None, _engine_paused=True, disaggregation_mode=None
    )  # fmt: skip
    made.flush_cache = lambda **_: True
    made.is_fully_idle, made.offload_tags = (lambda **_: True), set()
    made.memory_saver_adapter = SimpleNamespace(pause=lambda *_: None, resume=lambda *_: None)
    return made


def attempts(runner: Any, other: str) -> dict[str, str]:
    """Everything that writes weights, as requests and as calls: what each answers."""
    from sglang.srt.managers import io_struct

    manager, updater, model = scheduler(runner), runner.weight_updater, runner.model
    name, parameter = next(iter(model.named_parameters()))
    given = [(name, torch.zeros_like(parameter.data))]
    calls = {
        "begin_weight_update": lambda: manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="all")).message,
        "disk": lambda: manager.update_weights_from_disk(
            io_struct.UpdateWeightFromDiskReqInput(model_path=other, load_format="auto")
        ).message,
        "ipc": lambda: manager.update_weights_from_ipc(io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})).message,
        "updater, disk": lambda: updater.update_weights_from_disk(other, "auto")[1],
        "updater, tensor": lambda: updater.update_weights_from_tensor(given, "direct")[1],
        "updater, distributed": lambda: updater.load_weights_from_distributed(given)[1],
        "updater, ipc": lambda: updater.update_weights_from_ipc(SimpleNamespace(zmq_handles={}))[1],
        "reset_tensors": lambda: runner.check_weights("reset_tensors", role="target"),
        "load_weights": lambda: model.load_weights(given),
    }
    found = {}
    for what, call in calls.items():
        try:
            found[what] = str(call())
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def said_of(argument: str) -> str:
    """Why an engine with this argument, and whatever else it has, maps nothing."""
    from engine_shim.hooks import sglang_device

    original = sglang_device._argument
    sglang_device._argument = lambda name: True if name == argument else original(name)
    try:
        sglang_device.check()
    except Exception as error:
        return str(error)
    finally:
        sglang_device._argument = original
    return ""


def asleep_and_awake(runner: Any) -> None:
    from sglang.srt.managers import io_struct

    manager = scheduler(runner)
    torch.distributed.barrier, barrier = lambda *_: None, torch.distributed.barrier
    try:
        manager.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=["weights"]))
        for _, tensor in manager.stashed_model_static_state["buffers"]:
            tensor.add_(1)  # so that whatever is written back can be told from what was there
        manager.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(tags=["weights"]))
    finally:
        torch.distributed.barrier = barrier


def play(job: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    """One engine on an emulated GPU."""
    from engine import answers, arguments, publish, started

    from engine_shim.handoff import attachment
    from engine_shim.handoff.names import PoolPaths
    from engine_shim.hooks import sglang_device

    plan = job["gpu"]
    where = emulate(plan["library"], plan.get("name", f"cuda:{rank}"))
    if plan.get("hoard"):
        hoard()
    if arg := plan.get("argument"):  # as if this one had been given
        original = sglang_device._argument
        sglang_device._argument = lambda name: True if name == arg else original(name)
    args = arguments(job)
    publish(args, rank)
    runner = started(job, args, rank, port)
    models = [one.model for one in (runner, getattr(runner, "draft_runner", None)) if one is not None]
    result: dict[str, Any] = {
        "free": round(runner.pre_model_load_memory * _GIB), "preloaded": runner.preloaded_weights_bytes,
        "shared": [shared(model) for model in models],
        "trees": [tree(model) for model in models], "own": sum(map(own_bytes, models)), "total": where.total,
        "claims": sorted(
            one.generation for one in attachment.alive(PoolPaths.from_environment()) if one.residency.startswith("claim:")
        ),
    }  # fmt: skip
    if job.get("only") != "load":
        result["answers"] = answers(job, runner)
    allocate(where, result["own"])
    result["cache"] = cache(runner)
    if "arguments" in plan:
        result["arguments"] = {name: said_of(name) for name in plan["arguments"]}
    if "attempts" in plan:
        result["attempts"] = attempts(runner, plan["attempts"])
    if plan.get("sleep"):
        asleep_and_awake(runner)
    if "update" in job:
        result["update"] = list(runner.weight_updater.update_weights_from_disk(job["update"], "auto"))
        result["updated"] = answers(job, runner)
    result["shared afterwards"] = [shared(model) for model in models]
    return result
