"""An emulated driver for all of these tests, and a machine for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import TORCH_DTYPES, Checkpoint, entry, one_of_each
from tests.device.emulated import Machine, build


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def machine(libcuda: Path) -> Iterator[Machine]:
    """Two GPUs of 64 MiB."""
    made = Machine(libcuda)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files: every element type, and something larger."""
    folder = tmp_path / "model"
    folder.mkdir()
    one_of_each(TORCH_DTYPES).write(folder / "0.safetensors")
    Checkpoint({"large": entry("F32", (1 << 20,), 7), "more": entry("BF16", (3, 5), 8)}).write(folder / "1.safetensors")
    return folder
