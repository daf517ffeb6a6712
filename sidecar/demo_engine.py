"""The demo's engine: a small program around transformers that knows nothing of Ballast.

`ballast demo` runs it from disk and attached, unchanged. It answers one question greedily, prints one line of JSON (seconds
are its own), and then stays until its standard input ends, so that somebody can look at its memory.
"""

# mypy: ignore-errors

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the capital of France?"

checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
with torch.device("meta"):  # imports the model's code and makes no weights: the time below is to be that of the weights
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))

began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(checkpoint)
loaded = time.perf_counter()
for weight in model.parameters():  # loading may only have mapped them
    weight.detach().view(-1).view(torch.uint8).max()
read = time.perf_counter()

question = tokenizer.apply_chat_template(
    [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**question, max_new_tokens=32, do_sample=False)
tokens = output[0, question["input_ids"].shape[1] :]
answer = tokenizer.decode(tokens, skip_special_tokens=True)
print(
    json.dumps({"load": loaded - began, "read": read - began, "tokens": tokens.tolist(), "text": answer}),
    flush=True,
)
sys.stdin.read()
