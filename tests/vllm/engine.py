"""An engine process of the tests: vLLM's offline `LLM`, one model after the other, exactly as a user's script would have it.

    python engine.py '[{"model": ..., "args": {...}, "prompts": [...], "tokens": 24}, ...]'

Nothing here knows of Ballast. A job may ask for more: `embed` (a pooling model), `image` (one with each prompt), `reload`
(vLLM's own weight reloading, then the prompts again), `lora` (an adapter's folder), `env` (set before it), `sabotage` (a
function, as module:name, that raises during it, or, `sabotage_with: "interrupt"`, is interrupted by Ctrl-C), `fails` (the
start must end in an error, whose text is the result),
`after` and `until` (files that it waits for before it starts, and before it ends). More jobs may follow, a line each, on stdin.
Prints `JOB <model>` before each job and `RESULT {...}` after it; with `until` as soon as there is one.
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


def run(job: dict[str, Any]) -> None:
    import kernels
    from vllm import LLM, SamplingParams

    kernels.provide()
    began = time.monotonic()
    llm = LLM(
        **{
            "model": job["model"], "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4,
            "disable_log_stats": True, **job.get("args", {}),
        }
    )  # fmt: skip
    result: dict[str, Any] = {"model": job["model"], "start": time.monotonic() - began}
    prompts = job.get("prompts", PROMPTS)
    if job.get("image"):
        prompts = [{"prompt": prompt, "multi_modal_data": {"image": picture()}} for prompt in prompts]
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
    print("RESULT", json.dumps(result), flush=True)
    wait_for(job.get("until"))
    close = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if close is not None:
        close.shutdown()
    del llm
    _forget()


def wait_for(path: str | None) -> None:
    while path is not None and not os.path.exists(path):
        time.sleep(0.05)


def picture() -> Any:
    """Some image, the same every time."""
    from PIL import Image

    return Image.frombytes("RGB", (28, 28), bytes(index * 7 % 251 for index in range(28 * 28 * 3)))


def tokens(llm: Any, prompts: list[Any], greedy: Any, more: dict[str, Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False, **more)]


def _forget() -> None:
    """What a new engine in the same process would stumble over."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


@contextlib.contextmanager
def sabotaged(place: str | None, interrupt: bool) -> Iterator[None]:
    """Has a function do its work and then raise, as a fault in it would, or be interrupted."""
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
        raise KeyboardInterrupt if interrupt else RuntimeError("sabotage")

    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, original)


def do(job: dict[str, Any]) -> None:
    wait_for(job.get("after"))
    print("JOB", job["model"], flush=True)
    before = dict(os.environ)
    os.environ.update(job.get("env", {}))
    with sabotaged(job.get("sabotage"), job.get("sabotage_with") == "interrupt"):
        try:
            run(job)
        except (Exception, KeyboardInterrupt) as error:
            if not job.get("fails"):
                raise
            print("RESULT", json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            _forget()
    os.environ.clear()
    os.environ.update(before)
    print("DONE", flush=True)


def main() -> None:
    for job in json.loads(sys.argv[1]):
        do(job)
    for line in sys.stdin:
        do(json.loads(line))


if __name__ == "__main__":
    main()
