"""A checkpoint that somebody is still writing is not served; once it is whole, it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import FAILED
from sidecar.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoints import write
from tests.generations.states import content
from tests.processes import Sidecar

SIZE = 1 << 20


def file(path: Path, seed: int = 0) -> Path:
    write(path, {f"t{seed}": ("U8", (SIZE,), content(seed, SIZE))})
    return path


def growing(folder: Path) -> None:
    os.truncate(file(folder / "model.safetensors"), SIZE // 2)


def only_its_header(folder: Path) -> None:
    os.truncate(file(folder / "model.safetensors"), 40)


def written_in_place(folder: Path) -> None:
    """aria2 makes the whole file at once, full of holes, and keeps what it has in another."""
    file(folder / "model.safetensors")
    (folder / "model.safetensors.aria2").touch()


def under_another_name(folder: Path) -> None:
    file(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors.incomplete").touch()


def not_one_of_a_series(folder: Path) -> None:
    """Only the mark tells that another is to come."""
    file(folder / "first.safetensors")
    (folder / "second.safetensors.part").touch()


def one_of_three(folder: Path) -> None:
    file(folder / "model-00002-of-00003.safetensors")


def index_first(folder: Path) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    file(folder / names[0], 1)
    index = {"weight_map": {"t1": names[0], "t2": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


STAGES = [growing, only_its_header, written_in_place, under_another_name, not_one_of_a_series, one_of_three, index_first]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_it_is_refused(stage: Callable[[Path], None], tmp_path: Path) -> None:
    stage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "download" in str(caught.value) and "\n" not in str(caught.value)


def test_a_series_may_begin_with_0_and_be_whole(tmp_path: Path) -> None:
    for number in range(2):
        file(tmp_path / f"model-0000{number}-of-00002.safetensors", number)
    assert len(open_checkpoint(tmp_path).shards) == 2


def test_an_old_mark_beside_a_whole_file_does_no_harm(tmp_path: Path) -> None:
    file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.incomplete").touch()
    assert len(open_checkpoint(tmp_path).shards) == 1


@pytest.mark.slow
def test_a_download_as_a_sidecar_sees_it(pool_name: str, tmp_path: Path) -> None:
    """Nothing is published before the last byte, and then it is, without anybody's help."""
    folder, ready = tmp_path / "m", file(tmp_path / "ready")
    folder.mkdir()
    whole = ready.read_bytes()
    target = folder / "model.safetensors"
    other = tmp_path / "other"  # a sidecar that serves nothing at all would end
    other.mkdir()
    file(other / "model.safetensors")
    target.write_bytes(whole[:100])
    with Sidecar(pool_name, folder, other) as sidecar:
        sidecar.ready("m", FAILED)
        sidecar.ready("other")
        for end in range(SIZE // 4, SIZE, SIZE // 4):
            with target.open("ab") as stream:
                stream.write(whole[stream.tell() : end])
            assert not sidecar.catalog.of_model("m", "ready")
        (folder / "model.safetensors.aria2").touch()
        with target.open("ab") as stream:
            stream.write(whole[stream.tell() :])
        sidecar.says("is being written by a downloader", timeout=20)
        assert not sidecar.catalog.of_model("m", "ready")
        (folder / "model.safetensors.aria2").unlink()
        sidecar.ready("m")
        assert sidecar.paths.segment(sidecar.ready("m").number, 0).read_bytes()[:SIZE] == content(0, SIZE)
