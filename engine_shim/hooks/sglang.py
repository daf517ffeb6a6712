"""Hook of SGLang: its loader finds the weights as this very engine would hold them, or leaves them for the next one.

SGLang's own loader builds the model, and runs its post-processing, as ever. In between it calls the model's `load_weights`;
there a published state of exactly this configuration is bound, or the weights are read by SGLang itself, from the pool's
checkpoint tensors or from disk, and what they became is published. Tensors that a model makes of its weights at the end of
`load_weights` (`w_kc` and `w_vc` of latent attention, for one) are part of what is kept, whatever they are called.

The methods of SGLang's classes are wrapped in place, so that whoever holds the classes by name, subclasses them or asks for
their type finds what it expects. The hooks `patch_updates` and `patch_scheduler` notice when weights are replaced in a running
engine, and `patch_runner` when it is about to measure a GPU's memory.

On a GPU the copy that lies there is bound without copying, where there is one: the model is built without memory then.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping, Optional

import torch

from engine_shim import device, ladder, modules, onboard, parity, state, weight_files, writers
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound
from engine_shim.handoff.names import PoolPaths
from engine_shim.hooks import sglang_device
from engine_shim.ladder import Settings
from engine_shim.mapping import Uploaded
from engine_shim.start import Place, Start, looks_for_states, no_longer_shared
from engine_shim.state import Found
from engine_shim.weight_files import Weights, digest_of

log = logging.getLogger("ballast")

ENGINE = "SGLang"
FORMAT = 1  # of what this adapter keeps; another number is another key
LOAD_FORMATS = ("auto", "safetensors")

# SGLang sorts its arguments into namespaces. Those that say how requests are scheduled, served and watched do not reach the
# weights, and neither do the graphs and the communication around them. Whatever is not named here is part of the key, and so
# is whatever a later SGLang adds.
_NOT_WEIGHTS_NAMESPACES = frozenset(
    {"device", "disagg", "exec.comm", "exec.graph", "memory", "observability", "schedule", "serving"}
)
_WEIGHTS_ALL_THE_SAME = frozenset({"encoder_only", "language_only", "language_model_only"})  # which parts of a model are built
_NOT_WEIGHTS = frozenset(
    {
        # model: where the weights are and how they are read. Their content is a part of the key of its own.
        "model_path", "load_format", "download_dir", "model_checksum", "delete_ckpt_after_loading", "startup_weight_load_mode",
        "custom_weight_loader", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load", "engine_info_bootstrap_port",
        "remote_instance_weight_loader_seed_instance_ip", "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports", "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine", "modelexpress_config",
        "checkpoint_engine_wait_weights_before_ready", "weight_cache_mode", "weight_cache_socket", "weight_cache_timeout",
        # parallel: where the ranks meet. Which rank this is, and of how many, are parts of the key of their own.
        "nccl_port", "dist_timeout", "dist_init_addr", "gated_launch_port", "nnodes", "node_rank", "load_balance_method",
        "pp_max_micro_batch_size", "pp_async_batch_depth", "enable_p2p_check",
        # exec: what is returned, sampled, recorded and saved
        "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup", "enable_custom_logit_processor",
        "enable_return_hidden_states", "return_hidden_states_mode", "enable_return_routed_experts",
        "enable_return_indexer_topk", "enable_return_aux_hidden_states",
        "sampling_mask_max_tokens", "disable_outlines_disk_cache", "enable_watermark",
        "watermark_config", "watermark_key", "watermark_key_b", "watermark_context_window", "watermark_mixing_probability",
        "watermark_max_probability", "watermark_default_enabled", "watermark_enforce_all", "sampling_backend",
        "grammar_backend", "expert_distribution_recorder_mode", "expert_distribution_recorder_buffer_size",
        "expert_balancedness_report_mode", "eplb_rebalance_num_iterations", "eplb_rebalance_layers_per_chunk",
        "eplb_min_rebalancing_utilization_threshold", "mooncake_ib_device", "elastic_ep_scale_timeout",
        # lora: adapters come after the model
        "lora_paths", "max_loaded_loras", "max_loras_per_batch", "lora_eviction_policy", "lora_drain_wait_threshold",
        "enable_lora_overlap_loading",
        # mm: how pictures and sounds are handed over
        "enable_broadcast_mm_inputs_process", "enable_prefix_mm_cache", "mm_process_config", "mm_processor_worker_num",
        "mm_io_worker_num", "allowed_media_domains", "media_url_max_file_size_mb", "mm_preprocess_cache_size_mb",
        "trust_mm_content_hashes", "limit_mm_data_per_request", "enable_mm_global_cache", "image_processor_backend",
        "mm_global_cache_backend", "disable_fast_image_processor", "mm_feature_transport",
        # spec
        "spec_trace_dir", "speculative_ngram_external_corpus_path",
    }
)  # fmt: skip
_NOT_WEIGHTS_LOADING = frozenset(
    {
        "load_format", "download_dir", "tp_rank", "ignore_patterns", "load_group", "weight_cache_mode", "weight_cache_socket",
        "fallback_load_format", "decrypt_max_concurrency",
    }
)  # fmt: skip

# Switches in the environment count as far as they are set: their defaults are the version's.
_ENVIRONMENT = ("SGLANG_", "SGL_", "FLASHINFER_", "AITER_", "ONEDNN_", "USE_TRITON_", "USE_ROCM_")
_NOT_WEIGHTS_ENVIRONMENT = (
    "SGLANG_RUN_ID", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_LOG_",
    "SGLANG_TEST_", "SGLANG_IS_IN_CI", "SGLANG_PORT", "SGLANG_HOST", "SGLANG_TCP_STORE_PORT", "SGLANG_CACHE_DIR", "SGLANG_DG_",
    "SGLANG_JIT_", "SGLANG_TORCH_PROFILER_", "SGLANG_PROFILE_", "SGLANG_HICACHE_", "SGLANG_DISAGG", "SGLANG_MOONCAKE_",
    "SGLANG_KV_CANARY_", "SGLANG_WEIGHT_CACHE_", "SGLANG_BLOCK_", "SGLANG_IS_FIRST_RANK_ON_NODE", "SGLANG_SORT_WEIGHT_FILES",
    "SGLANG_SET_CPU_AFFINITY", "SGLANG_NUMA_", "SGLANG_AUTO_NUMA_", "SGLANG_ENCODER_", "SGLANG_GRPC_", "SGLANG_SCHEDULER_",
    "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "SGLANG_DISABLE_OUTLINES_DISK_CACHE",
    "FLASHINFER_WORKSPACE",
)  # fmt: skip
_KERNELS = (
    "sgl-kernel", "sglang-kernel", "sgl-kernel-cpu", "flashinfer-python", "triton", "deep-gemm", "aiter", "vllm",
)  # fmt: skip
_A_FEW = 64 << 20  # bytes of a file that an argument names, which are read to tell whether it is the same


# Where SGLang is wrapped


def patch(module: ModuleType) -> None:
    """Has SGLang's default loader ask us first. Idempotent. `module` is sglang.srt.model_loader.loader."""
    original = module.DefaultModelLoader
    if not callable(getattr(original, "resolve_model_weights", None)):
        raise Mismatch("this SGLang is older than 0.5.23, and its loader is another one")
    by_sglang = original.load_model
    if getattr(by_sglang, "_ballast", False):
        return
    # The last reads a checkpoint that is quantised already, by its parent's way.
    ours = (original, module.ModelOptModelLoader)

    @functools.wraps(by_sglang)
    def load_model(self: Any, *, model_config: Any, device_config: Any) -> Any:
        def load() -> Any:
            return by_sglang(self, model_config=model_config, device_config=device_config)

        if type(self) not in ours or str(_text(self.load_config.load_format)) not in LOAD_FORMATS:
            return load()
        return _load(self, model_config, load)

    vars(load_model)["_ballast"] = True
    original.load_model = load_model
    by_class: Any = vars(module)["_initialize_model"]

    @functools.wraps(by_class)
    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        step, token = _loading_now.get(), _loading_now.set(None)
        try:
            if step is None:
                return by_class(*args, **kwargs)
            return step.build(lambda: by_class(*args, **kwargs))
        finally:
            _loading_now.reset(token)

    vars(module)["_initialize_model"] = initialize_model


def patch_updates(module: ModuleType) -> None:
    """Has SGLang say when it has replaced weights. `module` is …model_runner_components.weight_updater. Idempotent."""
    updater = module.WeightUpdater
    for name, what in {
        "update_weights_from_disk": "update_weights_from_disk",
        "update_weights_from_tensor": "update_weights_from_tensor",
        "load_weights_from_distributed": "update_weights_from_distributed",
        "update_weights_from_ipc": "update_weights_from_ipc",
    }.items():
        original = getattr(updater, name, None)
        if original is not None and not getattr(original, "_ballast", False):
            setattr(updater, name, _telling(original, what))


def _telling(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            private = sglang_device.before_writing(what, self.get_model())
        except Mismatch as error:
            return False, str(error)
        try:
            return original(self, *args, **kwargs)
        finally:  # a failed one may have written as well
            with contextlib.suppress(Exception):
                no_longer_shared(self.get_model(), what, private)

    vars(update)["_ballast"] = True
    return update


def patch_scheduler(module: ModuleType) -> None:
    """Has a scheduler refuse what would write to a GPU's shared memory.

    `module` is sglang.srt.managers.scheduler_components.weight_updater. Idempotent.
    """
    for name, answer in {
        "begin_weight_update": "BeginWeightUpdateReqOutput",
        "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
        "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    }.items():
        original = getattr(module.SchedulerWeightUpdaterManager, name, None)
        if original is not None and not getattr(original, "_ballast", False):
            setattr(module.SchedulerWeightUpdaterManager, name, _asking(original, getattr(module, answer)))


def _asking(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    what = original.__name__

    @functools.wraps(original)
    def write(self: Any, recv_req: Any) -> Any:
        models = [runner.model for _, runner in self._select_runners()]
        refused = sglang_device.refusal(what, models)
        if refused is not None:
            log.error("%s", refused)
            return answer(success=False, message=refused)
        if what == "begin_weight_update":  # the others come back to us in each runner
            for model in models:
                sglang_device.before_writing(what, model)
        return original(self, recv_req)

    vars(write)["_ballast"] = True
    return write


def patch_runner(module: ModuleType) -> None:
    """Has SGLang's runner tell us before it measures the memory of a GPU, and before it overwrites weights to test an update.

    `module` is sglang.srt.model_executor.model_runner. Idempotent.
    """
    runner = module.ModelRunner
    measures, checks = runner.init_torch_distributed, runner.check_weights
    if getattr(measures, "_ballast", False):
        return

    @functools.wraps(measures)
    def init_torch_distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = Settings.read()
        if settings.mode != "off" and not self.is_draft_worker:
            ladder.configure_logging()
            paths = PoolPaths.from_environment()
            sglang_device.claim(lambda: _expected(self, settings, paths), paths)
        return measures(self, *args, **kwargs)

    @functools.wraps(checks)
    def check_weights(self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if action == "reset_tensors":
            sglang_device.before_writing("check_weights", self.model)
        return checks(self, action, *args, **kwargs)

    vars(init_torch_distributed)["_ballast"] = True
    runner.init_torch_distributed, runner.check_weights = init_torch_distributed, check_weights


# One start


def _load(loader: Any, model_config: Any, by_sglang: Callable[[], Any]) -> Any:
    """The highest rung that fits; on any failure of ours the next, with the engine none the wiser."""
    settings = Settings.read()
    if settings.mode == "off":
        return by_sglang()
    ladder.configure_logging()
    what = f"the state of {model_config.model_path}"
    freed = 0  # bytes of a GPU that were a copy's when SGLang measured them, and are the engine's own now
    for maps in (True, False) if sglang_device.maps() else (False,):
        step = _Step(settings, loader, model_config, maps)
        try:
            model = step.run(by_sglang)
        except Exception as error:
            step.close()
            if not step.touched:
                raise  # the engine's own failure, or the end that `require` asks for: nothing of ours was in it
            failed = step.start if step.mapped else None
            if failed is not None:
                log.warning("%s is copied instead of mapped: %s: %s", what, type(error).__name__, error)
            else:
                _failed(settings, f"{what} is not used", error)
                step.report("failed")
        except BaseException:  # such as Ctrl-C in a notebook, whose process goes on
            step.close()
            raise
        else:
            try:
                step.end(model)
                loader.preloaded_weights_bytes = step.preloaded() + freed
            except Exception as error:
                log.warning("%s, once the model was loaded: %s: %s", what, type(error).__name__, error)
            return model
        # Once more in a simpler way; out of the handler, since an exception keeps alive what was built.
        skeleton, lay = step.skeleton, (failed.number, failed.gpu) if failed is not None else (0, None)
        del step, failed
        gc.collect()
        if skeleton is not None:
            skeleton.forget()
        if lay[1] is None:
            break
        freed += onboard.give_up(lay[0], lay[1], "sglang")
    model = by_sglang()
    loader.preloaded_weights_bytes = freed
    return model


def _failed(settings: Settings, what: str, error: BaseException) -> None:
    """Something of ours went wrong: a line in the log, or with `require` the end."""
    log.debug("the whole story", exc_info=True)
    ladder.fall_back(settings, what, error if isinstance(error, HandoffError) else f"{type(error).__name__}: {error}")


class _Step:
    """What happens to one model while SGLang loads it: a `Start` as soon as the model is built and its key is known."""

    def __init__(self, settings: Settings, loader: Any, model_config: Any, maps: bool) -> None:
        self.settings = settings
        self.loader = loader
        self.model_config = model_config
        self.maps = maps  # whether what lies on a GPU may be bound there without copying
        self.start: Optional[_Start] = None
        self.skeleton: Optional[sglang_device.Skeleton] = None

    @property
    def touched(self) -> bool:
        return self.start is not None and self.start.touched

    @property
    def mapped(self) -> bool:
        return self.start is not None and self.start.mapped

    def run(self, by_sglang: Callable[[], Any]) -> Any:
        """SGLang's way, with us where the model is built, and between that and its `load_weights`."""
        own = self.loader.__dict__
        own["load_weights_and_postprocess"] = self._between
        token = _loading_now.set(self)
        try:
            model = by_sglang()
        finally:
            _loading_now.reset(token)
            own.pop("load_weights_and_postprocess", None)
        if self.start is not None:
            self.start.loaded(model)
        return model

    def build(self, by_sglang: Callable[[], Any]) -> Any:
        """The model; without memory if it is there already, on this rank's GPU."""
        if not (self.maps and looks_for_states() and self._something_lies_there()):
            return by_sglang()
        skeleton = sglang_device.Skeleton()
        built = self._without_memory(skeleton, by_sglang)
        if built is not None:
            self.skeleton = skeleton
            return built
        skeleton.forget()
        return by_sglang()

    def _something_lies_there(self) -> bool:
        """Whether there is any state at all on this rank's GPU: only then is it worth while to build a model twice."""
        where = sglang_device.gpu_or_none()
        with contextlib.suppress(HandoffError):
            return where is not None and state.lies_on(where, PoolPaths.from_environment())
        return False

    def _without_memory(self, skeleton: sglang_device.Skeleton, by_sglang: Callable[[], Any]) -> Any:
        """The model if its state lies on the GPU, else None."""
        try:
            model = skeleton.build(by_sglang)
            self.start = self._begin(model)
            return model if self.start.mapped else None
        except Exception as error:
            log.info("the model is built with memory of its own: %s: %s", type(error).__name__, error)
            log.debug("the whole story", exc_info=True)
            return None

    def _between(self, model: torch.nn.Module, weights: Any, target_device: Any) -> None:
        names: dict[str, Any] = model.__dict__

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            names.pop("load_weights", None)
            # SGLang's models have it; the type of nn.Module does not say so.
            return self._weights(model, lambda: model.load_weights(*args, **kwargs))  # type: ignore[operator]

        names["load_weights"] = load_weights
        try:
            type(self.loader).load_weights_and_postprocess(model, weights, target_device)
        finally:
            names.pop("load_weights", None)

    def _weights(self, model: torch.nn.Module, by_sglang: Callable[[], Any]) -> Any:
        what = f"the state of {self.model_config.model_path}"
        try:
            self.start = self.start or self._begin(model)
        except HandoffError as error:
            log.info("%s is neither looked for nor kept: %s", what, error)
        except Exception as error:
            _failed(self.settings, what, error)
        if self.start is not None:
            result = self.start.weights(model, by_sglang)
            if self.skeleton is not None and (left := self.skeleton.left()):
                raise Mismatch(f"{left} of the model's tensors are not in its module tree, and have no memory")
            return result
        result = by_sglang()
        self._tell(model, "loaded")
        return result

    def _begin(self, model: torch.nn.Module) -> _Start:
        paths = PoolPaths.from_environment()
        pool = ladder.pool(paths)
        pool.control()  # raises NotFound where there is no pool
        weights = _weights(self.loader, self.model_config, model, self.settings, pool)
        full = key(model, self.model_config, self.loader.load_config, weights.digest)
        place = _place(self.model_config, self.loader.load_config)
        return _Start(self.settings, weights, full, place, paths, self.maps)

    def _tell(self, model: torch.nn.Module, stage: str) -> None:
        if parity.wanted():
            place = _place(self.model_config, self.loader.load_config)
            parity.dump(model, stage, place.rank, place.role, parity.own(ENGINE))

    def end(self, model: torch.nn.Module) -> None:
        if self.start is not None:
            self.start.end(model)
        else:
            self._tell(model, "final")

    def report(self, outcome: str) -> None:
        if self.start is not None:
            self.start.report(outcome)

    def close(self) -> None:
        if self.start is not None:
            self.start.close()

    def preloaded(self) -> int:
        """The bytes of the model that were on the device before SGLang took stock of its free memory."""
        if self.start is None or self.start.found is None:
            return 0
        return foreign_bytes(self.start.found.segments) + self.start.freed


_loading_now: contextvars.ContextVar[Optional[_Step]] = contextvars.ContextVar("ballast_loading_now", default=None)


class _Start(Start):
    """The start of one model in one rank of SGLang."""

    def __init__(
        self, settings: Settings, weights: Weights, key: Mapping[str, Any], place: Place, paths: PoolPaths, maps: bool
    ) -> None:
        self.gpu = sglang_device.gpu_or_none()
        self.number = 0  # of the generation that is mapped
        self.freed = 0  # bytes of the GPU that were a copy's when SGLang measured them, and are the engine's own now
        self._maps = maps
        super().__init__(settings, ENGINE, weights, key, place, paths)

    def _look(self) -> None:
        super()._look()
        # What is copied is copied into the parameters that SGLang has built, so that a GPU need not have room for both.
        self.touched = self.mapped = bool(self.number)

    def _find(self) -> Optional[Found]:
        if not self._maps or self.gpu is None:
            return state.find(self.digest, self.label, self.paths, content=self.content)
        found = super()._find()
        if found is None or not isinstance(found.segments, Uploaded):
            self.number = found.generation.number if found is not None else 0
            return found
        self.freed = onboard.give_up(found.generation.number, self.gpu, "sglang", self.paths)
        return dataclasses.replace(found, segments=found.segments.host)

    def weights(self, model: torch.nn.Module, by_engine: Callable[[], Any]) -> Any:
        """Binds, or loads and keeps. What post-processing may write to, in memory that all engines share, is private first."""
        result = super().weights(model, by_engine)
        if self.mapped:
            processed = [module for module in model.modules() if sglang_device.transforms(module)]
            if nbytes := writers.keep_parameters(model, processed):
                log.info("%d bytes of %s that the engine may write to are its own copy", nbytes, self.name)
        return result

    def attached(self, model: torch.nn.Module, found: Found) -> None:
        super().attached(model, found)
        if self.mapped:
            writers.guard_loading(model, sglang_device.before_writing)


# Memory on a device: what SGLang is to know of it


def foreign_bytes(segments: object) -> int:
    """The bytes of a device that a state takes there in a holder's memory, each allocation once; 0 for one in host memory.

    SGLang leaves a share of the memory that was free before loading unused (`--mem-fraction-static`). What is mapped was not
    free then, so SGLang has to be told of it: once, and only of what this process did not allocate itself.
    """
    return sum({id(one): one.size for one in segments.imports}.values()) if isinstance(segments, device.Copy) else 0


# What is loaded, and where


def _weights(
    loader: Any, model_config: Any, model: torch.nn.Module, settings: Settings, pool: ladder.Pool
) -> Weights:
    """The content of every weight file that SGLang would read, as it resolves them itself.

    Raises Mismatch or NotFound where there are none, or files of another kind.
    """
    code = bool(_argument("trust_remote_code"))
    try:
        sources = loader.resolve_model_weights(model_config, model)
    except RuntimeError as error:
        if settings.model is None:
            raise NotFound(f"{error}; name the model with BALLAST_MODEL") from None
        return weight_files.of_pool(Path(model_config.model_path), code, settings.model, pool, [""])
    parts: list[Weights] = []
    for source in sources:
        if not source.use_safetensors:
            raise Mismatch(f"the weights in {source.hf_folder} are no safetensors files")
        more = [source.source.prefix]
        parts.append(
            weight_files.of_files(Path(source.hf_folder), source.weight_files, code, settings.model, pool, more)
        )
    if len(parts) == 1:
        return parts[0]
    files = tuple(file for part in parts for file in part.files)
    content = weight_files.content_of([{part.content} for part in parts])
    return Weights(digest_of([part.digest for part in parts]), parts[0].model, content, files)


def _place(model_config: Any, load_config: Any) -> Place:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    tp, pp = int(parallel.tp_size), int(parallel.pp_size)
    replicas = int(_optional(parallel, "dp_size") or 1)
    nodes = int(_optional(parallel, "nnodes") or 1)
    return Place(
        rank=tp * int(parallel.pp_rank) + int(parallel.tp_rank),
        role=_role(model_config, load_config),
        replica=int(_optional(parallel, "dp_rank") or 0),
        expected=max(1, tp * pp // nodes) * replicas * (1 + _drafts()),
    )


def _role(model_config: Any, load_config: Any) -> str:
    """A draft model of speculative decoding must never be taken for its target, nor one of its layers for another."""
    if not getattr(model_config, "is_draft_model", False):
        return "target"
    index = getattr(load_config, "draft_model_idx", None)
    return "draft" if index is None else f"draft{index}"


def _drafts() -> int:
    """How many draft models a rank loads."""
    algorithm = _argument("speculative_algorithm")
    if algorithm is None or str(algorithm).upper() == "NGRAM":
        return 0
    return int(_argument("speculative_num_steps") or 1) if _argument("enable_multi_layer_eagle") else 1


def _optional(owner: Any, name: str) -> Any:
    """An attribute that may not be there, or not set in this process."""
    try:
        return getattr(owner, name)
    except (AttributeError, RuntimeError, ValueError):
        return None


# The key


def key(model: torch.nn.Module, model_config: Any, load_config: Any, checkpoint: str) -> dict[str, Any]:
    """Everything that a rank's state depends on: each field of the fingerprint of SGLang's own weight cache, and what that one
    leaves out. Raises Mismatch if something of it cannot be written down.

    Long parts are digests: they are compared, never read, and some of what goes in is nobody else's business.
    """
    import sglang
    import transformers

    try:
        return {
            "engine": ENGINE,
            "format": FORMAT,
            "version": sglang.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kernels": _versions(),
            "checkpoint": checkpoint,
            "role": _role(model_config, load_config),
            "class": modules.qualified(type(model)),
            "architecture": _text((model_config.hf_config.architectures or [None])[0]),
            "dtype": str(model_config.dtype),
            "revision": model_config.revision or "",
            "quantization": _text(model_config.quantization),
            "quantization_config": digest_of(_plain(_quantization(model, model_config))),
            "config": digest_of(_hf_config(model_config.hf_config)),
            "overrides": digest_of(_plain(getattr(model_config, "model_override_args", None))),
            "context_length": int(model_config.context_len),
            "loading": digest_of(_loading(load_config)),
            "experts": _experts(),
            "environment": digest_of(environment(os.environ)),
            **{f"arguments of {name}": digest_of(part) for name, part in sorted(_arguments().items())},
            **_device(),
            **_ranks(),
        }
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Mismatch(f"this engine's configuration cannot be written down ({type(error).__name__}: {error})") from error


def _ranks() -> dict[str, Any]:
    """This process's place in each kind of parallelism."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel = get_parallel()
    found: dict[str, Any] = {}
    for name in ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp", "attn_dcp"):
        for what in ("size", "rank"):
            found[f"{name}_{what}"] = _plain(_optional(parallel, f"{name}_{what}"))
    for name in ("dp_size", "ep_size", "enable_dp_lm_head", "enable_dp_attention", "moe_dense_tp_size"):
        found[name] = _plain(_optional(parallel, name))
    found["moe_a2a_backend"] = _plain(get_exec().moe.moe_a2a_backend)
    return found


def _arguments() -> dict[str, dict[str, Any]]:
    """SGLang's arguments in effect, as far as they may reach the weights, by namespace."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context

    context = get_context()
    spaces: Mapping[str, str] = namespace_of(type(context.server_args))
    found: dict[str, dict[str, Any]] = {}
    for name, value in context.resolved_server_args_dict().items():
        space = spaces.get(name, "other")
        wanted = space not in _NOT_WEIGHTS_NAMESPACES or name in _WEIGHTS_ALL_THE_SAME
        if wanted and name not in _NOT_WEIGHTS:
            found.setdefault(space, {})[name] = _plain(value)
    return found


def _argument(name: str) -> Any:
    from sglang.srt.runtime_context import get_context

    return get_context().config_leaf(name)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The switches that are set and may reach the weights."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_ENVIRONMENT) and not name.startswith(_NOT_WEIGHTS_ENVIRONMENT)
    }


def _versions() -> dict[str, str]:
    """Of the packages that bring kernels, as far as they are installed."""
    from importlib import metadata

    found = {}
    for name in _KERNELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _loading(load_config: Any) -> dict[str, Any]:
    return {
        name: _plain(value) for name, value in sorted(vars(load_config).items()) if name not in _NOT_WEIGHTS_LOADING
    }


def _experts() -> Optional[str]:
    """Which expert lies where, once the load balancer has had its say. None without one."""
    from sglang.srt.eplb import expert_location

    placement = expert_location.get_global_expert_location_metadata()
    if placement is None:
        return None
    rows = {
        name: value.tolist() if isinstance(value, torch.Tensor) else _plain(value)
        for name, value in sorted(vars(placement).items())
    }
    return digest_of(rows)


def _device() -> dict[str, Any]:
    """The kind of device, and what of it decides how weights are laid out."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils import cpu_has_amx_support
    from sglang.srt.utils.common import is_cpu

    if is_cpu():
        flags = ["amx"] if cpu_has_amx_support() else []
        return {"device": "cpu", "capability": " ".join([str(torch.backends.cpu.get_cpu_capability()), *flags])}
    capability = current_platform.get_device_capability()
    name = getattr(current_platform, "get_device_name", None)
    return {
        "device": str(current_platform.device_type),
        "capability": None if capability is None else f"{capability.major}.{capability.minor}",
        "device_name": _text(name()) if name is not None else None,
    }


def _hf_config(config: Any) -> Any:
    """The model's configuration as it is in effect, overrides and all, without where it came from."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_paths(v) for k, v in value.items() if k not in ("_name_or_path", "name_or_path")}
        return [without_paths(item) for item in value] if isinstance(value, list) else value

    return without_paths(_plain(config.to_dict()))


def _quantization(model: torch.nn.Module, model_config: Any) -> list[Any]:
    """What the checkpoint says of its quantisation, and what SGLang has made of it."""
    found: Any = getattr(model_config.hf_config, "quantization_config", None)
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    method = getattr(model, "quant_config", None)
    return [found, None if method is None else [modules.qualified(type(method)), _told(vars(method))]]


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as they are, of others the type."""
    told: dict[str, Any] = {}
    for name, value in values.items():
        try:
            told[name] = _plain(value)
        except TypeError:
            told[name] = modules.qualified(type(value))
    return told


def _plain(value: Any) -> Any:
    """A value as JSON can tell it, the same in every process. The name of a file counts as what is in the file.

    Raises TypeError for what is more than a value.
    """
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return _content(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, type):
        return modules.qualified(value)
    fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    if fields:
        return {name: _plain(getattr(value, name)) for name in fields}
    raise TypeError(f"a {modules.qualified(type(value))}")


def _content(text: str) -> Any:
    try:
        status = os.stat(text) if text else None
        if status is None or not os.path.isfile(text):
            return text
        if status.st_size > _A_FEW:
            return {"file": [status.st_size, status.st_mtime_ns]}
        return {"file": weight_files.file_digest(Path(text))}
    except (OSError, ValueError):
        return text


# What is asked for before anything is loaded

# What of a key is known only once a model is built, or may still change until then.
_LATER = ("class", "config", "quantization_config", "loading", "experts")
_LATER_OF_A_DRAFT = ("arguments of", "context_length", "revision")


def _expected(runner: Any, settings: Settings, paths: PoolPaths) -> list[str]:
    """The keys of the newest states that fit in all that is known of the target and of its draft models before they are loaded.
    A forecast: with it copies are kept where they are; what is bound is decided, and counted, later."""
    if not looks_for_states():
        return []
    from sglang.srt.configs.model_config import ModelConfig

    drafts = []
    if path := _argument("speculative_draft_model_path"):
        drafts.append(
            ModelConfig.from_server_args(
                runner.server_args, model_path=path, model_revision=_argument("speculative_draft_model_revision"),
                is_draft_model=True, context_length=runner.model_config.context_len,
            )
        )  # fmt: skip
    found = []
    for config in (runner.model_config, *drafts):
        for index in range(_drafts()) if config in drafts and _argument("enable_multi_layer_eagle") else (None,):
            try:
                parts = _parts(config, index, settings, paths)
                key = state.newest_with(parts, paths)
            except (HandoffError, RuntimeError, OSError, ValueError) as error:
                log.info("no copy of %s is asked for: %s", config.model_path, error)
            else:
                found += [] if key is None else [key]
                if key is None and (unlike := state.differences(parts, paths)):
                    log.debug("no copy of %s is asked for: all states differ in %s and more", config.model_path, unlike)
    return found


def _parts(config: Any, draft: Optional[int], settings: Settings, paths: PoolPaths) -> dict[str, Any]:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import get_model_architecture

    load_config = LoadConfig(load_format=_argument("load_format"), draft_model_idx=draft)
    model = get_model_architecture(config)[0]  # stands for the model where its class says which files are read
    weights = _weights(DefaultModelLoader(load_config), config, model, settings, ladder.pool(paths))
    full = key(model, config, load_config, weights.digest)
    later = _LATER + (_LATER_OF_A_DRAFT if config.is_draft_model else ())
    return {name: part for name, part in full.items() if not name.startswith(later)}


def _text(value: Any) -> Optional[str]:
    return None if value is None else str(value.value if isinstance(value, enum.Enum) else value)
