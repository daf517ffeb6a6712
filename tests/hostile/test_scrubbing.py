"""A bit that flips in published memory is found, named, and served to nobody from then on."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import engine_shim
from engine_shim.handoff import attachment, manifest
from engine_shim.handoff.catalog import ENGINE, READY, RETIRED, Generation
from engine_shim.handoff.errors import Damaged, HandoffError, NameRefused
from sidecar import history, loader, status
from sidecar.pool import damaged
from sidecar.scrub import Scrubber, parse_duration
from tests.checkpoints import Checkpoint, entry
from tests.generations.parts import checkpoint
from tests.generations.states import content, publish
from tests.never_wrong.loading import Loading
from tests.processes import Sidecar

SIZE = 300_000


def flip(path: Path, bit: int) -> None:
    """Flips one bit of a published file, as a fault of memory would."""
    mode = os.stat(path).st_mode
    os.chmod(path, 0o600)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    os.chmod(path, mode)


def test_any_single_bit_of_a_segment_is_found(filled: Loading, tmp_path: Path) -> None:
    """Wherever it is: in a tensor, which is named, or between two, or behind the last."""
    tensors = {f"t{n}": entry("F32", (40 * n + 1,), n) for n in range(4)}
    Checkpoint(tensors).write(tmp_path / "m.safetensors")
    filled.load(tmp_path / "m.safetensors")
    path = filled.paths.segment(1, 0)
    contents = manifest.read(filled.paths.manifest(1))
    assert not list(damaged(filled.paths, contents))
    end = max(row.offset + row.nbytes for row in contents.tensors)
    dice = random.Random(4)
    bits = [0, 8 * end - 1, 8 * end, 8 * path.stat().st_size - 1]
    bits += [dice.randrange(8 * end + 4096) for _ in range(60)] + [dice.randrange(8 * path.stat().st_size) for _ in range(20)]
    for bit in bits:
        flip(path, bit)
        [(what, segment)] = damaged(filled.paths, contents)
        flip(path, bit)
        assert segment == 0
        inside = [row.name for row in contents.tensors if row.offset <= bit // 8 < row.offset + row.nbytes]
        assert what == inside[0] if inside else "where no tensor lies" in what
    assert not list(damaged(filled.paths, contents))


def test_a_damaged_generation_is_served_no_more(
    filled: Loading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled.load(checkpoint(tmp_path / "m", 1, SIZE))
    filled.load(checkpoint(tmp_path / "m", 2, SIZE))
    assert filled.pool.adopt_publication(publish(filled.paths, "m", "k"))
    found: list[Generation] = []
    scrubber = Scrubber(filled.pool, 3600, found.append)
    assert scrubber.round() == 0 and not found
    token = attachment.Token.take(filled.paths, 2, "m")
    flip(filled.paths.segment(2, 0), 12345)
    assert scrubber.round() == 1
    assert [g.number for g in found] == [2]
    row = filled.pool.catalog.get(2)
    assert row is not None and row.state == RETIRED and row.reason == "damaged in memory: t in segment 0"
    for part in ("m, generation 2, is damaged in memory and is served no more", "t in segment 0", f"(pid {os.getpid()})"):
        assert part in caplog.text
    with engine_shim.open("m") as opened:
        assert bytes(opened.tensors["t"].numpy().tobytes()) == content(1, SIZE), "the one before it is intact"
    assert scrubber.round() == 0
    token.release()
    [state] = filled.pool.ready("m", ENGINE)
    flip(filled.paths.segment(state.number, 0), 7)
    assert scrubber.round() == 1 and not filled.pool.ready("m", ENGINE)


def test_who_cannot_look_has_found_no_damage(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor, or address space for a buffer, nothing is known of the bytes, by the scrubber or `verify`."""
    filled.load(checkpoint(tmp_path / "m", 1, SIZE))
    really = os.open

    def no_descriptor(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".w0"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, *more, **named)

    def no_buffer(_: threading.local) -> memoryview:
        raise HandoffError("there is no address space")

    for what, lacking, why in ((os, no_descriptor, "too many open files"), (loader, no_buffer, "no address space")):
        with monkeypatch.context() as patch:
            patch.setattr(what, "open" if what is os else "_buffer", lacking)
            with pytest.raises(HandoffError, match=why):
                Scrubber(filled.pool, 3600, lambda _: None).round()
            with pytest.raises(HandoffError, match=why):
                list(status.verify(filled.paths))
        assert [g.state for g in filled.pool.catalog.generations] == [READY] and not list(attachment.alive(filled.paths))
    path = filled.paths.segment(1, 0)
    with path.open("rb") as file, pytest.raises(Damaged, match="ends too early"):
        list(loader.segment_digests(file.fileno(), [(0, path.stat().st_size + 1)], path, threading.local()))


def test_segments_that_a_rollback_shares_fall_together(filled: Loading, tmp_path: Path) -> None:
    filled.load(checkpoint(tmp_path / "m", 1, SIZE))
    filled.load(checkpoint(tmp_path / "m", 2, SIZE))
    made = history.rollback(filled.pool, "m")
    filled.pool.collect()
    flip(filled.paths.segment(made.number, 0), 99)
    assert Scrubber(filled.pool, 3600, lambda _: None).round() == 1
    assert [g.number for g in filled.pool.ready("m")] == [2]


def test_it_is_no_faster_than_it_may_be_and_stops_at_once(filled: Loading, tmp_path: Path) -> None:
    filled.load(checkpoint(tmp_path / "m", 1, 12 << 20))
    slow = Scrubber(filled.pool, 0.01, lambda _: None, rate=1 << 20)
    began = time.monotonic()
    slow.start()
    time.sleep(0.5)
    assert [record.engine for record in attachment.alive(filled.paths)] == ["ballast scrub"], "12 MiB take it 12 s"
    assert slow.stop(5)
    assert time.monotonic() - began < 5 and not list(attachment.alive(filled.paths))
    began = time.monotonic()
    assert Scrubber(filled.pool, 3600, lambda _: None, rate=24 << 20).round() == 0
    assert time.monotonic() - began > 0.3


@pytest.mark.slow
def test_a_sidecar_replaces_what_is_damaged(pool_name: str, tmp_path: Path) -> None:
    with Sidecar(pool_name, checkpoint(tmp_path / "m", 1, SIZE), args=["--scrub", "0.3s"]) as sidecar:
        number = sidecar.ready("m").number
        flip(sidecar.paths.segment(number, 0), 8 * 1000)
        new = sidecar.ready("m", above=number).number
        assert "t in segment 0" in sidecar.says("is damaged in memory")
        assert sidecar.paths.segment(new, 0).read_bytes()[:SIZE] == content(1, SIZE)
        assert not sidecar.paths.segment(number, 0).exists()


@pytest.mark.parametrize(("text", "seconds"), [("6h", 21600), ("90", 90), ("30m", 1800), ("1.5d", 129600), ("0.2s", 0.2)])
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "h", "-1h", "6 hours", "inf"])
def test_no_times(text: str) -> None:
    with pytest.raises(NameRefused, match="is not a time"):
        parse_duration(text)


def test_a_fault_of_a_round_does_not_end_it(filled: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = threading.Event()
    count = 0

    def fails(self: Scrubber) -> int:
        nonlocal count
        count += 1
        if count == 3:
            rounds.set()
        raise OSError("no descriptors left")

    monkeypatch.setattr(Scrubber, "round", fails)
    scrubber = Scrubber(filled.pool, 0.01, lambda _: None)
    scrubber.start()
    assert rounds.wait(10)
    assert scrubber.stop(5)
