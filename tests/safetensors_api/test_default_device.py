"""What torch is told of tensors that do not say where they are to be has no part in where weights come to lie."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import engine_shim
from engine_shim.handoff.manifest import Tensor
from engine_shim.mapping import Segments, Uploaded, upload

CPU = torch.device("cpu")
EMPTY = Tensor("empty", "F16", (2, 0), None, 0, 0, 0, None, 0)
FULL = Tensor("full", "F32", (2, 2), None, 0, 0, 16, None, 0)


@pytest.mark.parametrize("module", ["safe_open", "mapping", "onboard", "device"])
def test_every_new_tensor_says_where_it_is_to_be(module: str) -> None:
    makers = {function.__name__ for function in _device_constructors()}
    tree = ast.parse((Path(engine_shim.__file__).parent / f"{module}.py").read_text())
    silent = [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.")
        if ast.unparse(call.func).rpartition(".")[2] in makers
        if "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not silent


def test_bytes_of_segments(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(16)))
    segments = Segments(lambda _: path, [16])
    with torch.device("meta"):
        for residency in (segments, Uploaded(segments, CPU)):
            assert residency.flat(FULL).tolist() == [*range(16)]
            assert residency.view(FULL).view(torch.uint8).flatten().tolist() == [*range(16)]
            for nothing in (residency.flat(EMPTY), residency.view(EMPTY)):
                assert nothing.device == CPU and not nothing.numel()


def test_copying_to_a_device() -> None:
    source = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    target = torch.zeros(1000, dtype=torch.uint8)
    with torch.device("meta"):
        assert torch.equal(upload(source, CPU), source)
        upload(source, CPU, target.untyped_storage())
    assert torch.equal(target, source)
