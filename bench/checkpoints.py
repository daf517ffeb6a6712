"""Checkpoints to measure with: a large one shaped like a Llama, and ones of very many tiny tensors. Random bytes, no torch.

Each is made once, in a folder whose name says what it is, and used again by later runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4 << 20
SHARD = 2_000_000_000  # bytes; what save_pretrained and the hub's large models come near to
FEWEST_SHARDS = 4  # of a checkpoint that is too small for several of that size
TENSORS_PER_SHARD = 100_000  # a header of some 10 MB; safetensors takes no more than 100 MB
RESERVE = 1 << 30  # bytes of the disk left free
VOCABULARY = 32000


@dataclass(frozen=True)
class Spec:
    """One tensor to write: bfloat16, so two bytes an element."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 2
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk. `nbytes` counts the tensors' bytes, without headers."""

    path: Path
    files: tuple[Path, ...]
    tensors: int
    nbytes: int


def llama(cache: Path, size: int) -> Made:
    """A checkpoint of at least `size` bytes: embeddings, as many layers as it takes, norms and head."""
    return _make(cache, f"llama-{size}", _llama_specs(size), min(SHARD, -(-size // FEWEST_SHARDS)), len_limit=None)


def many(cache: Path, count: int, nbytes: int) -> Made:
    """A checkpoint of `count` tensors of `nbytes` bytes each."""
    specs = [Spec(f"model.layers.{i // 1000}.block.{i % 1000}.weight", (nbytes // 2,)) for i in range(count)]
    return _make(cache, f"many-{count}-{nbytes}", specs, None, TENSORS_PER_SHARD)


def _llama_specs(size: int) -> list[Spec]:
    for hidden in (4096, 2048, 1024, 512, 256, 128, 64):
        # Small models have small vocabularies here, or the embedding would be all of them.
        vocabulary = VOCABULARY if hidden >= 2048 else 8 * hidden
        ends = [Spec("model.embed_tokens.weight", (vocabulary, hidden)), Spec("lm_head.weight", (vocabulary, hidden))]
        ends.append(Spec("model.norm.weight", (hidden,)))
        rest = size - sum(spec.nbytes for spec in ends)
        layer = sum(spec.nbytes for spec in _layer(0, hidden))
        if rest >= 4 * layer or hidden == 64:
            layers = max(1, -(-rest // layer))
            return [ends[0], *(spec for i in range(layers) for spec in _layer(i, hidden)), *ends[1:]]
    raise AssertionError


def _layer(index: int, hidden: int) -> list[Spec]:
    inner, key = hidden * 7 // 2, hidden // 4
    shapes = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (key, hidden),
    }
    return [Spec(f"model.layers.{index}.{name}.weight", shape) for name, shape in shapes.items()]


def _make(cache: Path, name: str, specs: Sequence[Spec], shard_bytes: int | None, len_limit: int | None) -> Made:
    shards = list(_split(specs, shard_bytes, len_limit))
    nbytes = sum(spec.nbytes for spec in specs)
    path = cache / name
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if not path.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if free < nbytes + RESERVE:
            raise SystemExit(f"{cache} has {free / 1e9:.1f} GB free and {name} needs {(nbytes + RESERVE) / 1e9:.1f}")
        building = cache / f"{name}.tmp"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            for file, shard in zip(names, shards, strict=True):
                _write_shard(building / file, shard)
            weight_map = {spec.name: file for file, shard in zip(names, shards, strict=True) for spec in shard}
            index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            (building / "model.safetensors.index.json").write_text(json.dumps(index))
            (building / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
            building.rename(path)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return Made(path, tuple(path / file for file in names), len(specs), nbytes)


def _split(specs: Sequence[Spec], shard_bytes: int | None, len_limit: int | None) -> Iterator[list[Spec]]:
    shard: list[Spec] = []
    filled = 0
    for spec in specs:
        full = (shard_bytes and filled + spec.nbytes > shard_bytes) or (len_limit and len(shard) >= len_limit)
        if shard and full:
            yield shard
            shard, filled = [], 0
        shard.append(spec)
        filled += spec.nbytes
    yield shard


def _write_shard(path: Path, shard: Sequence[Spec]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in shard:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in _noise(offset):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _noise(count: int) -> Iterator[memoryview]:
    """`count` bytes, fast: windows into one random block, each from another place, so that no two pages are alike."""
    pool = memoryview(random.randbytes(4 * BLOCK))
    while count > 0:
        length = min(count, BLOCK)
        begin = random.randrange(len(pool) - length + 1)
        yield pool[begin : begin + length]
        count -= length
