"""The key of an engine's state for many configurations, computed by the adapter in one process without loading anything."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """name -> key, for each of job["keys"]: {"model", "args", "env", "rank", …}.

    `args` go through SGLang's own resolution. `leaves` and `parallel` replace what came of it, for what is not to be had on a
    CPU; `config` replaces attributes of the model's configuration; `installed` what the functions and versions of these names
    tell ("module:name"), while the key is made.
    """
    return {name: one({"model": job["model"], **more}) for name, more in job["keys"].items()}


@contextlib.contextmanager
def telling(place: str, told: Any) -> Iterator[None]:
    name, _, attribute = place.partition(":")
    module = importlib.import_module(name)
    before = getattr(module, attribute)
    setattr(module, attribute, (lambda *_, **__: told) if callable(before) else told)
    try:
        yield
    finally:
        setattr(module, attribute, before)


def one(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from engine import arguments
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb import expert_location
    from sglang.srt.model_executor.model_runner_components.load_model_utils import build_load_config
    from sglang.srt.model_loader import get_model_architecture
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish

    from engine_shim import ladder
    from engine_shim.hooks import sglang as hook

    before = dict(os.environ)
    os.environ.update(job.get("env", {}))
    placement = job.get("placement")
    get_placement = expert_location.get_global_expert_location_metadata
    if placement is not None:
        expert_location.get_global_expert_location_metadata = lambda: SimpleNamespace(
            physical_to_logical_map=torch.tensor(placement)
        )
    try:
        args = arguments(job)
        get_parallel().clear_stamp()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=job.get("rank", 0), gpu_id=0))
        with contextlib.ExitStack() as stack:
            stack.enter_context(get_parallel().override(**job.get("parallel", {})))
            get_context().override("the test", **job.get("leaves", {}))
            config = ModelConfig.from_server_args(args, is_draft_model=bool(job.get("draft")))
            load = build_load_config(
                server_args=args, tp_rank=0, remote_instance_weight_transporter_engine=None,
                remote_instance_weight_transporter_session_id="", draft_model_idx=job.get("draft_model_idx"),
                weight_cache_mode="off", weight_cache_socket=None,
            )  # fmt: skip
            loader = get_model_loader(load, config)
            kind, _ = get_model_architecture(config)
            model = kind.__new__(kind)
            torch.nn.Module.__init__(model)
            weights = hook._weights(loader, config, model, ladder.Settings.read(), ladder.pool())
            vars(config).update(job.get("config", {}))
            if "architecture" in job:
                config.hf_config.architectures = [job["architecture"]]
            if "quantization_config" in job:
                config.hf_config.quantization_config = job["quantization_config"]
            for place, told in job.get("installed", {}).items():
                stack.enter_context(telling(place, told))
            return hook.key(model, config, load, weights.digest)
    finally:
        expert_location.get_global_expert_location_metadata = get_placement
        os.environ.clear()
        os.environ.update(before)
