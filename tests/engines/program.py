"""A program that knows nothing of Ballast: it loads models with the libraries that everybody uses, runs them, and does with
them what people do with models. It tells what it saw, in one line of JSON for each model.

    python program.py FOLDER SCRATCH [--build] KIND…

The models of the kinds are in FOLDER/KIND; with --build the small random ones are made first. Waits for a line on stdin
before it loads anything.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import json
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Forward = Callable[[Any], torch.Tensor]
PROMPT = "What is the capital of France?"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_tensor(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {digest(data)}"


def shared(tensor: Any) -> bool:
    return bool(tensor.is_shared())


def of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Everything about a module's tensors except where they are: bits, names, order, flags, which of them are one."""
    state = module.state_dict()
    first: dict[tuple[int, int], str] = {}
    ties = {}
    for name, tensor in state.items():
        if tensor.numel():
            ties[name] = first.setdefault((tensor.data_ptr(), tensor.numel()), name)
    return {
        "state": {name: of_tensor(tensor) for name, tensor in state.items()},
        "order": list(state),
        "buffers": {name: of_tensor(tensor) for name, tensor in module.named_buffers()},
        "ties": {name: other for name, other in ties.items() if name != other},
        "flags": {
            name: [type(p).__name__, p.requires_grad, p.is_leaf, p.is_contiguous(), str(p.device), shared(p)]
            for name, p in module.named_parameters()
        },
        "storages": {name: [p.untyped_storage().nbytes(), p.storage_offset()] for name, p in module.named_parameters()},
        "training": module.training,
    }


def mapped(modules: Iterable[torch.nn.Module]) -> dict[str, float]:
    """How much of the parameters lies in maps of a Ballast segment, and how much of those maps has become private."""
    ranges, private = [], 0
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                inside = len(words) > 5 and "/ballast-" in words[5]
                if inside:
                    begin, end = (int(part, 16) for part in words[0].split("-"))
                    ranges.append((begin, end))
            elif inside and words[0] == "Anonymous:":  # copied on writing; pages of a memory file system are none
                private += 1024 * int(words[1])
    total = shared = 0
    for module in modules:
        for parameter in module.parameters():
            size = parameter.numel() * parameter.element_size()
            total += size
            shared += size * any(begin <= parameter.data_ptr() < end for begin, end in ranges)
    return {"parameters": total, "in_maps": shared, "private": private}


def moved(*modules: torch.nn.Module) -> None:
    """Gives each tensor memory of its own, as torch allocates it.

    A tensor that is read from a file in place lies wherever the file's header ends, and some of torch's kernels for the CPU
    round differently at odd addresses. With Ballast, as in memory of its own, a tensor always lies at a good one.
    """
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


def outputs(run: Callable[[], torch.Tensor], *modules: torch.nn.Module) -> dict[str, Any]:
    """What a model computes, as it is and after it was `moved`; in bits, and in numbers as people compare them."""
    there = run()
    moved(*modules)
    here = run()
    return {
        "output": of_tensor(there),
        "output, moved": of_tensor(here),
        "output, roughly": [round(float(value), 3) for value in (there.mean(), there.std(), there.max())],
    }


def training_step(model: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> dict[str, Any]:
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        value = loss(model)
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(of_tensor(value))
    return {"losses": losses, **of_module(model)}


def afterwards(
    load: Callable[[], Any], forward: Forward, loss: Callable[[Any], torch.Tensor], scratch: Path
) -> dict[str, Any]:
    """What people do with a model once they have it."""
    model = load()
    told: dict[str, Any] = {"mapped": mapped([model]), "loaded": of_module(model)}
    other = load()
    told.update(outputs(lambda: forward(other), other))
    model.save_pretrained(scratch)
    told["saved"] = {path.name: digest(path.read_bytes()) for path in sorted(scratch.iterdir()) if path.is_file()}
    model.save_pretrained(scratch / "sharded", max_shard_size="60KB")
    told["saved in shards"] = {
        path.name: digest(path.read_bytes()) for path in sorted((scratch / "sharded").iterdir()) if path.is_file()
    }
    told["deepcopy"] = of_module(copy.deepcopy(model))
    told["its output"] = of_tensor(forward(copy.deepcopy(model)))
    told["to(bfloat16)"] = of_module(copy.deepcopy(model).to(torch.bfloat16))
    told["a step of training, on a copy"] = training_step(copy.deepcopy(model), loss)
    pickled = pickle.dumps(model)
    told["pickled"] = [len(pickled), of_module(pickle.loads(pickled))]
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    told["torch.save"] = len(buffer.getvalue())
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    told["torch.load"] = {name: of_tensor(tensor) for name, tensor in state.items()}
    told["load_state_dict"] = str(model.load_state_dict(state))
    told["as it was"] = told["loaded"] == of_module(model)
    told["to(float16), itself"] = of_module(load().to(torch.float16))
    told["trained itself"] = training_step(model, loss)
    again = load()
    told["loaded again"] = of_module(again) == told["loaded"]
    told["moved to shared memory"] = of_module(again.share_memory())
    return told


# Kinds -------------------------------------------------------------------------------------------------------------


def llama(folder: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3 + tied)
    more: dict[str, Any] = {} if tied else {"max_shard_size": "60KB"}
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, **more)


def run_llama(folder: Path, scratch: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(20).reshape(2, 10) % 101

    def forward(model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(tokens).logits
        return logits

    def loss(model: Any) -> torch.Tensor:
        value: torch.Tensor = model(tokens, labels=tokens).loss
        return value

    told = afterwards(lambda: AutoModelForCausalLM.from_pretrained(folder), forward, loss, scratch)
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        told[f"as {dtype}"] = of_module(model)
    return told


def run_smollm2(folder: Path, scratch: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    told: dict[str, Any] = {"mapped": mapped([model]), "loaded": of_module(model)}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    given = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**given, do_sample=False, max_new_tokens=10)[0, given["input_ids"].shape[1] :]
    told["tokens"] = tokens.tolist()
    told["answer"] = tokenizer.decode(tokens, skip_special_tokens=True)
    told["still mapped"] = mapped([model])
    return told


def run_minilm(folder: Path, scratch: Path) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    sentences = ["A cat sits on the mat.", "Weights stay aboard.", "ßüß 文"]
    model: Any = SentenceTransformer(str(folder), device="cpu")
    told: dict[str, Any] = {"mapped": mapped([model]), "loaded": of_module(model)}
    other: Any = SentenceTransformer(str(folder), device="cpu")
    told.update(outputs(lambda: other.encode(sentences, convert_to_tensor=True), other))
    told["similarity"] = of_tensor(other.similarity(other.encode(sentences), other.encode(sentences)))
    model.save(str(scratch))
    told["saved"] = {path.name: digest(path.read_bytes()) for path in sorted(scratch.glob("*.safetensors"))}
    again = SentenceTransformer(str(scratch), device="cpu")
    told["loaded again"] = of_module(again) == told["loaded"]
    told["deepcopy"] = of_module(copy.deepcopy(model))
    told["half"] = of_module(copy.deepcopy(model).half())
    return told


def pipeline(folder: Path) -> None:
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(5)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(32, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vqvae = diffusers.VQModel(block_out_channels=(32,), norm_num_groups=8, latent_channels=3, num_vq_embeddings=16)
    diffusers.LDMPipeline(vqvae, unet, diffusers.DDIMScheduler(num_train_timesteps=20)).save_pretrained(folder)


def run_pipeline(folder: Path, scratch: Path) -> dict[str, Any]:
    load = importlib.import_module("diffusers").LDMPipeline.from_pretrained
    pipe: Any = load(folder)
    parts = {"unet": pipe.unet, "vqvae": pipe.vqvae}
    told: dict[str, Any] = {"mapped": mapped(parts.values())}
    told["loaded"] = {name: of_module(part) for name, part in parts.items()}
    other: Any = load(folder)
    other.set_progress_bar_config(disable=True)

    def run() -> torch.Tensor:
        seed = torch.Generator().manual_seed(1)
        return torch.from_numpy(other(num_inference_steps=3, generator=seed, output_type="np").images)

    told.update(outputs(run, other.unet, other.vqvae))
    pipe.save_pretrained(scratch)
    told["saved"] = {
        str(path.relative_to(scratch)): digest(path.read_bytes()) for path in sorted(scratch.rglob("*.safetensors"))
    }
    told["deepcopy"] = {name: of_module(copy.deepcopy(part)) for name, part in parts.items()}
    told["bfloat16"] = {name: of_module(copy.deepcopy(part).to(torch.bfloat16)) for name, part in parts.items()}
    noise = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    told["trained"] = training_step(copy.deepcopy(pipe.unet), lambda unet: unet(noise, 3).sample.square().mean())
    return told


BUILD: dict[str, Callable[[Path], None]] = {
    "llama-tied": lambda folder: llama(folder, True),
    "llama-shards": lambda folder: llama(folder, False),
    "pipeline": pipeline,
}
RUN: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "llama-tied": run_llama,
    "llama-shards": run_llama,
    "minilm": run_minilm,
    "pipeline": run_pipeline,
    "smollm2": run_smollm2,
}


def main(folder: Path, scratch: Path, *kinds: str) -> None:
    torch.set_num_threads(1)
    if "--build" in kinds:
        for kind in BUILD:
            if kind in kinds:
                BUILD[kind](folder / kind)
    if "minilm" in kinds:  # meanwhile; imports take longer than anything here
        importlib.import_module("sentence_transformers")
    if "pipeline" in kinds:
        assert importlib.import_module("diffusers").LDMPipeline
    print("ready", flush=True)
    sys.stdin.readline()
    for kind in kinds:
        if kind in RUN:
            (scratch / kind).mkdir(parents=True)
            try:
                told = RUN[kind](folder / kind, scratch / kind)
            except Exception:
                told = {"failed": traceback.format_exc()}
            print(json.dumps([kind, told]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
