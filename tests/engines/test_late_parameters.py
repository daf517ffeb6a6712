"""A parameter that comes into being only while weights are loaded: published, and back in a module that has only its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine_shim
from engine_shim.handoff.errors import Mismatch
from tests.checkpoints import Checkpoint, entry
from tests.processes import Sidecar


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4))
        self.register_parameter("bias", None)

    def weight_loader(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    def load(self, bias: bool) -> None:
        self.weight_loader(self.weight, torch.arange(32.0).reshape(8, 4))
        if bias:
            self.bias = torch.nn.Parameter(torch.arange(8.0), requires_grad=False)
            self.bias.weight_loader = self.weight_loader  # type: ignore[assignment]
            self.bias.output_dim = 0  # type: ignore[assignment]


class Without(Head):
    """Of another shape: it has no place for a bias."""

    def __init__(self) -> None:
        super().__init__()
        del self._parameters["bias"]


def test_a_bias_that_only_some_checkpoints_have(
    pool_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoint({"x": entry("F32", (5,))}).write(tmp_path / "other.safetensors")
    monkeypatch.setenv("BALLAST_POOL", pool_name)
    with Sidecar(pool_name, tmp_path / "other.safetensors") as sidecar:
        sidecar.ready("other")
        loaded = Head()
        loaded.load(bias=True)
        engine_shim.publish(loaded, "head", wait=30)
        later = Head()
        engine_shim.attach(later, "head")
        assert torch.equal(later.weight, loaded.weight) and torch.equal(later.bias, loaded.bias)
        assert not later.bias.requires_grad and later.bias.output_dim == 0
        later.bias.weight_loader(later.bias, torch.ones(8))  # its own, and it works
        assert later.bias.sum() == 8 and later.bias.weight_loader.__self__ is later
        Without.__qualname__, Without.__module__ = Head.__qualname__, Head.__module__  # the same key, another tree
        other = Without()
        with pytest.raises(Mismatch, match="has no parameter bias"):
            engine_shim.attach(other, "head")
        assert not other.weight.any()
        del later, other
        assert sidecar.interrupt() == 0
