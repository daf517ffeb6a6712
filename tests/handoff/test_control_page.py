"""The control page: whatever moment its writer is killed in, a reader sees the old catalog or the new one, never a third."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim.handoff import catalog, posix
from engine_shim.handoff.catalog import (
    FILE_SIZE,
    KINDS,
    READY,
    SLOT_OFFSET,
    SLOT_SIZE,
    STATES,
    Catalog,
    ControlPage,
    Generation,
    decode,
    encode,
)
from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NotFound
from engine_shim.handoff.names import PoolPaths
from tests.handoff import hammer
from tests.never_wrong.forked import Died, Engine

BOOT = "0123456789abcdef" * 2


def a_catalog(mark: int, generations: int = 3) -> Catalog:
    """One that differs from all others in every line."""
    lines = tuple(Generation(n, f"m{n}", "checkpoint", READY, mark, mark) for n in range(1, generations + 1))
    return Catalog(BOOT, generations + 1, 0, lines)


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    return PoolPaths("p", tmp_path)


@pytest.fixture
def page(paths: PoolPaths) -> Iterator[ControlPage]:
    page = ControlPage.create_or_open(paths)
    yield page
    page.close()


# Torn writes


class Recorder:
    """Stands in for `posix.write_exactly`: notes what would be written."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []

    def __call__(self, fd: int, data: bytes, offset: int, path: Path) -> None:
        self.writes.append((offset, bytes(data)))


def torn_at_each_byte(page: ControlPage, write: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Leaves the page as a kill after each byte of `write` would leave it; yields whether that was the last byte."""
    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(posix, "write_exactly", recorder)
        write()
    before = os.pread(page.fd, FILE_SIZE, 0)
    total = sum(len(data) for _, data in recorder.writes)
    for cut in range(total + 1):
        left = cut
        touched = []
        for offset, data in recorder.writes:
            part = data[:left]
            left -= len(part)
            if part:
                os.pwrite(page.fd, part, offset)
                touched.append((offset, len(part)))
        yield cut == total
        if cut < total:
            for offset, length in touched:
                os.pwrite(page.fd, before[offset : offset + length], offset)


@pytest.mark.parametrize("history", range(1, 6))
def test_a_reader_sees_the_old_catalog_or_the_new(
    page: ControlPage, paths: PoolPaths, history: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mark in range(history):
        # A longer one now and then, so that the slot holds the remains of more than is written now.
        old = page.write(a_catalog(mark, 8 if mark % 2 else 2))
    new = dataclasses.replace(a_catalog(history), sequence=old.sequence + 1)
    seen = []
    for whole in torn_at_each_byte(page, lambda: page.write(a_catalog(history)), monkeypatch):
        reader = ControlPage.open(paths)
        found = reader.read()
        reader.close()
        assert found == new if whole else found in (old, new)
        seen.append(found == new)
    assert len(seen) > 300
    assert seen == sorted(seen)  # once new, always new
    assert not any(seen[:-8])  # the checksum comes last


def test_after_a_torn_write_the_next_one_goes_to_the_torn_slot(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write(a_catalog(1))
    kept = page.write(a_catalog(2))
    for whole in torn_at_each_byte(page, lambda: page.write(a_catalog(3)), monkeypatch):
        if whole:
            break
        state = os.pread(page.fd, FILE_SIZE, 0)
        successor = ControlPage.open(page.paths, write=True)
        assert successor.read() == kept
        written = successor.write(a_catalog(4))
        assert written.sequence > kept.sequence
        assert successor.read() == written
        torn, whole_slot = (SLOT_OFFSET, SLOT_OFFSET + SLOT_SIZE)
        assert os.pread(page.fd, SLOT_SIZE, whole_slot) == state[whole_slot : whole_slot + SLOT_SIZE]
        assert torn < whole_slot
        successor.close()
        os.pwrite(page.fd, state, 0)


def test_the_first_write_cut_short(page: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_READ_ATTEMPTS", 2)
    for whole in torn_at_each_byte(page, lambda: page.write(a_catalog(1)), monkeypatch):
        if whole:
            assert page.read() == dataclasses.replace(a_catalog(1), sequence=1)
        else:
            with pytest.raises((NotFound, Damaged)):
                page.read()
    with pytest.raises(AssertionError):  # the loop above is no empty one
        assert page.read() == a_catalog(2)


def test_both_slots_torn(page: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write(a_catalog(1))
    page.write(a_catalog(2))
    for slot in (0, 1):
        os.pwrite(page.fd, b"\xff", SLOT_OFFSET + slot * SLOT_SIZE + 100)
    began = time.monotonic()
    with pytest.raises(Damaged, match=r"torn.*ballast purge"):
        page.read()
    assert time.monotonic() - began < 10
    assert page.write(a_catalog(3)) == page.read()


@pytest.mark.parametrize("slot", [0, 1])
def test_one_flipped_bit_costs_one_slot(page: ControlPage, slot: int) -> None:
    written = [page.write(a_catalog(1)), page.write(a_catalog(2))]
    start = SLOT_OFFSET + slot * SLOT_SIZE
    length = 48 + len(encode(written[slot]))
    before = os.pread(page.fd, length, start)
    for position in range(length):
        os.pwrite(page.fd, bytes([before[position] ^ 1 << position % 8]), start + position)
        assert page.read() == written[1 - slot]
        os.pwrite(page.fd, before[position : position + 1], start + position)
    assert page.read() == written[1]


def test_a_slot_cannot_be_moved_or_repeated(page: ControlPage) -> None:
    """The digest covers the sequence number: an old slot does not become new by its header."""
    page.write(a_catalog(1))
    newest = page.write(a_catalog(2))
    sequence = struct.pack("<Q", 99)
    os.pwrite(page.fd, sequence, SLOT_OFFSET)
    assert page.read() == newest


def test_a_reader_that_sleeps_between_the_slots_does_not_go_back(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read one slot; then two catalogs are written, and the last is just being written when it reads the other."""
    page.write(a_catalog(1))
    page.write(a_catalog(2))
    writer = ControlPage.open(page.paths, write=True)
    assert page.read().sequence == 2
    really = ControlPage._read_slot
    slept = False

    def read_slot(self: ControlPage, index: int) -> Any:
        nonlocal slept
        if self is page and index == 1 and not slept:
            slept = True
            writer.write(a_catalog(3))
            writer.write(a_catalog(4))
            os.pwrite(page.fd, b"\xff", SLOT_OFFSET + SLOT_SIZE + 100)
        return really(self, index)

    monkeypatch.setattr(ControlPage, "_read_slot", read_slot)
    assert page.read().sequence == 3
    assert slept
    writer.close()


def test_a_writer_that_is_hammering(paths: PoolPaths) -> None:
    page = ControlPage.create_or_open(paths)
    with Engine() as writer:
        writer.start(hammer.write_catalogs, str(paths.dir), paths.pool)
        reads, last = 0, 0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline or reads < 100 or last <= 100:
            assert time.monotonic() < deadline + 60, "the writer does not write"
            try:
                found = page.read()
            except NotFound:
                assert not last
                continue
            assert found.sequence >= last
            assert {g.done for g in found.generations} == {found.next}
            last, reads = found.sequence, reads + 1
    page.close()


def test_a_writer_that_is_killed_again_and_again(paths: PoolPaths) -> None:
    page = ControlPage.create_or_open(paths)
    last = 0
    for turn in range(25):
        with Engine() as writer:
            writer.start(hammer.write_catalogs, str(paths.dir), paths.pool)
            while not last:
                try:
                    last = page.read().sequence
                except NotFound:
                    time.sleep(0.001)
            time.sleep(random.Random(turn).uniform(0.001, 0.02))
            writer.kill()
            with pytest.raises(Died):
                writer.result()
        found = page.read()
        assert found.sequence >= last
        assert {g.done for g in found.generations} == {found.next}
        last = found.sequence
    page.close()


# Making and opening it


@pytest.mark.parametrize("step", ["allocate", "link_new"])
def test_a_sweep_while_it_is_made(paths: PoolPaths, interrupted: Callable[[str], None], step: str) -> None:
    """Another sidecar that starts takes the unfinished page for a dead one's; then it is made again."""
    interrupted(step)
    page = ControlPage.create_or_open(paths)
    assert page.current and [name.kind for name in paths.objects()] == ["ctl"]
    page.close()


def test_another_pools_page(paths: PoolPaths) -> None:
    """Somebody has given it a second name."""
    page = ControlPage.create_or_open(paths)
    page.write(Catalog(BOOT, pool="other"))
    with pytest.raises(Damaged, match="is the control page of pool 'other', which somebody has put under another name"):
        page.read()
    page.write(Catalog(BOOT, pool=paths.pool))
    assert page.read().pool == paths.pool
    page.close()


def test_many_make_it_at_once_and_there_is_one(paths: PoolPaths) -> None:
    from tests.never_wrong.forked import engines

    with engines(None, 4) as processes:
        for process in processes:
            process.start(hammer.create_pages, str(paths.dir), paths.pool, 30)
        for process in processes:
            process.result()
    assert [path.name for path in sorted(paths.dir.iterdir())] == [paths.control.name]
    assert os.stat(paths.control).st_mode & 0o777 == 0o600
    ControlPage.open(paths).close()


def test_an_empty_page(page: ControlPage) -> None:
    with pytest.raises(NotFound, match="just starting"):
        page.read()
    assert os.fstat(page.fd).st_blocks * 512 >= FILE_SIZE  # no SIGBUS or ENOSPC later


def test_sequence_numbers_go_on_with_a_successor(page: ControlPage, paths: PoolPaths) -> None:
    for mark in range(5):
        page.write(a_catalog(mark))
    successor = ControlPage.create_or_open(paths)
    assert successor.write(a_catalog(9)).sequence == 6
    assert page.read().sequence == 6
    assert page.write(a_catalog(10)).sequence == 7  # even if the first had gone on
    successor.close()


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"BALLAST\x02", "not a control page"),
        (0, bytes(8), "not a control page"),
        (8, struct.pack("<I", 2), "layout 2 and this is a Ballast of layout 1"),
        (8, struct.pack("<I", 0), "layout 0"),
        (12, struct.pack(">I", 0x01020304), "not a control page"),  # written by a machine of the other byte order
        (16, struct.pack("<Q", 0), "slots where none can be"),
        (16, struct.pack("<Q", 1 << 63), "slots where none can be"),
        (24, struct.pack("<Q", 1 << 40), "slots where none can be"),
    ],
)
def test_another_header_is_refused(page: ControlPage, paths: PoolPaths, offset: int, data: bytes, words: str) -> None:
    page.write(a_catalog(1))
    os.pwrite(page.fd, data, offset)
    with pytest.raises(Damaged, match=words):
        ControlPage.open(paths)


@pytest.mark.parametrize("size", [0, 1, 40, SLOT_OFFSET, FILE_SIZE - 1, FILE_SIZE + 1])
def test_another_size_is_refused(page: ControlPage, paths: PoolPaths, size: int) -> None:
    page.write(a_catalog(1))
    os.truncate(page.fd, size)
    with pytest.raises(Damaged, match=f"has {size} bytes"):
        ControlPage.open(paths)


def test_a_page_cut_short_while_it_is_open(page: ControlPage) -> None:
    page.write(a_catalog(1))
    os.truncate(page.fd, SLOT_OFFSET + 10)
    with pytest.raises(Damaged, match="too early"):
        page.read()  # an error, where a map would have been SIGBUS


def test_what_is_in_its_way(paths: PoolPaths, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="ballast serve"):
        ControlPage.open(paths)
    (tmp_path / "elsewhere").write_bytes(bytes(FILE_SIZE))
    paths.control.symlink_to(tmp_path / "elsewhere")
    for attempt in (ControlPage.open, ControlPage.create_or_open):
        with pytest.raises(Foreign, match="symbolic link"):
            attempt(paths)
    paths.control.unlink()
    os.mkfifo(paths.control)
    for attempt in (ControlPage.open, ControlPage.create_or_open):
        with pytest.raises(Foreign, match="not a plain file"):
            attempt(paths)
    paths.control.unlink()
    paths.control.mkdir()
    for attempt in (ControlPage.open, ControlPage.create_or_open):
        with pytest.raises(HandoffError):
            attempt(paths)


def test_a_page_that_others_may_write_to(page: ControlPage, paths: PoolPaths) -> None:
    for mode in (0o620, 0o602, 0o666):
        os.chmod(paths.control, mode)
        with pytest.raises(Foreign, match="writable by other users"):
            ControlPage.open(paths)


def test_a_page_removed_or_replaced_is_not_current(page: ControlPage, paths: PoolPaths) -> None:
    assert page.current
    os.rename(paths.control, paths.dir / "away")
    assert not page.current
    other = ControlPage.create_or_open(paths)
    assert other.current and not page.current
    other.close()


def test_a_full_catalog_is_refused_and_leaves_the_old(page: ControlPage) -> None:
    old = page.write(a_catalog(1))
    with pytest.raises(Damaged, match="full"):
        page.write(a_catalog(2, generations=5000))
    assert page.read() == old


# What a catalog may hold

generations = st.builds(
    Generation,
    number=st.integers(0, (1 << 62) - 1),
    model=st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,9}[A-Za-z0-9_-])?", fullmatch=True),
    kind=st.sampled_from(KINDS),
    state=st.sampled_from(STATES),
    total=st.integers(0, (1 << 62) - 1),
    done=st.integers(0, (1 << 62) - 1),
    shards=st.from_regex(r"[0-9a-f]{0,20}", fullmatch=True),
    reason=st.text(st.characters(exclude_categories=["Cs"])),
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    since=st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    lines = draw(st.lists(generations, max_size=5, unique_by=lambda g: g.number))
    top = max((g.number for g in lines), default=0)
    return Catalog(
        draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
        draw(st.integers(min(top + 1, (1 << 62) - 1), (1 << 62) - 1)),
        draw(st.integers(1, 1 << 60)),
        tuple(g for g in lines if g.number < (1 << 62) - 1),
    )


@given(catalogs())
@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
def test_a_catalog_comes_back_as_it_was(written: Catalog) -> None:
    assert decode(encode(written), written.sequence) == written


ROW = dataclasses.asdict(Generation(1, "m", "checkpoint", READY, 5, 5))


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "x"}, {"boot": BOOT + "0"}, {"boot": BOOT.upper()}, {"boot": None}, {"boot": 1}, {"boot": BOOT + "\n"},
        {"pool": 1}, {"pool": None},
        {"next": -1}, {"next": 1.0}, {"next": True}, {"next": "2"}, {"next": 1 << 62}, {"next": 1}, {"next": None},
        {"generations": {}}, {"generations": None}, {"generations": [1]}, {"generations": [[]]}, {"generations": [{}]},
        {"generations": [ROW, ROW]},
    ],
)  # fmt: skip
def test_a_catalog_that_makes_no_sense(change: dict[str, Any]) -> None:
    sound = {"boot": BOOT, "next": 2, "generations": [ROW]}
    decode(json.dumps(sound).encode(), 1)
    with pytest.raises(Damaged, match=r"does not make sense.*ballast purge"):
        decode(json.dumps(sound | change).encode(), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"number": -1}, {"number": 1.0}, {"number": True}, {"number": "1"}, {"number": 2}, {"number": None},
        {"model": ""}, {"model": "../x"}, {"model": "a b"}, {"model": 1}, {"model": None}, {"model": "x\x1b[2J"},
        {"kind": "other"}, {"kind": None}, {"kind": []}, {"state": "READY"}, {"state": ""}, {"state": {}},
        {"total": -1}, {"total": 1 << 62}, {"total": 1.5}, {"total": None}, {"done": -1}, {"done": "5"},
        {"shards": "xyz"}, {"shards": "-1"}, {"shards": "f" * (1 << 17)}, {"shards": 3}, {"shards": " f"}, {"shards": "f\n"},
        {"reason": 1}, {"reason": None}, {"key": []}, {"since": "now"}, {"since": True}, {"since": None},
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="does not make sense"):
        decode(json.dumps({"boot": BOOT, "next": 2, "generations": [ROW | change]}).encode(), 1)


def test_fields_of_a_later_version_are_ignored() -> None:
    sound = {"boot": BOOT, "next": 2, "generations": [ROW]}
    later = {**sound, "more": 1, "generations": [ROW | {"device": "cuda"}]}
    assert decode(json.dumps(later).encode(), 1) == decode(json.dumps(sound).encode(), 1)


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b"[" * 100_000, b"1" * 10_000])
def test_a_payload_that_is_no_catalog(payload: bytes) -> None:
    with pytest.raises(Damaged, match="does not make sense"):
        decode(payload, 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*ROW, "boot", "next", "generations"]), json_values)
def test_any_value_anywhere_is_taken_or_refused(key: str, value: Any) -> None:
    sound: dict[str, Any] = {"boot": BOOT, "next": 1 << 61, "generations": [dict(ROW)]}
    (sound["generations"][0] if key in ROW else sound)[key] = value
    try:
        found = decode(json.dumps(sound).encode(), 1)
    except Damaged:
        return
    assert decode(encode(found), 1) == found or value != value


# Questions to a catalog


def test_generations_of_a_model_newest_first() -> None:
    lines = (
        Generation(1, "a", "checkpoint", "retired"), Generation(2, "b", "checkpoint", "ready"),
        Generation(3, "a", "checkpoint", "ready"), Generation(7, "a", "checkpoint", "loading"),
    )  # fmt: skip
    now = Catalog(BOOT, 8, 1, lines)
    assert [g.number for g in now.of_model("a")] == [7, 3, 1]
    assert [g.number for g in now.of_model("a", READY)] == [3]
    assert now.models() == ["a", "b"]
    assert now.get(2) == lines[1] and now.get(5) is None
    assert now.without(3).get(3) is None
    later = now.with_generation(Generation(9, "c", "checkpoint", "ready"))
    assert later.next == 10 and [g.number for g in later.generations] == [1, 2, 3, 7, 9]
    replaced = now.with_generation(dataclasses.replace(lines[2], state="retired"))
    assert replaced.next == 8 and replaced.of_model("a", READY) == []


def test_shards_that_are_done() -> None:
    generation = Generation(1, "m", "checkpoint", "loading", shards="5")
    assert [generation.shard_done(index) for index in range(4)] == [True, False, True, False]
    assert not dataclasses.replace(generation, shards="").shard_done(0)
    assert dataclasses.replace(generation, shards=f"{1 << 300:x}").shard_done(300)
