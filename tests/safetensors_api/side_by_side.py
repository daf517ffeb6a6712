"""The original and the stand-in side by side, the latter over a pool that is but a private map of the same file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import safetensors
import torch

from engine_shim import mapping
from engine_shim.handoff import maps
from engine_shim.handoff.manifest import Tensor
from engine_shim.safe_open import stand_in


class FileShard:
    """What `engine_shim.mapping.Shard` is to the stand-in, but mapped from a checkpoint file itself."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
            self._map = maps.private(file.fileno(), size)
        self.metadata: dict[str, str] | None = header.pop("__metadata__", None)
        self.tensors = {}
        for name, row in header.items():
            start, end = row["data_offsets"]
            offset = 8 + length + start
            shape = tuple(row["shape"])
            self.tensors[name] = Tensor(name, row["dtype"], shape, None, 0, offset, end - start, None, start)

    def tensor(self, name: str) -> torch.Tensor:
        return mapping.view(self._map, self.tensors[name], derived=True)


class Pool:
    """Stands in for `engine_shim.ladder`; holds every file unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.holds = True
        self.failure: Exception | None = None

    def shard_for(self, path: str) -> FileShard | None:
        self.asked.append(path)
        if self.failure is not None:
            raise self.failure
        return FileShard(path) if self.holds and os.path.isfile(path) else None


class Pair(NamedTuple):
    original: Any
    ours: Any


SAFE_OPEN = Pair(safetensors.safe_open, stand_in(safetensors.safe_open))
_handle: Any = vars(safetensors)["_safe_open_handle"]  # not in the type stubs
SAFE_OPEN_HANDLE = Pair(_handle, stand_in(_handle, by_handle=True))


class Failure(NamedTuple):
    type: type
    text: str


class Seen(NamedTuple):
    """All that a program can see of a tensor except its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage: bytes
    device: torch.device
    flags: tuple[bool, ...]
    hidden: tuple[Any, ...]


def seen(value: Any) -> Any:
    """A value in a form that compares bit by bit."""
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    storage: Any = value.untyped_storage()
    return Seen(
        value.dtype,
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        bytes(storage.nbytes() if value.is_meta else storage.tolist()),
        value.device,
        (value.requires_grad, value.is_leaf, value.is_contiguous(), storage.is_shared(), value.is_pinned()),
        (type(value), value.grad, value.layout, value.is_conj(), value.is_neg()),
    )


def outcome(action: Callable[..., Any], *args: Any) -> Any:
    """What an action gives, or the Failure in which it ends."""
    try:
        return seen(action(*args))
    except BaseException as error:  # Rust panics are no Exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        return Failure(type(error), str(error))
