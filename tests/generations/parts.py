"""Checkpoints of one tensor whose bytes follow from a number."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import write
from tests.generations.states import content


def checkpoint(folder: Path, seed: int, size: int = 6 << 20) -> Path:
    """A folder with one file, renamed into place as downloaders do."""
    folder.mkdir(exist_ok=True)
    write(folder / "new", {"t": ("U8", (size,), content(seed, size))})
    (folder / "new").rename(folder / "model.safetensors")
    return folder

