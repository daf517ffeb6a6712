"""Hook of vLLM: its loader finds the weights as this very engine would hold them, or leaves them for the next one.

vLLM's own loader builds the model, and runs its post-processing, as ever; in between, where it reads the weights, one of these
happens: a published state of exactly this configuration is bound (the best rung of the ladder); or the weights are read by
vLLM itself, from the pool's checkpoint tensors or from disk, and what they became is published. So whatever goes wrong with
us, the engine is where it would be without us: with a built model whose weights are to be read.

What is special about a kind of device stands in one place, `_exportable`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Container, Mapping, Optional

import torch

from engine_shim import ladder, modules, onboard, parity, start, state, weight_files, writers
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound
from engine_shim.handoff.names import PoolPaths
from engine_shim.hooks import vllm_device
from engine_shim.ladder import Settings
from engine_shim.state import Found, Keeper
from engine_shim.weight_files import Weights, digest_of

log = logging.getLogger("ballast")

FORMAT = 1  # of what this adapter keeps; another number is another key
LOAD_FORMATS = ("auto", "hf", "safetensors")

# What vLLM's configuration of a model holds that does not reach its weights, or is told elsewhere (`hf_overrides` may be a
# function; the configuration that comes of it is part of the key). Everything else is part of the key, and so is
# whatever a later vLLM adds.
_NOT_WEIGHTS = frozenset(
    {
        "model", "model_weights", "hf_config", "hf_text_config", "tokenizer", "tokenizer_mode", "tokenizer_revision", "seed",
        "served_model_name", "hf_token", "hf_config_path", "logprobs_mode", "max_logprobs", "allowed_local_media_path",
        "allowed_media_domains", "skip_tokenizer_init", "generation_config", "override_generation_config", "enforce_eager",
        "logits_processors", "io_processor_plugin", "disable_cascade_attn", "media_io_kwargs", "hf_overrides",
    }
)  # fmt: skip
_NOT_WEIGHTS_LOADING = frozenset(
    {
        "download_dir", "use_tqdm_on_load", "safetensors_load_strategy", "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size", "load_format",
    }
)  # fmt: skip
_NOT_WEIGHTS_ENVIRONMENT = frozenset(
    {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_PLUGINS", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"}
)
# vLLM leaves these out of its own list of what matters, but they decide how weights are packed.
_PACKING_ENVIRONMENT = ("VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK", "VLLM_CPU_SGL_KERNEL", "ONEDNN_MAX_CPU_ISA")


def patch(module: ModuleType) -> None:
    """Puts our loader in the place of vLLM's for the load formats of safetensors checkpoints. Idempotent.

    `module` is vllm.model_executor.model_loader.
    """
    original = module.DefaultModelLoader
    ours = _loader(original)
    table = module._LOAD_FORMAT_TO_MODEL_LOADER
    for load_format in LOAD_FORMATS:
        if table.get(load_format) is original:  # another plugin's loader stays
            table[load_format] = ours


def _loader(original: Any) -> Any:
    """A subclass of vLLM's default loader."""

    class BallastModelLoader(original):  # type: ignore[misc]
        """vLLM's default loader, with the weights from a Ballast pool where they are there."""

        _start: Optional[_Step] = None

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            def by_vllm(step: Optional[_Step]) -> Any:
                self._start = step
                try:
                    model = original.load_model(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                    if step is not None:
                        step.loaded(model)
                    return model
                finally:
                    self._start = None

            return _load(self, vllm_config, model_config, prefix, by_vllm)

        def get_external_weight_memory(self, vllm_config: Any) -> int:
            settings, paths = Settings.read(), PoolPaths.from_environment()
            if settings.mode == "off" or not start.looks_for_states():
                return 0
            return vllm_device.external(vllm_config, lambda: _expected(self, vllm_config, settings, paths), paths)

        def create_model(self, *args: Any, **kwargs: Any) -> Any:
            # What is mapped takes its place: to allocate it first would need the memory of a GPU twice.
            with torch.device("meta") if self._start is not None and self._start.mapped else contextlib.nullcontext():
                return original.create_model(self, *args, **kwargs)

        def load_weights(self, model: Any, model_config: Any) -> None:
            if self._start is None:
                original.load_weights(self, model, model_config)
                start.no_longer_shared(model, "vLLM has loaded weights again")
            else:
                self._start.weights(model, lambda: original.load_weights(self, model, model_config))

    BallastModelLoader.__qualname__ = "BallastModelLoader"
    BallastModelLoader.__module__ = __name__
    return BallastModelLoader


def _load(loader: Any, vllm_config: Any, model_config: Any, prefix: str, by_vllm: Callable[[Optional[_Step]], Any]) -> Any:
    """One engine start: the highest rung that fits; on any failure of ours the next, with the engine none the wiser."""
    settings = Settings.read()
    if settings.mode == "off":
        return by_vllm(None)
    ladder.configure_logging()
    what = f"the state of {model_config.model}"
    ours: Optional[_Start] = None
    try:
        ours = _Start(settings, loader, vllm_config, model_config, prefix)
    except HandoffError as error:
        log.info("%s is neither looked for nor kept: %s", what, error)
        return by_vllm(_Told.of(vllm_config, model_config))
    except Exception as error:
        _failed(settings, what, error)
        return by_vllm(None)
    registered = _registered(vllm_config)
    try:
        model = by_vllm(ours)
    except Exception as error:
        ours.close()
        if not ours.touched:
            raise  # the engine's own failure: nothing of ours was in it
        _failed(settings, f"{what} is not used", error)
        ours.report("failed")
    except BaseException:  # such as Ctrl-C in a notebook, whose process goes on
        ours.close()
        raise
    else:
        ours.end(model)
        return model
    # Once more without us; out of the handler, since an exception keeps alive what was built.
    model = ours = None
    gc.collect()
    _unregister(vllm_config, registered)
    return by_vllm(None)


def _failed(settings: Settings, what: str, error: BaseException) -> None:
    """Something of ours went wrong: a line in the log, or with `require` the end."""
    log.debug("the whole story", exc_info=True)
    ladder.fall_back(settings, what, error if isinstance(error, HandoffError) else f"{type(error).__name__}: {error}")


def _registered(vllm_config: Any) -> tuple[dict[str, Any], list[str]]:
    """What building a model leaves in vLLM's configuration: a second build would find its own layers there."""
    compilation = vllm_config.compilation_config
    return dict(compilation.static_forward_context), list(getattr(compilation, "static_all_moe_layers", ()))


def _unregister(vllm_config: Any, before: tuple[dict[str, Any], list[str]]) -> None:
    compilation = vllm_config.compilation_config
    compilation.static_forward_context.clear()
    compilation.static_forward_context.update(before[0])
    if hasattr(compilation, "static_all_moe_layers"):
        compilation.static_all_moe_layers[:] = before[1]


class _Step:
    """What happens to one model while vLLM loads it."""

    mapped = False  # whether the weights lie in shared device memory: then the model is built without any

    def weights(self, model: torch.nn.Module, by_engine: Callable[[], Any]) -> Any:
        """Called between the building of the model and its post-processing."""
        raise NotImplementedError

    def loaded(self, model: torch.nn.Module) -> None:
        """Called when vLLM is done. What it raises makes the model be loaded once more."""


class _Told(_Step):
    """Loads as ever, and tells `ballast parity` what came of it."""

    def __init__(self, rank: int, role: str) -> None:
        self.rank, self.role, self.rung = rank, role, parity.own("vLLM")

    @classmethod
    def of(cls, vllm_config: Any, model_config: Any) -> Optional[_Told]:
        if not parity.wanted():
            return None
        return cls(_ranks(vllm_config.parallel_config)["rank"], _role(vllm_config, model_config))

    def weights(self, model: torch.nn.Module, by_engine: Callable[[], Any]) -> Any:
        by_engine()
        parity.dump(model, "loaded", self.rank, self.role, self.rung)

    def loaded(self, model: torch.nn.Module) -> None:
        parity.dump(model, "final", self.rank, self.role, self.rung)


class _Start(start.Start, _Step):
    """The start of one model in one rank of vLLM."""

    def __init__(self, settings: Settings, loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> None:
        paths = PoolPaths.from_environment()
        pool = ladder.pool(paths)
        pool.control()  # raises NotFound where there is no pool
        weights = _weights(loader, model_config, settings, pool)
        found = key(vllm_config, model_config, prefix, weights.digest)
        roles = 2 if _loads_a_draft(vllm_config.speculative_config) else 1
        expected = int(vllm_config.parallel_config.world_size) * int(found["dp_size"]) * roles
        place = start.Place(int(found["rank"]), found["role"], int(found["dp_rank"]), expected)
        self.zero_copy = _wants_zero_copy(vllm_config)
        # Post-processing has another result with packing than without; what was captured before it is the same.
        self.variant = "zero-copy" if self.zero_copy else "packed"
        self.remark = ", used where it lies, without packing" if self.zero_copy else ""
        self.gpu = vllm_device.gpu()
        if self.gpu is not None:
            vllm_device.check(vllm_config)
        self.eager = bool(vllm_config.model_config.enforce_eager)
        self._undo: list[Callable[[], None]] = []
        super().__init__(settings, "vLLM", weights, found, place, paths)

    def weights(self, model: torch.nn.Module, by_engine: Callable[[], Any]) -> Any:
        """Binds, or loads and keeps; then sees to it that what was captured after post-processing is so only once."""
        if getattr(model, "secondary_weights", ()) or getattr(model, "allow_patterns_overrides", None) is not None:
            log.info("%s reads more than its checkpoint's weight files: its state is neither used nor kept", self.name)
            self.refuse_mapped()
            self.found = None
            return by_engine()
        result = super().weights(model, by_engine)
        if self.found is not None:
            self._mark_processed(model, self.found.processed)
            if writers.mapped(self.found.segments):
                self._own_before_processing(model, self.found.processed)
        elif self.keeper is not None:
            self._keep_processed(model, self.keeper)
        if self.zero_copy:
            self._undo.append(_without_packing())
        return result

    def levels(self, model: torch.nn.Module) -> Mapping[str, str]:
        super().levels(model)
        online = [path for path, m in model.named_modules() if _quantised_online(m)]
        if online:
            raise Mismatch(f"{online[0]} is quantised while it is read")
        every = model.named_modules(remove_duplicate=False)
        return {path: state.PROCESSED for path, module in every if _exportable(module)}

    def check(self, model: torch.nn.Module, found: Found) -> None:
        super().check(model, found)
        wrong = [path for path in found.processed if not _exportable(model.get_submodule(path))]
        if wrong:
            raise Mismatch(f"{wrong[0]} was kept after post-processing, which this engine does otherwise")

    def _mark_processed(self, model: torch.nn.Module, paths: Any) -> None:
        """Modules that were captured after their post-processing only get their kernels set up."""
        from vllm.model_executor.utils import weights_already_processed

        def skipping(original: Callable[[Any], None]) -> Callable[[Any], None]:
            def process(layer: Any) -> None:
                with weights_already_processed():
                    original(layer)

            return process

        self._wrap_processing(model, paths, skipping)

    def _own_before_processing(self, model: torch.nn.Module, processed: Container[str]) -> None:
        """Modules that were captured before their post-processing get memory of their own for it: it may write in place, and
        what is mapped on a GPU is everybody's."""

        def owning(original: Callable[[Any], None]) -> Callable[[Any], None]:
            def process(layer: Any) -> None:
                onboard.make_private(layer)
                original(layer)

            return process

        own = [path for path, module in model.named_modules() if path not in processed and vllm_device.transforms(module)]
        self._wrap_processing(model, own, owning)

    def _keep_processed(self, model: torch.nn.Module, keeper: Keeper) -> None:
        """Modules that are captured after their post-processing are, each as soon as it is done."""
        try:
            by_layer: dict[int, list[str]] = {}
            for path in keeper.levels:
                by_layer.setdefault(id(model.get_submodule(path)), []).append(path)

            def keeping(original: Callable[[Any], None]) -> Callable[[Any], None]:
                def process(layer: Any) -> None:
                    original(layer)
                    if self.keeper is keeper:
                        try:
                            keeper.process(model, by_layer[id(layer)])
                        except Exception as error:
                            self.give_up_keeping(error)

                return process

            self._wrap_processing(model, keeper.levels, keeping)
        except Exception as error:
            self.give_up_keeping(error)

    def _wrap_processing(
        self, model: torch.nn.Module, paths: Any, wrapped: Callable[[Callable[[Any], None]], Callable[[Any], None]]
    ) -> None:
        layers: list[Any] = [model.get_submodule(path) for path in paths]
        for method in {id(layer.quant_method): layer.quant_method for layer in layers}.values():
            own: dict[str, Any] = method.__dict__
            own["process_weights_after_loading"] = wrapped(method.process_weights_after_loading)
            self._undo.append(functools.partial(own.pop, "process_weights_after_loading", None))

    def loaded(self, model: torch.nn.Module) -> None:
        self._unwrap()
        super().loaded(model)

    def close(self) -> None:
        self._unwrap()
        super().close()

    def attached(self, model: torch.nn.Module, found: Found) -> None:
        super().attached(model, found)
        vllm_device.guard(model, found.segments, self.eager)

    def _unwrap(self) -> None:
        while self._undo:
            self._undo.pop()()


# The seam: what depends on the kind of device


def _exportable(module: torch.nn.Module) -> bool:
    """Whether what post-processing makes of this module's tensors can be kept and bound as it is.

    On a CPU only unquantised experts: Linear layers end in a packed copy behind a C++ pointer, and the Zen path sets up its
    experts anew from what is not packed. Elsewhere wherever vLLM says that a method can start from processed weights.
    """
    method = getattr(module, "quant_method", None)
    if method is None or not callable(getattr(method, "process_weights_after_loading", None)):
        return False
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        zen = getattr(current_platform, "is_zen_cpu", lambda: False)
        return type(method).__name__ == "UnquantizedFusedMoEMethod" and not zen()
    return bool(getattr(method, "supports_pre_processed_weights", False))


def _quantised_online(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


def _wants_zero_copy(vllm_config: Any) -> bool:
    """Whether Linear layers on a CPU are to run on the shared bytes themselves. It costs speed: see docs/vllm.md."""
    from vllm.platforms import current_platform

    asked = os.environ.get("BALLAST_VLLM_ZERO_COPY", "").strip().lower() in ("1", "on", "yes", "true")
    return asked and bool(current_platform.is_cpu())


def _without_packing() -> Callable[[], None]:
    """Has vLLM's CPU layers keep their weights and use torch's own kernel, until the returned function is called."""
    import vllm.model_executor.layers.utils as layers

    ops, packs = layers.ops, layers.check_cpu_sgl_kernel
    one_dnn = ops._supports_onednn
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False

    def undo() -> None:
        ops._supports_onednn = one_dnn
        layers.check_cpu_sgl_kernel = packs

    return undo


def _device() -> dict[str, Any]:
    """The kind of device, and what of it decides how weights are laid out."""
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"device": str(current_platform.device_type)}
    capability = None
    with contextlib.suppress(Exception):
        capability = str(current_platform.get_device_capability())
    if current_platform.is_cpu():
        found["device_name"] = f"{current_platform.get_cpu_architecture()}"
        tests = ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported", "_is_vnni_supported")
        flags = [name for name in tests if getattr(torch.cpu, name, lambda: False)()]
        capability = f"{torch.backends.cpu.get_cpu_capability()} {' '.join(flags)}"
    else:
        with contextlib.suppress(Exception):
            found["device_name"] = str(current_platform.get_device_name())
    found["capability"] = capability
    return found


# The key


def key(vllm_config: Any, model_config: Any, prefix: str, checkpoint: str) -> dict[str, Any]:
    """Everything that a rank's state depends on. Raises Mismatch if something of it cannot be written down.

    Long parts are digests: they are compared, never read, and some of what goes in is nobody else's business.
    """
    import transformers
    import vllm
    from vllm import envs
    from vllm.model_executor.model_loader.utils import get_model_cls

    try:
        parallel = vllm_config.parallel_config
        speculative = vllm_config.speculative_config
        role = _role(vllm_config, model_config)
        environment = {k: v for k, v in envs.compile_factors().items() if k not in _NOT_WEIGHTS_ENVIRONMENT}
        environment.update({name: os.environ.get(name) for name in _PACKING_ENVIRONMENT})
        return {
            "engine": "vllm",
            "format": FORMAT,
            "version": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "checkpoint": checkpoint,
            "role": role,
            "prefix": prefix,
            "class": modules.qualified(get_model_cls(model_config)),
            "dtype": str(model_config.dtype),
            "quantization": _text(model_config.quantization),
            "quantization_config": digest_of(_quantization(vllm_config, model_config)),
            "config": digest_of(_hf_config(model_config.hf_config)),
            "model": digest_of(_factors(model_config, _NOT_WEIGHTS)),
            "loading": digest_of(_factors(vllm_config.load_config, _NOT_WEIGHTS_LOADING)),
            "parallel": str(parallel.compute_hash()),
            "lora": _hash(vllm_config.lora_config),
            "kernels": _hash(getattr(vllm_config, "kernel_config", None)),
            "offload": _hash(getattr(vllm_config, "offload_config", None)),
            "speculative": _hash(speculative) if role == "draft" else None,
            "environment": digest_of(environment),
            **_device(),
            **_ranks(parallel),
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise Mismatch(f"this engine's configuration cannot be written down ({type(error).__name__}: {error})") from error


# What a draft's key has that is known only once vLLM loads it, since it gives a draft a configuration of its own.
_LATER = ("prefix", "quantization_config", "parallel", "kernels")


def _expected(loader: Any, vllm_config: Any, settings: Settings, paths: PoolPaths) -> list[str]:
    """The keys of the states that this rank will look for, as far as that can be told before anything is loaded: the target's,
    and of a draft model the newest state that fits in all that is known. What was guessed wrong is put right afterwards."""
    pool, target = ladder.pool(paths), vllm_config.model_config
    found = [modules.key_digest(key(vllm_config, target, "", _weights(loader, target, settings, pool).digest))]
    if _loads_a_draft(vllm_config.speculative_config):
        draft = vllm_config.speculative_config.draft_model_config
        try:
            parts = key(vllm_config, draft, "", _weights(loader, draft, settings, pool).digest)
            fits = state.newest_with({name: part for name, part in parts.items() if name not in _LATER}, paths)
        except (HandoffError, RuntimeError, OSError) as error:
            log.info("of a draft model nothing is counted as lying on the GPU already: %s", error)
        else:
            found += [fits] if fits is not None else []
    return found


def _role(vllm_config: Any, model_config: Any) -> str:
    """A draft model of speculative decoding must never be taken for its target."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return "draft" if draft is not None and model_config is draft else "target"


def _loads_a_draft(speculative: Any) -> bool:
    return getattr(speculative, "draft_model_config", None) is not None and speculative.method not in ("ngram", "suffix")


def _ranks(parallel: Any) -> dict[str, Any]:
    """This process's place. vLLM's groups know it; before they are there, the configuration does."""
    from vllm.distributed import parallel_state

    found: dict[str, Any] = {"rank": int(parallel.rank)}
    for name, group in (("tp", "_TP"), ("pp", "_PP"), ("dp", "_DP"), ("ep", "_EP"), ("pcp", "_PCP"), ("dcp", "_DCP")):
        coordinator = getattr(parallel_state, group, None)
        found[f"{name}_size"] = coordinator.world_size if coordinator is not None else 1
        found[f"{name}_rank"] = coordinator.rank_in_group if coordinator is not None else 0
    if torch.distributed.is_initialized():
        found["rank"] = torch.distributed.get_rank() % int(parallel.world_size)
    return found


def _factors(config: Any, without: frozenset[str]) -> dict[str, object]:
    from vllm.config.utils import get_hash_factors

    factors: dict[str, object] = get_hash_factors(config, set(without))
    return factors


def _hash(config: Any) -> Optional[str]:
    if config is None:
        return None
    computed = getattr(config, "compute_hash", None)
    return str(computed()) if computed is not None else digest_of(_factors(config, frozenset()))


def _hf_config(config: Any) -> Any:
    """The model's configuration as it is in effect, overrides and all, without where it came from."""
    document = json.loads(config.to_json_string(use_diff=False))

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_paths(v) for k, v in value.items() if k not in ("_name_or_path", "name_or_path")}
        return [without_paths(item) for item in value] if isinstance(value, list) else value

    return without_paths(document)


def _quantization(vllm_config: Any, model_config: Any) -> Any:
    from vllm.config.utils import normalize_value

    found: Any = getattr(model_config.hf_config, "quantization_config", None)
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    method = vllm_config.quant_config
    return [found, normalize_value(getattr(model_config, "quantization_config", None)), modules.told(method)]


def _text(value: Any) -> Optional[str]:
    return None if value is None else str(value)


def _weights(loader: Any, model_config: Any, settings: Settings, pool: ladder.Pool) -> Weights:
    """What vLLM was told to load. Raises Mismatch or NotFound where there are no files, or files of another kind."""
    code = bool(model_config.trust_remote_code)
    try:
        folder, files, safetensors, _ = loader._prepare_weights(model_config.model, None, model_config.revision, True, None)
    except RuntimeError as error:
        if settings.model is None:
            raise NotFound(f"{error}; name the model with BALLAST_MODEL") from None
        return weight_files.of_pool(Path(model_config.model), code, settings.model, pool)
    if not safetensors:
        raise Mismatch(f"the weights in {folder} are no safetensors files")
    return weight_files.of_files(Path(folder), files, code, settings.model, pool)
