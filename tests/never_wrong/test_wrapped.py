"""Tensors made of others: what they are besides is compared in full, or they are refused."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from engine_shim import modules
from engine_shim.handoff.errors import Mismatch


class Scaled(torch.Tensor):
    """Integers, and a scale that is part of the settings."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor, scale: Any) -> None:
        self.integers, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["integers"], {"scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            made = Scaled(args[0].integers.detach(), args[0].scale)
            return return_and_correct_aliasing(function, args, kwargs or {}, made)
        raise NotImplementedError(function)

    def __repr__(self) -> str:
        return "Scaled"


@dataclasses.dataclass
class Setting:
    value: Any
    hidden: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class Open:
    value: Any


class Brief:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Brief"


def module(scale: Any) -> torch.nn.Module:
    made = torch.nn.Module()
    made.w = torch.nn.Parameter(Scaled(torch.ones(4, dtype=torch.int8), scale), requires_grad=False)
    return made


LOOP: list[Any] = []
LOOP.append(LOOP)
ONE = torch.tensor([1.23456])


@pytest.mark.parametrize(
    "scale",
    [
        ONE, ONE.numpy(), [ONE], {"a": (1, {"b": ONE})}, Open([ONE]), Setting(1), {np.float32(1): ONE.numpy()}, Brief(ONE),
        object(), lambda: 1, LOOP,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_settings_whose_text_is_not_all_of_them(scale: Any) -> None:
    with pytest.raises(Mismatch, match=r"w is a .*Scaled of more than tensors and plain values, .*: publish"):
        modules.capture(module(scale))


@pytest.mark.parametrize(
    "scale", [1.23456, "a...b", (1, [2], {3}), OrderedDict(a=torch.int8), Open(torch.Size([1, 2])), np.float32(1.23456)]
)
def test_settings_that_are_told_in_full(scale: Any) -> None:
    [row] = modules.capture(module(scale)).state["wrappers"]
    assert row[-2] == repr({"scale": scale})


def test_nested_tensors() -> None:
    made = torch.nn.Module()
    for layout, words in ((torch.jagged, "n is a .*NestedTensor .*: publish"), (torch.strided, "n is a nested .*: keep")):
        made.register_buffer("n", torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=layout))
        with pytest.raises(Mismatch, match=words):
            modules.capture(made)


def test_parts_that_are_no_tensors() -> None:
    class Meshed(Scaled):
        def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
            return ["integers", "scale"], {}

    made = torch.nn.Module()
    made.register_buffer("w", Meshed(torch.ones(4, dtype=torch.int8), 2))
    with pytest.raises(Mismatch, match=r"w is a .*Meshed, which is made of more than tensors: use"):
        modules.capture(made)
