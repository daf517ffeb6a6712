"""Weights that look the same are told from weights that are the same: nobody gets a fine-tune's base, or yesterday's file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

import engine_shim
from engine_shim.handoff.errors import HandoffError, Mismatch
from engine_shim.safe_open import stand_in
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.bits import everything
from tests.never_wrong.loading import Loading
from tests.never_wrong.logs import Lines

ORIGINAL: Any = safetensors.safe_open
OURS: Any = stand_in(safetensors.safe_open)

TENSORS = {
    "tiny": entry("BF16", (3,), 1), "twin": entry("BF16", (3,), 6), "page": entry("F32", (1024,), 2),
    "large": entry("F32", (300, 300), 3),
    "larger": entry("U8", (1_000_003,), 4), "scalar": entry("F64", (), 5), "none": entry("F32", (0,)),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    path = tmp_path / "base" / "model.safetensors"
    Checkpoint(TENSORS, {"format": "pt"}).write(path)
    (path.parent / "config.json").write_text('{"layers": 2}')
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Where another checkpoint may be put."""
    (tmp_path / "other").mkdir()
    return tmp_path / "other" / "model.safetensors"


def position(path: Path, tensor: str, part: float) -> int:
    """The place in a file of a byte somewhere in a tensor."""
    with ORIGINAL(path, "pt") as file:
        data = file.get_tensor(tensor).numel()
    assert data
    begin = len(path.read_bytes()) - sum(len(value) for _, _, value in TENSORS.values())
    for name, (_, _, value) in TENSORS.items():
        if name == tensor:
            return begin + int(part * len(value))
        begin += len(value)
    raise AssertionError


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def served(path: Path) -> bool:
    """Whether the file comes from memory. In either case it has to be the file that is there."""
    opened = OURS(path, "pt")
    assert everything(opened) == everything(ORIGINAL(path, "pt"))
    return type(opened) is OURS


def refused(path: Path, lines: Lines, reason: str) -> None:
    """The file is read from the disk, and one line says why."""
    lines.take()
    assert not served(path)
    said = lines.take()
    assert len(said) == 1 and reason in said[0] and said[0].endswith("(loading without Ballast)"), said
    assert str(path.parent) in said[0]


# A checkpoint elsewhere


@pytest.mark.parametrize("tensor", [name for name in TENSORS if name != "none"])
def test_the_same_header_and_one_other_byte(
    filled: Loading, base: Path, other: Path, lines: Lines, tensor: str
) -> None:
    filled.load(base.parent)
    shutil.copy(base, other)
    assert served(other)
    flip(other, position(other, tensor, 0.5))
    refused(other, lines, "other content, as a fine-tune has")
    with pytest.raises(Mismatch, match="other content"):
        engine_shim.open("m", checkpoint=other)
    assert served(base)


@pytest.mark.parametrize("way", ["copy", "symbolic link", "hard link elsewhere", "renamed"])
def test_the_same_content_elsewhere_is_accepted(filled: Loading, base: Path, other: Path, way: str) -> None:
    filled.load(base.parent)
    if way == "copy":
        shutil.copyfile(base, other)
    elif way == "symbolic link":
        other.symlink_to(base)
    elif way == "renamed":
        # The times change with the name; it is the same inode, so the sidecar has to look first (see test_updates).
        shutil.copyfile(base, other)
        os.rename(other, other.with_name("renamed.safetensors"))
        other = other.with_name("renamed.safetensors")
    else:
        shutil.copyfile(base, other)
        os.link(other, other.with_name("link.safetensors"))
        other = other.with_name("link.safetensors")
    assert served(other)
    engine_shim.open("m", checkpoint=other if other.is_file() else other.parent).close()


def test_another_metadata_is_another_file(filled: Loading, base: Path, other: Path, lines: Lines) -> None:
    filled.load(base.parent)
    Checkpoint(TENSORS, {"format": "np"}).write(other)
    refused(other, lines, "another header")


def test_another_order_is_another_file(filled: Loading, base: Path, other: Path, lines: Lines) -> None:
    filled.load(base.parent)
    Checkpoint(TENSORS, {"format": "pt"}, ["twin", "tiny", *[*TENSORS][2:]]).write(other)
    refused(other, lines, "another header")


def test_another_size(filled: Loading, base: Path, other: Path, lines: Lines) -> None:
    filled.load(base.parent)
    Checkpoint({**TENSORS, "more": entry("U8", (1,))}, {"format": "pt"}).write(other)
    refused(other, lines, "does not hold it (it holds m)")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_copy_cut_short(filled: Loading, base: Path, other: Path, lines: Lines, cut: int) -> None:
    filled.load(base.parent)
    other.write_bytes(base.read_bytes()[:cut])
    for opened in (ORIGINAL, OURS):
        with pytest.raises(safetensors.SafetensorError):
            opened(other, "pt")


def test_a_fine_tune_beside_its_base(filled: Loading, base: Path, other: Path, lines: Lines) -> None:
    """Both in one pool, told apart by content alone, whichever path they are reached by."""
    tuned = {name: entry(dtype, shape, 77 + len(name)) for name, (dtype, shape, _) in TENSORS.items()}
    Checkpoint(tuned, {"format": "pt"}).write(other)
    filled.load(base.parent, "base")
    filled.load(other.parent, "tuned")
    assert served(base) and served(other)
    base_copy, tuned_copy = base.with_name("c.safetensors"), other.with_name("c.safetensors")
    shutil.copy(base, base_copy)
    shutil.copy(other, tuned_copy)
    assert served(base_copy) and served(tuned_copy)
    assert not any("without Ballast" in line for line in lines.all)


def test_one_shard_of_several_is_another(filled: Loading, tmp_path: Path, lines: Lines) -> None:
    """The others may come from memory: they are what they are."""
    for folder in ("base", "other"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            seed = 9 if (folder, number) == ("other", 1) else number
            Checkpoint({f"{number}.w": entry("F32", (500,), seed)}).write(tmp_path / folder / f"{number}.safetensors")
    filled.load(tmp_path / "base")
    lines.take()
    assert [served(tmp_path / "other" / f"{number}.safetensors") for number in range(3)] == [True, False, True]
    assert len([line for line in lines.take() if "without Ballast" in line]) == 1
    with pytest.raises(Mismatch, match=r"1\.safetensors has the pool's header but other content"):
        engine_shim.open("m", checkpoint=tmp_path / "other")


def test_a_folder_where_everything_differs_is_one_line(filled: Loading, tmp_path: Path, lines: Lines) -> None:
    for folder, more in (("base", 0), ("other", 50)):
        (tmp_path / folder).mkdir()
        for number in range(5):
            path = tmp_path / folder / f"{number}.safetensors"
            Checkpoint({f"{number}.w": entry("F32", (500,), number + more)}).write(path)
    filled.load(tmp_path / "base")
    lines.take()
    assert not any(served(tmp_path / "other" / f"{number}.safetensors") for number in range(5))
    assert len(lines.take()) == 1


@pytest.mark.parametrize("change", ["other", "missing", "more"])
def test_the_configuration_belongs_to_the_weights(filled: Loading, base: Path, other: Path, change: str) -> None:
    filled.load(base.parent)
    shutil.copy(base, other)
    config = other.with_name("config.json")
    if change != "missing":
        shutil.copy(base.with_name("config.json"), config)
    if change == "other":
        config.write_text(config.read_text().replace("2", "3"))
    if change == "more":  # a tokenizer's is not the weights' business
        other.with_name("tokenizer_config.json").write_text("{}")
        engine_shim.open("m", checkpoint=other.parent).close()
        return
    with pytest.raises(Mismatch, match=r"config\.json"):
        engine_shim.open("m", checkpoint=other.parent)


def test_a_checkpoint_that_is_not_there(filled: Loading, base: Path, other: Path) -> None:
    filled.load(base.parent)
    with pytest.raises(Mismatch, match="cannot be read"):
        engine_shim.open("m", checkpoint=other.parent)


# The same file


Change = Callable[[Path], None]


def in_place(path: Path) -> None:
    """Where no sample looks."""
    flip(path, position(path, "larger", 0.001))


def replaced(path: Path) -> None:
    flip_copy = path.with_name("new")
    shutil.copy(path, flip_copy)
    flip(flip_copy, position(path, "larger", 0.5))
    os.rename(flip_copy, path)


def rewritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def with_its_old_times(path: Path) -> None:
    """As `touch -r` or `rsync -t` would: what cannot be set is the time of the last change."""
    before = os.stat(path)
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [in_place, replaced, rewritten, with_its_old_times])
def test_a_file_changed_after_it_was_loaded(filled: Loading, base: Path, lines: Lines, change: Change) -> None:
    filled.load(base.parent)
    assert served(base)
    change(base)
    refused(base, lines, "took the place of" if change is replaced else "written to after the sidecar read it")
    with pytest.raises(Mismatch):
        engine_shim.open("m", checkpoint=base.parent)
    assert filled.load(base.parent).number == 2
    assert served(base)


def test_a_change_where_no_sample_looks(filled: Loading, tmp_path: Path, lines: Lines) -> None:
    """One token's vector, in a file that takes the place of the served one. In a copy elsewhere it would not be noticed."""
    path = tmp_path / "m" / "model.safetensors"
    path.parent.mkdir()
    Checkpoint({"embed": entry("BF16", (4000, 512)), "norm": entry("F32", (8,))}).write(path)
    filled.load(path.parent)
    again = tmp_path / "again"
    shutil.copy(path, again)
    flip(again, os.path.getsize(again) - 777 * 1024)
    assert type(OURS(again, "pt")) is OURS
    os.rename(again, path)
    refused(path, lines, "took the place of what the sidecar read; the sidecar will read it again")
    with pytest.raises(Mismatch, match="took the place of"):
        engine_shim.open("m", checkpoint=path.parent)
    assert filled.load(path.parent).number == 2
    assert served(path)


@pytest.mark.parametrize("change", [in_place, rewritten])
def test_a_file_changed_right_after_it_was_written(filled: Loading, base: Path, lines: Lines, change: Change) -> None:
    """Within the tick of the file system's clock the times do not tell one write from the next."""
    for _ in range(6):
        number = filled.load(base.parent).number
        change(base)
        assert not served(base)
        assert filled.load(base.parent).number > number
        assert served(base)
        lines.take()


def test_a_file_that_is_only_touched_is_loaded_once(filled: Loading, base: Path, lines: Lines) -> None:
    first = filled.load(base.parent)
    inode = os.stat(filled.paths.segment(first.number, 0)).st_ino
    model = engine_shim.open("m")
    for touch in (
        lambda: os.utime(base),
        lambda: os.chmod(base, 0o600),
        lambda: shutil.copy(base, base.with_name("n")),
    ):
        touch()
        if (base.with_name("n")).exists():
            os.rename(base.with_name("n"), base)  # another inode with the same content
        else:
            refused(base, lines, "written to after")
        assert filled.load(base.parent) == first
        assert served(base)
        assert os.stat(filled.paths.segment(first.number, 0)).st_ino == inode
    with engine_shim.open("m", checkpoint=base.parent) as again:
        assert again.generation == model.generation == first.number
    segments = [name for name in filled.paths.objects() if name.kind == "segment"]
    assert len(segments) == 1


# Which model is asked for


def test_ballast_model_limits_the_search(
    filled: Loading, base: Path, other: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(base, other)
    filled.load(base.parent, "one")
    monkeypatch.setenv("BALLAST_MODEL", "two")
    refused(base, lines, "does not hold it")
    monkeypatch.setenv("BALLAST_MODEL", "one")
    assert served(base)
    assert engine_shim.open().name == "one"


def test_a_model_of_that_name_is_not_there(filled: Loading, base: Path) -> None:
    filled.load(base.parent, "one")
    with pytest.raises(HandoffError, match=r"holds no 'two' but one.*ballast serve"):
        engine_shim.open("two")
