"""On a device a state is copied into the memory that the engine's parameters have already, so that there need not be room for
both. The choice of what is copied where, and the copying, on a CPU. Not yet run on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from engine_shim import modules
from engine_shim.handoff.manifest import Manifest
from engine_shim.mapping import upload


class Model(torch.nn.Module):
    """Tied weights, a view, a buffer, a plain tensor, and a bias that is not always there."""

    def __init__(self, bias: bool = True, transposed: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.linear = torch.nn.Linear(4, 4, bias=bias)
        data = torch.rand(5, 4)
        self.turned = torch.nn.Parameter(data.t() if transposed else data.view(4, 5))
        whole = torch.rand(8)
        self.low, self.high = torch.nn.Parameter(whole[:4]), torch.nn.Parameter(whole[4:])
        self.register_buffer("counter", torch.rand(3))
        self.made = torch.rand(3)


def chosen(published: Model, here: Model) -> tuple[dict[int, torch.UntypedStorage], dict[str, int]]:
    """What of the module's own memory is taken, and which storage of the state each tensor looks at."""
    captured = modules.capture(published)
    rows = [SimpleNamespace(nbytes=storage.nbytes) for storage in captured.storages]
    contents = cast(Manifest, SimpleNamespace(model="m", tensors=rows, state=captured.state))
    slots = modules.slot_rows(contents)
    tree = {(slot.path, slot.name): slot for slot in modules.slots(here)}
    return modules.own_storages(contents, slots, tree), {row.label: row.storage for row in slots}


def addresses(model: Model, own: dict[int, torch.UntypedStorage], storage: dict[str, int]) -> dict[str, bool]:
    tensors: dict[str, Any] = {slot.label: slot.tensor for slot in modules.slots(model)}
    return {
        name: index in own and own[index].data_ptr() == tensors[name].untyped_storage().data_ptr()
        for name, index in storage.items()
        if name in tensors
    }


def test_parameters_are_overwritten_where_they_lie_and_nothing_else_is() -> None:
    here = Model()
    own, storage = chosen(Model(), here)
    where = addresses(here, own, storage)
    assert where == {
        "embed.weight": True, "head.weight": True, "linear.weight": True, "linear.bias": True, "turned": True, "low": True,
        "high": True, "counter": False, "made": False,
    }  # fmt: skip
    assert storage["low"] == storage["high"] and storage["embed.weight"] == storage["head.weight"]


def test_what_looks_otherwise_gets_memory_of_its_own() -> None:
    here = Model(bias=False, transposed=True)
    own, storage = chosen(Model(), here)
    where = addresses(here, own, storage)
    assert where["linear.weight"] and not where["turned"] and storage["linear.bias"] not in own
    # Two that share bytes here and not there must not overwrite each other.
    here = Model()
    here.high = torch.nn.Parameter(here.linear.weight.data)
    published = Model()
    published.high = torch.nn.Parameter(torch.rand(4, 4))
    own, storage = chosen(published, here)
    assert storage["high"] not in own and storage["linear.weight"] not in own and storage["embed.weight"] in own
    # And what is on meta has none.
    own, _ = chosen(Model(), cast(Model, Model().to("meta")))
    assert own == {}


def test_the_bytes_go_into_the_storage_that_is_given() -> None:
    target = torch.zeros(40_000_000, dtype=torch.uint8)  # more than one of upload's pieces
    source = torch.randint(0, 256, (40_000_000,), dtype=torch.uint8)
    copy = upload(source, torch.device("cpu"), target.untyped_storage())
    assert copy.data_ptr() == target.data_ptr() and torch.equal(target, source)
    assert torch.equal(upload(source[:5], torch.device("cpu")), source[:5])
