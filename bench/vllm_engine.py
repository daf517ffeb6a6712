"""What `bench/vllm_start.py` runs in vLLM's own environment: makes a checkpoint, or starts a real engine and times it.

    python vllm_engine.py make FOLDER BYTES
    python vllm_engine.py start FOLDER [hang]

`start` prints one line of JSON: seconds of the weight stage, seconds from the start of the process to the first token, and the
tokens. The weight stage is all that is done about weights: reading or attaching, post-processing, and what Ballast does
before and after those. It leaves out what vLLM does in every start: building the model, and its two full garbage collections.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = [1, 17, 29, 31, 5, 40]
PROMPT = {"prompt_token_ids": TOKENS}


def make(folder: Path, nbytes: int) -> None:
    """A Llama in bfloat16 of about so many bytes, with random weights, whose words are called w0, w1, ..."""
    import tokenizers
    import torch
    import transformers

    hidden, vocabulary = 4096, 32000
    layer = 2 * (hidden * hidden * 5 // 2 + 3 * hidden * (hidden * 7 // 2))
    layers = max(1, round((nbytes - 4 * vocabulary * hidden) / layer))
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=vocabulary, max_position_embeddings=512, architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="w0").save_pretrained(folder)


def start(folder: Path, hang: bool) -> None:
    import vllm.v1.worker.cpu_model_runner as runner
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import default_loader

    spent = dict.fromkeys(("all", "building", "collecting"), 0.0)
    loading: list[str] = []

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name != "all" and not loading:
                return function(*args, **kwargs)
            loading.append(name)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                loading.pop()
                spent[name] += time.perf_counter() - began

        return run

    default_loader.DefaultModelLoader.create_model = timed("building", default_loader.DefaultModelLoader.create_model)
    gc.collect = timed("collecting", gc.collect)
    runner.get_model = timed("all", runner.get_model)
    llm = LLM(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=1, skip_tokenizer_init=True,
        disable_log_stats=True,
    )  # fmt: skip
    first = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    since = time.monotonic() - float(os.environ["BENCH_LAUNCHED"])
    more = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    tokens = [*first[0].outputs[0].token_ids, *more[0].outputs[0].token_ids]
    assert min(spent.values()) > 0, f"this vLLM loads in another way: {spent}"
    stage = spent["all"] - spent["building"] - spent["collecting"]
    told = {"stage": stage, **spent, "first token": since, "tokens": tokens}
    print("MEASURED", json.dumps(told), flush=True)
    if hang:
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        start(Path(sys.argv[2]), "hang" in sys.argv[3:])
