"""The key of an engine's state for many configurations, computed by the adapter in one process without starting an engine.

    python keys.py '{"name": {"model": ..., "args": {...}, "env": {...}, "groups": {...}, "draft": true, "as": {...}}, ...}'

`as` says what something of the environment is to look like: module:name -> value, or what a function of that name returns.

Prints `KEY {"name": {...}}` for each.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from typing import Any


def compute(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import ModelConfig
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from engine_shim import ladder
    from engine_shim.hooks import vllm as hook

    before = dict(os.environ)
    os.environ.update(job.get("env", {}))
    undo: list[tuple[Any, str, Any]] = []
    try:
        config = EngineArgs(**{"dtype": "bfloat16", "max_model_len": 128, "model": job["model"], **job.get("args", {})})
        made = config.create_engine_config()
        model: ModelConfig = made.model_config
        if job.get("draft"):
            model = made.speculative_config.draft_model_config
        for group, (rank, size) in job.get("groups", {}).items():
            setattr(parallel_state, group, type("Group", (), {"world_size": size, "rank_in_group": rank}))
        for place, value in job.get("as", {}).items():
            module, _, name = place.partition(":")
            *owners, name = name.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, (lambda value=value: value) if callable(getattr(owner, name)) else value)
        loader = get_model_loader(made.load_config)
        weights = hook._weights(loader, model, ladder.Settings.read(), ladder.pool())
        return hook.key(made, model, job.get("prefix", ""), weights.digest)
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)
        for group in job.get("groups", {}):
            setattr(parallel_state, group, None)
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    for name, job in json.loads(sys.argv[1]).items():
        print("KEY", json.dumps({name: compute(job)}), flush=True)


if __name__ == "__main__":
    main()
