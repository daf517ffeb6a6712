"""A published state fits a module, or the module is as it was; and what cannot be published leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine_shim
from engine_shim import modules
from engine_shim.handoff.errors import Mismatch
from tests.checkpoints import Checkpoint, entry
from tests.conftest import left_behind
from tests.never_wrong.bits import look
from tests.processes import Sidecar


@pytest.fixture
def pool(pool_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Checkpoint({"x": entry("F32", (5,))}).write(tmp_path / "other.safetensors")
    monkeypatch.setenv("BALLAST_POOL", pool_name)
    with Sidecar(pool_name, tmp_path / "other.safetensors") as sidecar:
        sidecar.ready("other")
        yield pool_name
        assert sidecar.interrupt() == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 64, bias=False)
        self.__dict__["aside"] = nn.Parameter(torch.rand(64, 64), requires_grad=False)
        self.register_buffer("buffer", nn.Parameter(torch.rand(64)))


def changed(change: Callable[[Any], Any]) -> Two:
    module = Two()
    change(module)
    return module


def tie(module: Two) -> None:
    module.b.weight = module.a.weight


def hang(module: Two) -> None:
    vars(module.b.weight)["extra"] = 1


def compute(module: Two) -> None:
    module.__dict__["aside"] = nn.Parameter(torch.rand(64, 64)) * 2


def sparse(module: Two) -> None:
    module.register_buffer("buffer", nn.Parameter(torch.rand(64).to_sparse()))


def keep_a_view(module: Any) -> None:
    module.kept = [module.a.weight.detach()[1:]]


def all_of(module: nn.Module) -> dict[str, Any]:
    found = {}
    for slot in modules.slots(module):
        bits = look(slot.tensor.detach()) if slot.tensor.layout == torch.strided else None
        found[slot.label] = (id(slot.tensor), bits, dict(vars(slot.tensor)), slot.tensor.requires_grad)
    return found


UNLIKE = {
    tie: "b.weight and a.weight are tied in the module and were published apart: build",
    hang: "the attribute extra of b.weight is not as it was published .*: build",
    compute: "aside is (computed from other tensors: compute|a torch.Tensor of)",
    sparse: "buffer is torch.sparse_coo .*: build",
    keep_a_view: "a.weight is looked at from outside the module tree: let go",
}


def test_a_state_fits_or_nothing_is_touched(pool: str) -> None:
    source = Two()
    engine_shim.publish(source, "two", wait=30)
    published = {name: bits for name, (_, bits, *_) in all_of(source).items()}
    for change, words in UNLIKE.items():
        module = changed(change)
        before = all_of(module)
        with pytest.raises(Mismatch, match=words):
            engine_shim.attach(module, "two")
        assert all_of(module) == before, change.__name__
    with torch.device("meta"):
        on_meta, tied_on_meta = Two(), changed(tie)
    with torch.inference_mode():
        inference = Two()
    for module in (Two(), on_meta, tied_on_meta, inference):
        engine_shim.attach(module, "two")
        assert {name: bits for name, (_, bits, *_) in all_of(module).items()} == published
        assert type(module.aside) is type(module.buffer) is nn.Parameter
        assert module.buffer.requires_grad and not module.aside.requires_grad
    engine_shim.attach(module, "two")  # and once more, into what is attached
    del module, on_meta, tied_on_meta, inference


def test_a_tie_that_the_module_lacks(pool: str) -> None:
    source, module = changed(tie), Two()
    engine_shim.publish(source, "tied", wait=30)
    held = [module.b.weight]
    engine_shim.attach(module, "tied")
    assert module.a.weight is module.b.weight
    assert torch.equal(held[0], source.a.weight) and torch.equal(module.a.weight, source.a.weight)


def test_parameters_that_a_module_keeps_in_a_list_as_well(pool: str) -> None:
    source = nn.LSTM(8, 64)
    engine_shim.publish(source, "lstm", wait=30)
    x = torch.rand(2, 1, 8)
    with torch.inference_mode():
        wanted, made = source(x)[0], nn.LSTM(8, 64)
    for module in (nn.LSTM(8, 64), made):
        engine_shim.attach(module, "lstm")
        with torch.inference_mode():
            assert torch.equal(module(x)[0], wanted)


def test_a_compiled_module_after_its_first_call(pool: str) -> None:
    source = Two().a
    engine_shim.publish(source, "one", wait=30)
    module = torch.compile(Two().a, backend="aot_eager")
    x = torch.rand(2, 64)
    with torch.no_grad():
        module(x)
        engine_shim.attach(module, "one")
        assert torch.equal(module(x), source(x))


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(64, bias=False))


def test_a_module_without_shapes(pool: str) -> None:
    done = Lazy()
    with pytest.raises(Mismatch, match=r"0.weight has no shape yet: run"):
        engine_shim.publish(done, "lazy")
    done(torch.rand(1, 64))
    engine_shim.publish(done, "lazy", wait=30)
    with pytest.raises(Mismatch, match=r"0.weight has no shape yet: run"):
        engine_shim.attach(Lazy(), "lazy")


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP


@pytest.mark.parametrize(
    "key",
    [{1: "a"}, {"a": {1, 2}}, {"a": [float("nan")]}, {"a": 1 << 70}, {"a": {"b": object()}}, LOOP, {"a": "\ud800"}],
    ids=["number", "set", "nan", "large", "object", "loop", "surrogate"],
)
def test_a_key_that_json_cannot_tell(pool: str, key: dict[Any, Any]) -> None:
    before = left_behind(pool)
    for call in (engine_shim.publish, engine_shim.attach):
        with pytest.raises(Mismatch, match=r"the key has a .* that JSON cannot tell: make it of"):
            call(nn.Linear(2, 2), "other", key=key)
    assert left_behind(pool) == before


def test_a_key_of_what_json_can_tell(pool: str) -> None:
    key = {"a": [1, 2.5, None, True, "é"], "b": {"c": (1, 2)}}
    source, module = nn.Linear(2, 2), nn.Linear(2, 2)
    engine_shim.publish(source, "told", key=key, wait=30)
    engine_shim.attach(module, "told", key=key)
    assert torch.equal(module.weight, source.weight)
