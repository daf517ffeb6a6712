"""A program may close descriptors that it does not know, as daemons do when they start, and its own files get our numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine_shim.handoff import attachment
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.never_wrong.loading import Loading

NAMES = ("a", "b")


@pytest.fixture
def folder(filled: Loading, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for seed, name in enumerate(NAMES):
        Checkpoint({name: entry("F32", (100,), seed)}).write(folder / f"{name}.safetensors")
    filled.load(folder)
    return folder


@pytest.mark.parametrize("put", ["something else", "another control page"])
def test_our_numbers_are_not_ours_any_more(filled: Loading, folder: Path, tmp_path: Path, put: str) -> None:
    a, b = (str(folder / f"{name}.safetensors") for name in NAMES)
    own = tmp_path / "own"
    if put == "something else":
        own.write_bytes(b"mine")
    else:  # whose catalog is whole: nothing but the file itself says that it is not the pool's
        shutil.copy(filled.paths.control, own)
    before = own.read_bytes()
    with Engine(filled.paths.pool) as engine:
        truth = {path: engine(engine_side.load, "safe_open", path, path) for path in (a, b)}
        count = engine(engine_side.take_descriptors, filled.paths.pool, str(own))
        assert count >= 2, "the control page and a record"
        assert not list(attachment.alive(filled.paths)), "the lock went with them"
        assert engine(engine_side.load, "safe_open", a, "again") == truth[a]
        assert engine(engine_side.segments), "from memory"
        assert len(list(attachment.alive(filled.paths))) == 1, "and held anew"
        for name in (a, b, "again"):
            engine(engine_side.forget, name)
        assert engine(engine_side.load, "safe_open", b) == truth[b]
        assert engine(engine_side.own_descriptors, str(own)) == count
        assert len(engine.lines) == 1 and "comes from memory" in engine.lines[0]
    assert own.read_bytes() == before


def test_a_record_alone_is_closed(filled: Loading, folder: Path) -> None:
    """What is attached after that counts as held, by a record of its own."""
    path = str(folder / "a.safetensors")
    with Engine(filled.paths.pool) as engine:
        engine(engine_side.load, "safe_open", path, "first")
        engine(engine_side.take_descriptors, f"{filled.paths.pool}.a", "/dev/null")
        engine(engine_side.load, "safe_open", path, "second")
        assert len(list(attachment.alive(filled.paths))) == 1
