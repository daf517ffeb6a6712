"""An engine process of the tests: vLLM's offline `LLM`, one model after the other, exactly as a user's script would have it.

    python engine.py '[{"model": ..., "args": {...}, "prompts": [...], "tokens": 24}, ...]'

Nothing here knows of Ballast. A job may ask for more: `embed` (a pooling model), `reload` (vLLM's own weight reloading, then
the prompts again), `lora` (an adapter's folder), `env` (set before it), `sabotage` (a function, as module:name, that raises
during it), `fails` (the start must end in an error, whose text is the result), `then: "hang"` (answer and wait to be killed).
Prints `JOB <model>` before each job and `RESULT {...}` after it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

PROMPTS = ["the sea was calm and the", "a cargo of", "one two three four", "Ballast keeps"]


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(
        **{
            "model": job["model"], "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4,
            "disable_log_stats": True, **job.get("args", {}),
        }
    )  # fmt: skip
    result: dict[str, Any] = {"model": job["model"], "start": time.monotonic() - began}
    prompts = job.get("prompts", PROMPTS)
    if job.get("embed"):
        result["embeddings"] = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    else:
        greedy = SamplingParams(temperature=0, max_tokens=job.get("tokens", 24), ignore_eos=True, logprobs=3)
        more: dict[str, Any] = {}
        if job.get("lora"):
            from vllm.lora.request import LoRARequest

            more["lora_request"] = LoRARequest("adapter", 1, job["lora"])

        result["tokens"] = tokens(llm, prompts, greedy, more)
        if job.get("reload"):
            llm.collective_rpc("reload_weights")
            result["reloaded"] = tokens(llm, prompts, greedy, more)
    result["first"] = time.monotonic() - began
    if job.get("then") == "hang":
        print("RESULT", json.dumps(result), flush=True)
        time.sleep(600)
    close = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if close is not None:
        close.shutdown()
    del llm
    _forget()
    return result


def tokens(llm: Any, prompts: list[str], greedy: Any, more: dict[str, Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False, **more)]


def _forget() -> None:
    """What a new engine in the same process would stumble over."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


@contextlib.contextmanager
def sabotaged(place: str | None) -> Iterator[None]:
    """Has a function do its work and then raise, as a fault in it would."""
    if place is None:
        yield
        return
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise RuntimeError("sabotage")

    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, original)


def main() -> None:
    for job in json.loads(sys.argv[1]):
        print("JOB", job["model"], flush=True)
        before = dict(os.environ)
        os.environ.update(job.get("env", {}))
        with sabotaged(job.get("sabotage")):
            try:
                result = run(job)
            except Exception as error:
                if not job.get("fails"):
                    raise
                result = {"error": f"{type(error).__name__}: {error}"}
                _forget()
        os.environ.clear()
        os.environ.update(before)
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
