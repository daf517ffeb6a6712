"""What SGLang's own functions make of the bytes that were on the device before it loaded: its budget for the KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def budgets(job: dict[str, Any]) -> dict[str, Any]:
    """name -> bytes for the cache, for each of job["accounting"]: free GiB before loading, free GiB after, bytes told of."""
    from engine import arguments, publish
    from sglang.srt.mem_cache import kv_cache_configurator as configurator
    from sglang.srt.model_executor.model_runner import ModelRunner

    publish(arguments(job), 0)
    found = {}
    for name, (before, after, told) in job["accounting"].items():
        runner = SimpleNamespace(pre_model_load_memory=before)
        ModelRunner.account_preloaded_weights(runner, told)
        configurator.get_available_gpu_memory = lambda *_, _free=after, **__: _free
        configurator.get_parallel = lambda: SimpleNamespace(
            launch_world_size=1, world_group=SimpleNamespace(cpu_group=None)
        )
        fake = SimpleNamespace(
            device="cuda", gpu_id=0, mambaish_config=None, post_capture_kv_active=False,
            model_config=SimpleNamespace(is_multimodal=False),
        )  # fmt: skip
        found[name] = configurator.KVCacheConfigurator._profile_available_bytes(fake, runner.pre_model_load_memory)
    return found
