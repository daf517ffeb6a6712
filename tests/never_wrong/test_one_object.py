"""The same name of an opened model gives the same, ordinary tensor, whoever asks first."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engine_shim
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.loading import Loading


@pytest.fixture
def opened(filled: Loading, tmp_path: Path) -> Iterator[engine_shim.api.Model]:
    tensors = {f"t{number}": entry("F32", (8, 8), number) for number in range(200)}
    Checkpoint({**tensors, "empty": entry("F32", (0,), 1)}).write(tmp_path / "model.safetensors")
    filled.load(tmp_path)
    with engine_shim.open("m") as model:
        yield model


def test_threads_that_ask_at_once(opened: engine_shim.api.Model) -> None:
    threads, before = 4, sys.getswitchinterval()
    together, found = threading.Barrier(threads), []

    def ask() -> None:
        together.wait(10)
        found.append([opened.tensors[name] for name in opened.tensors])

    sys.setswitchinterval(1e-6)
    try:
        asking = [threading.Thread(target=ask) for _ in range(threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == threads
    for same in zip(*found, strict=True):
        assert len(set(map(id, same))) == 1


@pytest.mark.parametrize("name", ["t0", "empty"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_who_asks_first_in_a_mode_of_his_own(opened: engine_shim.api.Model, mode: type, name: str) -> None:
    with mode():
        tensor = opened.tensors[name]
        assert mode is torch.no_grad or torch.is_inference_mode_enabled()
    assert not tensor.is_inference()
    tensor.add_(1)
    weight = torch.nn.Parameter(tensor)
    (weight * weight).sum().backward()
    assert weight.grad is not None
