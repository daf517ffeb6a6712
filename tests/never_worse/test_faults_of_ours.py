"""A fault in Ballast itself, of any kind and anywhere, costs a line in the log and nothing else."""

from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from engine_shim import ladder, mapping, safe_open
from engine_shim.handoff import attachment, catalog, identity, manifest, maps, names, posix
from engine_shim.handoff.errors import Busy, HandoffError, NoRoom
from engine_shim.safe_open import stand_in
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.bits import everything
from tests.never_wrong.loading import Loading
from tests.never_wrong.logs import Lines, forget_pools

ORIGINAL: Any = safetensors.safe_open
OURS: Any = stand_in(safetensors.safe_open)

# Everything on the way from a path to a tensor: module or class, and the name in it.
STEPS: list[tuple[Any, str]] = [
    (ladder, "shard_for"), (ladder, "pool"), (ladder, "fall_back"), (ladder, "gib"), (ladder, "_Search"),
    (ladder.Settings, "read"), (ladder.Pool, "control"), (ladder.Pool, "manifest"), (ladder.Pool, "attach"),
    (ladder.Pool, "wait"), (ladder.Lease, "hold"), (ladder.Lease, "__init__"), (names.PoolPaths, "from_environment"),
    (posix, "open_existing"), (posix, "trusted"), (posix, "read_exactly"), (posix, "create"), (posix, "rename"),
    (posix, "write_exactly"), (posix, "try_lock_byte"), (posix, "same_file"), (catalog, "decode"), (catalog, "_digest"),
    (catalog.ControlPage, "read"), (manifest, "read"), (manifest, "decode"), (manifest, "_parse_tensors"),
    (attachment.Token, "take"), (identity.File, "__init__"), (identity.File, "check"), (mapping, "map_segment"),
    (mapping.Segments, "__getitem__"), (mapping.Shard, "__init__"), (maps, "private"),
]  # fmt: skip
ERRORS = [
    RuntimeError("a fault"), KeyError("a fault"), MemoryError(), RecursionError("a fault"), OSError(errno.ENOMEM, "no memory"),
    OSError(errno.EMFILE, "too many"), ImportError("a fault"), UnicodeDecodeError("utf-8", b"x", 0, 1, "a fault"),
    NoRoom("a fault: remedy"), Busy("a fault: remedy"), torch.OutOfMemoryError("a fault"), StopIteration(), AssertionError(),
]  # fmt: skip


@pytest.fixture
def path(filled: Loading, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    Checkpoint({"a": entry("F32", (100,), 1), "b": entry("BF16", (3, 5), 2)}, {"format": "pt"}).write(path)
    filled.load(path)
    return path


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
def test_any_step_may_fail(path: Path, lines: Lines, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = everything(ORIGINAL(path, "pt"))
    assert type(OURS(path, "pt")) is OURS
    for error in ERRORS:
        lines.take()
        safe_open._said.clear()
        forget_pools()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(error))
            opened = OURS(path, "pt")
            said = lines.take()
        assert everything(opened) == intact
        if type(opened) is not OURS:
            assert len(said) == 1, (error, said)
            assert "without Ballast" in said[0], said
    if (owner, name) in ((ladder, "fall_back"), (ladder, "gib"), (posix, "same_file")):
        return  # not needed for an ordinary attachment
    with monkeypatch.context() as patch:
        forget_pools()
        patch.setattr(owner, name, failing(ERRORS[0]))
        assert type(OURS(path, "pt")) is ORIGINAL, "this step is not on the way, so nothing was tested"


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
def test_with_require_it_is_heard(
    path: Path, lines: Lines, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (owner, name) in ((ladder, "fall_back"), (ladder, "gib"), (posix, "same_file")):
        return
    monkeypatch.setenv("BALLAST_MODE", "require")
    for error in ERRORS[:6] + ERRORS[8:10]:
        forget_pools()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(error))
            with pytest.raises((type(error), HandoffError)):
                OURS(path, "pt")


@pytest.mark.parametrize("name", ["frombuffer", "empty"])
def test_tensors_that_cannot_be_made(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the file is opened after all."""
    intact = everything(ORIGINAL(path, "pt"))
    opened = OURS(path, "pt")
    assert type(opened) is OURS
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "view", failing(RuntimeError("a fault")))
        found = everything(opened)
    assert found == intact


@pytest.mark.parametrize("mode", ["auto", "require"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(3)])
def test_a_person_who_wants_out_gets_out(
    path: Path, stop: BaseException, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALLAST_MODE", mode)
    monkeypatch.setattr(manifest, "read", failing(stop))
    forget_pools()
    with pytest.raises(type(stop)):
        OURS(path, "pt")


def test_a_shim_that_cannot_be_imported(path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an installation, or a broken one."""
    real = builtins.__import__

    def broken(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "engine_shim.ladder":
            raise ImportError("half an installation")
        return real(name, *args, **kwargs)

    safe_open._said.clear()
    monkeypatch.setattr(builtins, "__import__", broken)
    for _ in range(3):
        assert type(OURS(path, "pt")) is ORIGINAL
    assert len(lines.take()) == 1
    monkeypatch.setenv("BALLAST_MODE", "require")
    with pytest.raises(ImportError, match="half an installation"):
        OURS(path, "pt")


def test_a_failure_leaves_no_hold_and_no_descriptor(path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the sidecar would never free what nobody has, and an engine of many files would run out of descriptors."""
    import gc

    forget_pools()
    gc.collect()
    opened = OURS(path, "pt")
    del opened
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for owner, name in STEPS:
        if (owner, name) == (ladder.Lease, "__init__"):
            continue  # it has no step that could fail
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(RuntimeError("a fault")))
            OURS(path, "pt")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    paths = names.PoolPaths.from_environment()
    assert not list(attachment.alive(paths))
    assert not [name for name in paths.objects() if name.kind == "attachment"]
