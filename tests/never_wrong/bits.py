"""Everything that a program can see of the tensors of a file, in a form that compares bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.safetensors_api.side_by_side import Failure


class Look(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage: bytes
    flags: tuple[Any, ...]


def look(tensor: torch.Tensor) -> Look:
    storage = tensor.untyped_storage()
    return Look(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()),
        ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b"",
        (type(tensor), tensor.device, tensor.requires_grad, tensor.is_contiguous(), tensor.layout),
    )  # fmt: skip


def attempt(action: Callable[..., torch.Tensor], *args: Any) -> Look | Failure:
    """What an action gives, or how it fails."""
    try:
        return look(action(*args))
    except Exception as error:
        return Failure(type(error), str(error))


def everything(file: Any) -> dict[str, Any]:
    """Each tensor, or how it fails, and all that is said about it, by one open file. Closes it."""
    with file:
        names = file.keys()
        return {
            "names": names,
            "metadata": file.metadata(),
            "tensors": {name: attempt(file.get_tensor, name) for name in names},
            "shapes": {name: file.get_slice(name).get_shape() for name in names},
            "dtypes": {name: file.get_slice(name).get_dtype() for name in names},
            "slices": {name: attempt(lambda name: file.get_slice(name)[...], name) for name in names},
        }
