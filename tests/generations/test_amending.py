"""A manifest has two writers, of different parts: who reads the files again, and who follows the copies on GPUs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

import engine_shim
from engine_shim.handoff import holder, manifest
from engine_shim.handoff.errors import NotFound
from engine_shim.handoff.manifest import DeviceCopy, Window
from sidecar.residency import Residency
from tests.generations.parts import checkpoint
from tests.never_wrong.loading import Loading

GPU = "GPU-aaaaaaaa-0000-1111-2222-333333333333"


def test_neither_undoes_what_the_other_has_written(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "m", 1) / "model.safetensors"
    assert filled.load(path.parent).number == 1
    [size] = manifest.read(filled.paths.manifest(1)).segments
    token = holder.Token(filled.paths, [GPU])
    copy = DeviceCopy(GPU, token.identifier, (Window(b"\1" * 64, size, 0),))
    token.write(holder.Page(1, (copy,), held=(GPU,)))
    really = holder.read

    def meanwhile(*args: Any) -> holder.Page:
        monkeypatch.setattr(holder, "read", really)
        page = really(*args)
        os.utime(path)
        assert filled.load(path.parent).number == 1, "touched, not changed"
        return page

    monkeypatch.setattr(holder, "read", meanwhile)
    try:
        Residency(filled.pool, None).turn()
        assert manifest.read(filled.paths.manifest(1)).devices == (copy,)
        engine_shim.open("m", wait=0, checkpoint=path.parent).close()
        os.utime(path)
        assert filled.load(path.parent).number == 1
        assert manifest.read(filled.paths.manifest(1)).devices == (copy,), "the other way round"
    finally:
        token.release()


def test_what_is_out_of_service_is_not_written_to(filled: Loading, tmp_path: Path) -> None:
    number = filled.load(checkpoint(tmp_path / "m", 1)).number
    filled.pool.retire(number)
    for _ in range(2):
        with pytest.raises(NotFound, match="is not there any more"):
            filled.pool.amend(number, lambda now: dataclasses.replace(now, config={}))
        filled.pool.collect()
    assert not filled.paths.manifest(number).exists()
