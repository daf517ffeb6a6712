"""Small checkpoints for the commands to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.processes import Sidecar

TENSORS = {
    "embed.weight": checkpoints.entry("BF16", (64, 32), 1),
    "head.weight": checkpoints.entry("F32", (16, 8), 2),
    "step": checkpoints.entry("I64", (), 3),
}
NBYTES = sum(len(data) for _, _, data in TENSORS.values())

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a checkpoint of three tensors in a directory of that name."""

    def make_checkpoint(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        checkpoints.write(directory / "model.safetensors", TENSORS, {"format": "pt"})
        (directory / "config.json").write_text('{"model_type": "llama"}')
        return directory

    return make_checkpoint


@pytest.fixture
def served(make: Make, pool_name: str) -> Iterator[Sidecar]:
    """A sidecar in a pool of its own that has model `m` ready."""
    with Sidecar(pool_name, make("m")) as sidecar:
        sidecar.ready("m")
        yield sidecar
