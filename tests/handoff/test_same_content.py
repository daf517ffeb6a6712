"""The sample: where it looks, so that a fine-tune never passes for its base; and what is decided without it."""

from __future__ import annotations

import dataclasses
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.handoff import identity
from engine_shim.handoff.errors import Damaged, Mismatch
from engine_shim.handoff.identity import (
    BLOCK,
    BUDGET,
    COARSE_TICK_NS,
    SPREAD,
    TICK_NS,
    File,
    FileIdentity,
    Stat,
    sample_plan,
)

sizes_of_tensors = st.lists(
    st.one_of(
        st.integers(0, 9), st.integers(BLOCK - 2, BLOCK + 2), st.integers(0, 40 * BLOCK), st.integers(0, 1 << 40)
    ),
    max_size=50,
)


@given(sizes_of_tensors)
def test_every_tensor_is_looked_at_in_its_middle(sizes: list[int]) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}
    for index, offset, length in sample_plan(sizes):
        assert offset >= 0 and 0 < length <= BLOCK and offset + length <= sizes[index]
        seen.setdefault(index, []).append((offset, length))
    assert set(seen) == {index for index, size in enumerate(sizes) if size}
    for index, places in seen.items():
        assert any(offset <= sizes[index] // 2 < offset + length for offset, length in places)
        assert len(set(places)) == len(places)
        if sizes[index] <= BLOCK:
            assert places == [(0, sizes[index])]


@given(sizes_of_tensors)
def test_it_is_bounded(sizes: list[int]) -> None:
    plan = sample_plan(sizes)
    assert len(plan) <= len(sizes) + SPREAD
    assert plan == sample_plan(tuple(sizes))  # both sides choose the same


@pytest.mark.parametrize("count", [BUDGET, BUDGET + 1, 5 * BUDGET, 100_000])
def test_of_very_many_tensors_it_takes_some_everywhere(count: int) -> None:
    plan = sample_plan([100, 0] * count)
    looked = [index for index, _, _ in plan]
    assert len(looked) == BUDGET
    assert all(index % 2 == 0 for index in looked)
    gaps = [right - left for left, right in pairwise(looked)]
    assert max(gaps) - min(gaps) <= 2
    assert looked[0] == 0 and looked[-1] >= 2 * count - max(gaps) - 2


def test_a_large_tensor_has_more_than_one_look() -> None:
    small, large = 10 * BLOCK, 10_000 * BLOCK
    plan = sample_plan([small, large])
    places = [offset for index, offset, _ in plan if index == 1]
    assert len(places) > SPREAD // 2
    gaps = [right - left for left, right in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1 and places[0] < max(gaps) and places[-1] > large - max(gaps) - BLOCK


def test_nothing_to_look_at() -> None:
    assert sample_plan([]) == [] and sample_plan([0, 0]) == []


# Files

SIZES = (3 * BLOCK, 0, 100, 5 * BLOCK)
HEADER = b'{"any": "header"}'


def put(path: Path, change: int | None = None, header: bytes = HEADER) -> None:
    """A file whose data area holds tensors of SIZES; with the byte at `change` of it another."""
    data = bytearray(i * 7 % 251 for i in range(sum(SIZES)))
    if change is not None:
        data[change] ^= 1
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def starts() -> list[int]:
    return [sum(SIZES[:index]) for index in range(len(SIZES))]


def known(path: Path) -> FileIdentity:
    fd = os.open(path, os.O_RDONLY)
    try:
        header, length = identity.header_digest(fd, path)
        places = [(length + starts()[i] + offset, count) for i, offset, count in sample_plan(SIZES)]
        sample = identity.sample_digest(fd, places, path)
        return FileIdentity(os.fstat(fd).st_size, header, sample, Stat.of(os.fstat(fd)))
    finally:
        os.close(fd)


def check(path: Path, identity_of_pool: FileIdentity, sample: str | None = None) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        File(fd, path).check(identity_of_pool, SIZES, starts(), sample)
    finally:
        os.close(fd)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    put(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


def test_the_same_file_and_a_copy_are_the_same(base: Path, other: Path) -> None:
    check(base, known(base))
    put(other)
    check(other, known(base))
    os.link(other, base.parent / "link")
    check(base.parent / "link", known(base))


@pytest.mark.parametrize("tensor", [0, 2, 3])
def test_one_byte_in_the_middle_of_any_tensor(base: Path, other: Path, tensor: int) -> None:
    put(other, change=starts()[tensor] + SIZES[tensor] // 2)
    with pytest.raises(Mismatch, match="other content, as a fine-tune has"):
        check(other, known(base))


def test_another_header_or_size(base: Path, other: Path) -> None:
    put(other, header=HEADER.replace(b"any", b"nay"))
    with pytest.raises(Mismatch, match="another header"):
        check(other, known(base))
    put(other, header=HEADER + b" ")
    with pytest.raises(Mismatch, match=r"has \d+ bytes and the pool's has"):
        check(other, known(base))


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1])
def test_a_header_that_lies_about_its_length(base: Path, other: Path, length: int) -> None:
    data = bytearray(base.read_bytes())
    data[:8] = struct.pack("<Q", length)
    other.write_bytes(data)
    with pytest.raises(Mismatch):
        check(other, known(base))


def test_written_to_since_it_was_read(base: Path) -> None:
    """Where no sample looks: the times tell."""
    before = known(base)
    place = 8 + len(HEADER) + BLOCK // 8
    with open(base, "r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    with pytest.raises(Mismatch, match="written to after"):
        check(base, before)


def test_what_lies_where_it_was_read_is_no_copy(base: Path, other: Path) -> None:
    """Also by way of a link; but on another file system it may be, such as in another container's image."""
    before = known(base)
    put(other)
    os.rename(other, base)
    check(base, before)
    fd = os.open(base, os.O_RDONLY)
    (base.parent / "link").symlink_to(base)
    try:
        with pytest.raises(Mismatch, match="took the place of what the sidecar read"):
            File(fd, base.parent / "link").check(before, SIZES, starts(), source=base)
        assert before.stat is not None
        elsewhere = dataclasses.replace(before, stat=dataclasses.replace(before.stat, dev=before.stat.dev + 1))
        File(fd, base).check(elsewhere, SIZES, starts(), source=base)
    finally:
        os.close(fd)


def test_the_very_same_file_is_not_read_again(base: Path) -> None:
    wrong = FileIdentity(known(base).size, "0" * 32, "0" * 32, known(base).stat)
    check(base, wrong)


def test_a_file_whose_times_meant_nothing_is_always_compared(base: Path) -> None:
    fresh = FileIdentity(known(base).size, known(base).header, known(base).sample, None)
    check(base, fresh)
    put(base, change=SIZES[0] // 2)
    with pytest.raises(Mismatch):
        check(base, fresh)


def test_while_loading_the_sample_comes_from_the_segment(base: Path, other: Path) -> None:
    now = known(base)
    loading = FileIdentity(now.size, now.header, "", now.stat)
    put(other)
    check(other, loading, now.sample)
    with pytest.raises(Mismatch):
        check(other, loading, "0" * 32)


def test_when_times_can_be_trusted() -> None:
    written = Stat(1, 2, 3, 5_000_000_001, 5_000_000_001)
    assert not written.settled(written.mtime_ns)
    assert not written.settled(written.mtime_ns + TICK_NS)
    assert written.settled(written.mtime_ns + TICK_NS + 1)
    coarse = Stat(1, 2, 3, 5_000_000_000, 6_000_000_000)  # whole seconds: a file system without more
    assert not coarse.settled(coarse.ctime_ns + TICK_NS + 1)
    assert coarse.settled(coarse.ctime_ns + COARSE_TICK_NS + 1)
    ahead = Stat(1, 2, 3, 9_000_000_001, 5_000_000_001)  # a time in the future, set by whoever unpacked it
    assert not ahead.settled(6_000_000_000)


def test_a_file_that_ends_before_its_sample(base: Path) -> None:
    """Size and header agree with what is known, and the file is shorter than its header says."""
    fd = os.open(base, os.O_RDONLY)
    try:
        file = identity.File(fd, base)
        header = file.header[0]
        known = identity.FileIdentity(file.stat.size, header, "0" * 32, None)
        with pytest.raises(Mismatch, match="too early"):
            file.check(known, [10_000], [1 << 30])
        assert file.header[0] == header
    finally:
        os.close(fd)


def test_a_sample_beyond_the_end(base: Path) -> None:
    fd = os.open(base, os.O_RDONLY)
    try:
        with pytest.raises(Damaged, match="too early"):
            identity.sample_digest(fd, [(1 << 30, 10)], base)
    finally:
        os.close(fd)
