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
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping, Optional

import torch

from engine_shim import ladder, modules, parity, state
from engine_shim.handoff import catalog, identity
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound
from engine_shim.handoff.identity import Stat
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths, check_model
from engine_shim.handoff.room import gib
from engine_shim.ladder import Settings
from engine_shim.state import Found, Keeper

log = logging.getLogger("ballast")

FORMAT = 1  # of what this adapter keeps; another number is another key
LOAD_FORMATS = ("auto", "hf", "safetensors")
_ADOPTION = 600.0  # seconds that a publisher looks after its publication, and `ballast prepare` waits for it

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
_CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "params.json")


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
            def by_vllm(start: Optional[_Step]) -> Any:
                self._start = start
                try:
                    model = original.load_model(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                    if start is not None:
                        start.loaded(model)
                    return model
                finally:
                    self._start = None

            return _load(self, vllm_config, model_config, prefix, by_vllm)

        def load_weights(self, model: Any, model_config: Any) -> None:
            if self._start is None:
                original.load_weights(self, model, model_config)
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
    start: Optional[_Start] = None
    try:
        start = _Start(settings, loader, vllm_config, model_config, prefix)
    except HandoffError as error:
        log.info("%s is neither looked for nor kept: %s", what, error)
        return by_vllm(_Told.of(vllm_config, model_config))
    except Exception as error:
        _failed(settings, what, error)
        return by_vllm(None)
    registered = _registered(vllm_config)
    try:
        model = by_vllm(start)
    except Exception as error:
        start.close()
        if not start.touched:
            raise  # the engine's own failure: nothing of ours was in it
        _failed(settings, f"{what} is not used", error)
        start.report("failed")
    else:
        start.end(model)
        return model
    # Once more without us; out of the handler, since an exception keeps alive what was built.
    model = start = None
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

    def weights(self, model: torch.nn.Module, by_vllm: Callable[[], None]) -> None:
        """Called between the building of the model and its post-processing."""
        raise NotImplementedError

    def loaded(self, model: torch.nn.Module) -> None:
        """Called when vLLM is done. What it raises makes the model be loaded once more."""


class _Told(_Step):
    """Loads as ever, and tells `ballast parity` what came of it."""

    def __init__(self, rank: int, role: str) -> None:
        self.rank, self.role, self.rung = rank, role, "loaded by vLLM"

    @classmethod
    def of(cls, vllm_config: Any, model_config: Any) -> Optional[_Told]:
        if not parity.wanted():
            return None
        return cls(_ranks(vllm_config.parallel_config)["rank"], _role(vllm_config, model_config))

    def weights(self, model: torch.nn.Module, by_vllm: Callable[[], None]) -> None:
        by_vllm()
        parity.dump(model, "loaded", self.rank, self.role, self.rung)

    def loaded(self, model: torch.nn.Module) -> None:
        parity.dump(model, "final", self.rank, self.role, self.rung)


class _Start(_Step):
    """The start of one model in one rank: its key, what the pool has for it, and what becomes of it."""

    def __init__(self, settings: Settings, loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> None:
        self.settings = settings
        self.began = time.perf_counter()
        self.paths = PoolPaths.from_environment()
        ladder.pool(self.paths).control()  # raises NotFound where there is no pool
        weights = _Weights.of(loader, model_config, settings, ladder.pool(self.paths))
        self.name = weights.model
        self.key = key(vllm_config, model_config, prefix, weights.digest)
        self.digest = modules.key_digest(self.key)
        self.rank = int(self.key["rank"])
        self.world = int(vllm_config.parallel_config.world_size)
        self.roles = 2 if _loads_a_draft(vllm_config.speculative_config) else 1
        self.label = f"vllm {self.key['version']} rank {self.rank}"
        self.zero_copy = _wants_zero_copy(vllm_config)
        self.rung = "loaded by vLLM"
        self.touched = False  # whether the model holds anything of ours
        self.found: Optional[Found] = None
        self.keeper: Optional[Keeper] = None
        self.taken = 0.0
        self._undo: list[Callable[[], None]] = []
        self._look()

    @property
    def variant(self) -> str:
        """Post-processing has another result with packing than without; what was captured before it is the same."""
        return "zero-copy" if self.zero_copy else "packed"

    def _look(self) -> None:
        if os.environ.get("BALLAST_STATE", "1").strip().lower() in ("0", "off", "no", "false"):
            return
        try:
            self.found = state.find(self.digest, self.label, self.paths)
        except HandoffError as error:
            log.warning("the state of %s in the pool cannot be used: %s", self.name, error)
            return
        if self.found is None:
            other = state.differences(self.key, self.paths)
            why = f" (the nearest one differs in {other})" if other else ""
            log.info("the pool holds no state of %s for this configuration yet%s", self.name, why)

    # While vLLM loads

    def weights(self, model: torch.nn.Module, by_vllm: Callable[[], None]) -> None:
        """Binds, or loads and keeps."""
        if getattr(model, "secondary_weights", ()) or getattr(model, "allow_patterns_overrides", None) is not None:
            log.info("%s reads more than its checkpoint's weight files: its state is neither used nor kept", self.name)
            self.found = None
            by_vllm()
            return
        if self.found is not None and self._bind(model, self.found):
            self._tell(model, "loaded")
            self._mark_processed(model, self.found.processed)
        else:
            self._prepare_keeping(model)
            by_vllm()
            self._tell(model, "loaded")
            self._keep(model)
        if self.zero_copy:
            self._undo.append(_without_packing())

    def _tell(self, model: torch.nn.Module, stage: str) -> None:
        if parity.wanted():
            parity.dump(model, stage, self.rank, self.key["role"], self.rung)

    def _bind(self, model: torch.nn.Module, found: Found) -> bool:
        began = time.perf_counter()
        try:
            wrong = [path for path in found.processed if not _exportable(model.get_submodule(path))]
            if wrong:
                raise Mismatch(f"{wrong[0]} was kept after post-processing, which this engine does otherwise")
            self.touched = True
            found.bind(model)
        except Exception as error:
            # Nothing was touched, or what was touched is about to be read by vLLM, which writes to all of it.
            log.warning("the state of %s in the pool is not used: %s: %s", self.name, type(error).__name__, error)
            log.debug("the whole story", exc_info=True)
            self.found = None
            return False
        self.rung = found.level
        self.taken = time.perf_counter() - began
        return True

    def _mark_processed(self, model: torch.nn.Module, paths: Any) -> None:
        """Modules that were captured after their post-processing only get their kernels set up."""
        from vllm.model_executor.utils import weights_already_processed

        def skipping(original: Callable[[Any], None]) -> Callable[[Any], None]:
            def process(layer: Any) -> None:
                with weights_already_processed():
                    original(layer)

            return process

        self._wrap_processing(model, paths, skipping)

    def _wrap_processing(
        self, model: torch.nn.Module, paths: Any, wrapped: Callable[[Callable[[Any], None]], Callable[[Any], None]]
    ) -> None:
        layers: list[Any] = [model.get_submodule(path) for path in paths]
        for method in {id(layer.quant_method): layer.quant_method for layer in layers}.values():
            own: dict[str, Any] = method.__dict__
            own["process_weights_after_loading"] = wrapped(method.process_weights_after_loading)
            self._undo.append(functools.partial(own.pop, "process_weights_after_loading", None))

    def _prepare_keeping(self, model: torch.nn.Module) -> None:
        if not self.settings.publish:
            return
        try:
            page = ladder.pool(self.paths).control()
            if not page.sidecar_alive:
                raise NotFound(f"pool {self.paths.pool!r} has no living sidecar")
            online = [path for path, m in model.named_modules() if _quantised_online(m)]
            if online:
                raise Mismatch(f"{online[0]} is quantised while it is read")
            levels = {
                path: state.PROCESSED
                for path, module in model.named_modules(remove_duplicate=False)
                if _exportable(module)
            }
            self.keeper = Keeper(self.name, self.paths, levels)
            self.touched = True
            self.keeper.move(model)
        except Exception as error:
            self._give_up_keeping(error)

    def _keep(self, model: torch.nn.Module) -> None:
        if self.keeper is None:
            return
        keeper = self.keeper
        try:
            keeper.loaded(model)
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
                            self._give_up_keeping(error)

                return process

            self._wrap_processing(model, keeper.levels, keeping)
        except Exception as error:
            self._give_up_keeping(error)

    def _give_up_keeping(self, error: BaseException) -> None:
        log.warning("the state of %s is not published: %s", self.name, error)
        log.debug("the whole story", exc_info=True)
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    # Afterwards

    def loaded(self, model: torch.nn.Module) -> None:
        """Raises Mismatch unless an attached model came out of its post-processing as the published one did."""
        self._unwrap()
        if self.found is not None:
            self.found.check_final(model, self.variant)

    def _unwrap(self) -> None:
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        self._unwrap()
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    def end(self, model: torch.nn.Module) -> None:
        """The model is loaded. Says so, and hands over what was kept, in the background. Never raises."""
        try:
            if self.found is not None:
                contents = self.found.contents
                log.info(
                    "%s comes from memory as it was after loading (%s): generation %d of pool %s, %s, bound in %.1f ms%s",
                    self.name, self.rung, contents.generation, self.paths.pool, gib(contents.nbytes), 1000 * self.taken,
                    ", used where it lies, without packing" if self.zero_copy else "",
                )  # fmt: skip
                self.report("attached")
            self._tell(model, "final")
            if self.keeper is not None:
                self._hand_over(model, self.keeper)
            elif self.found is None:
                self.report("not published")
        except Exception as error:
            self._give_up_keeping(error)
            self.report("failed")

    def _hand_over(self, model: torch.nn.Module, keeper: Keeper) -> None:
        description = keeper.finish(model, self.variant)
        self.keeper = None
        committed = threading.Event()

        def commit() -> None:
            try:
                keeper.commit(description, self.key, self.digest)
                log.info("published the state of %s to pool %s (%s)", self.name, self.paths.pool, gib(keeper.nbytes))
                committed.set()
            except Exception as error:
                log.warning("the state of %s is not published: %s", self.name, error)
                log.debug("the whole story", exc_info=True)
                self.report("failed")
            finally:
                keeper.close()

        def follow() -> None:
            committed.wait()
            try:
                generation = state.adopted(keeper.identifier, self.digest, _ADOPTION, self.paths)
                self.report("published", generation.number)
                # This engine runs on those very bytes now: say so, so that `ballast status` shows who keeps them in memory.
                contents = ladder.pool(self.paths).manifest(generation)
                _held.append(ladder.pool(self.paths).attach(generation, contents, engine=self.label))
            except Exception as error:
                log.warning("the published state of %s is not in service: %s", self.name, error)
                self.report("failed")

        # The first is short and is waited for when the engine ends at once; the second may last, and is not.
        threading.Thread(target=commit, name="ballast-publish").start()
        threading.Thread(target=follow, name="ballast-follow", daemon=True).start()

    def report(self, outcome: str, generation: Optional[int] = None) -> None:
        """For `ballast prepare`, which waits for every rank of every model that the engine loads."""
        folder = os.environ.get("BALLAST_PREPARE")
        if not folder:
            return
        with contextlib.suppress(OSError):
            role = self.key["role"]
            data_parallel = int(self.key["dp_rank"])
            path = Path(folder, f"{role}-{data_parallel}-{self.rank}.json")
            row = {
                "outcome": outcome, "rank": self.rank, "role": role, "model": self.name, "generation": generation,
                "ranks": self.world * int(self.key["dp_size"]), "roles": self.roles,
            }  # fmt: skip
            new = path.with_suffix(".tmp")
            new.write_text(json.dumps(row))
            new.rename(path)


_held: list[Any] = []  # attachments of this process that nothing else keeps


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
            "quantization_config": _digest(_quantization(vllm_config, model_config)),
            "config": _digest(_hf_config(model_config.hf_config)),
            "model": _digest(_factors(model_config, _NOT_WEIGHTS)),
            "loading": _digest(_factors(vllm_config.load_config, _NOT_WEIGHTS_LOADING)),
            "parallel": str(parallel.compute_hash()),
            "lora": _hash(vllm_config.lora_config),
            "kernels": _hash(getattr(vllm_config, "kernel_config", None)),
            "offload": _hash(getattr(vllm_config, "offload_config", None)),
            "speculative": _hash(speculative) if role == "draft" else None,
            "environment": _digest(environment),
            **_device(),
            **_ranks(parallel),
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise Mismatch(f"this engine's configuration cannot be written down ({type(error).__name__}: {error})") from error


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
    return str(computed()) if computed is not None else _digest(_factors(config, frozenset()))


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


def _digest(value: Any) -> str:
    """Of anything that JSON can tell. Raises TypeError for what it cannot."""
    return identity.digest(json.dumps(value, sort_keys=True, allow_nan=True).encode())


class _Weights:
    """The content of the weight files that vLLM was told to load, and the model's name in the pool."""

    def __init__(self, digest: str, model: str) -> None:
        self.digest = digest
        self.model = model

    @classmethod
    def of(cls, loader: Any, model_config: Any, settings: Settings, pool: ladder.Pool) -> _Weights:
        """Of the files on disk; of the pool's, under BALLAST_MODEL, where the engine has no weight files.

        Raises Mismatch or NotFound where there are neither, or files of another kind.
        """
        try:
            folder, files, safetensors, _ = loader._prepare_weights(
                model_config.model, None, model_config.revision, True, None
            )
        except RuntimeError as error:
            if settings.model is None:
                raise NotFound(f"{error}; name the model with BALLAST_MODEL") from None
            return cls._of_pool(model_config, settings.model, pool)
        if not safetensors:
            raise Mismatch(f"the weights in {folder} are no safetensors files")
        known = _recorded(pool)
        rows = []
        names = set()
        for file in files:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = known.get(Stat.of(os.fstat(fd)))
                if found is None:
                    header, sample = _read_identity(fd, Path(file))
                else:
                    header, sample, name = found
                    names.add(name)
                rows.append([os.path.basename(file), os.fstat(fd).st_size, header, sample])
            finally:
                os.close(fd)
        model = settings.model or (names.pop() if len(names) == 1 else _name(Path(folder)))
        return cls(_digest([sorted(rows), _configs(Path(folder), model_config)]), model)

    @classmethod
    def _of_pool(cls, model_config: Any, model: str, pool: ladder.Pool) -> _Weights:
        folder = Path(model_config.model)
        ready = [g for g in pool.catalog().of_model(model, catalog.READY) if g.kind == catalog.CHECKPOINT]
        if not ready:
            raise NotFound(f"the pool holds no checkpoint {model!r} (BALLAST_MODEL)")
        contents = pool.manifest(ready[0])
        for name in _CONFIG_FILES:
            if name in contents.config and _file_digest(folder / name) != contents.config[name]:
                raise Mismatch(f"{folder / name} differs from the one that {model!r} was loaded with")
        rows = sorted([*_shard_row(shard)] for shard in contents.shards)
        return cls(_digest([rows, _configs(folder, model_config)]), model)


def _shard_row(shard: Any) -> tuple[str, int, str, str]:
    return shard.name, shard.identity.size, shard.identity.header, shard.identity.sample


def _recorded(pool: ladder.Pool) -> dict[Stat, tuple[str, str, str]]:
    """What the sidecar knows of files that were not written to since: state of a file -> header, sample, model."""
    found: dict[Stat, tuple[str, str, str]] = {}
    for generation in pool.catalog().generations:
        if generation.kind == catalog.CHECKPOINT and generation.state == catalog.READY:
            try:
                contents: Manifest = pool.manifest(generation)
            except HandoffError:
                continue
            for shard in contents.shards:
                if shard.identity.stat is not None:
                    found[shard.identity.stat] = (shard.identity.header, shard.identity.sample, generation.model)
    return found


def _read_identity(fd: int, path: Path) -> tuple[str, str]:
    """A file's header and sample digests, as the sidecar computes them."""
    header, length = identity.header_digest(fd, path)
    document = json.loads(os.pread(fd, length - 8, 8))
    spans = sorted(tuple(row["data_offsets"]) for name, row in document.items() if name != "__metadata__")
    plan = identity.sample_plan([end - begin for begin, end in spans])
    return header, identity.sample_digest(fd, [(length + spans[i][0] + at, count) for i, at, count in plan], path)


def _configs(folder: Path, model_config: Any) -> Mapping[str, Optional[str]]:
    """Files beside the weights that decide what is made of them; code as well, where it is trusted."""
    names = [name for name in _CONFIG_FILES if (folder / name).exists()]
    if model_config.trust_remote_code:
        names += sorted(path.name for path in folder.glob("*.py"))
    return {name: _file_digest(folder / name) for name in names}


def _file_digest(path: Path) -> Optional[str]:
    try:
        return identity.digest(path.read_bytes())
    except OSError:
        return None


def _name(folder: Path) -> str:
    """A name for a model that the pool does not know: as the sidecar would call its folder."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):  # a hub's cache
        candidate = folder.parent.parent.name[len("models--") :].replace("--", "/")
    else:
        candidate = folder.name
    try:
        return check_model(candidate)
    except HandoffError:
        return "engine-state"

