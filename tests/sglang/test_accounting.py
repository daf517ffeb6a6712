"""SGLang's memory accounting counts what is attached on a device exactly once: its own functions, with our figures.

There is no device here: its memory, and the tensors on it, are stand-ins. Not yet run on a device.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import ATTACHED, Engines, adopted

from engine_shim.hooks.sglang import foreign_bytes
from tests.processes import Sidecar

GIB = 1 << 30


class OnDevice:
    """Looks like a tensor whose storage is on a device."""

    layout = torch.strided

    def __init__(self, address: int, nbytes: int, device: str = "cuda:0") -> None:
        storage = SimpleNamespace(device=torch.device(device), nbytes=lambda: nbytes, data_ptr=lambda: address)
        self.untyped_storage = lambda: storage


def tree(**tensors: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.inner = torch.nn.Module()
    for number, (name, tensor) in enumerate(tensors.items()):
        (module if number % 2 else module.inner)._parameters[name] = tensor
    return module


def test_only_what_this_process_did_not_allocate_and_each_storage_once() -> None:
    mapped, own = OnDevice(0x10000, 5000), OnDevice(0x90000, 700)
    module = tree(a=mapped, b=mapped, c=OnDevice(0x10000, 5000), d=own, e=torch.zeros(4), f=OnDevice(0x20000, 64))
    assert foreign_bytes(module, lambda device: [(0x80000, 0x20000)]) == 5064
    assert foreign_bytes(module, lambda device: [(0x10000, 0x90000)]) == 0
    assert foreign_bytes(module, lambda device: []) == 5764
    assert foreign_bytes(torch.nn.Linear(3, 3), lambda device: []) == 0


def test_the_same_room_is_left_for_the_cache_attached_or_loaded(engines: Engines, checkpoints: Path) -> None:
    """80 GiB, 20 of them weights. Loaded, they are free before and gone after; attached, they are gone before as well."""
    cases = {
        "loaded": (80.0, 60.0, 0),
        "attached": (60.0, 60.0, 20 * GIB),
        "not told": (60.0, 60.0, 0),
        "told twice": (60.0, 60.0, 40 * GIB),
    }
    found, _ = engines.run(checkpoints / "llama", accounting=cases, args={"mem_fraction_static": 0.8})
    assert found["attached"] == found["loaded"] == 44 * GIB
    assert found["not told"] != found["loaded"] != found["told twice"]


def test_an_attached_engine_tells_sglang_what_it_mapped_and_any_other_nothing(
    engines: Engines, checkpoints: Path, pool: str
) -> None:
    model = checkpoints / "llama"
    with Sidecar(pool, model) as sidecar:
        sidecar.ready("llama")
        first, _ = engines.run(model, pool, only="load", foreign=12345)
        adopted(sidecar, 1)
        attached, log = engines.run(model, pool, only="load", foreign=12345)
        on_a_cpu, again = engines.run(model, pool, only="load")
        assert ATTACHED in log and ATTACHED in again
        assert (first["preloaded"], attached["preloaded"], on_a_cpu["preloaded"]) == (0, 12345, 0)
        sidecar.interrupt()
