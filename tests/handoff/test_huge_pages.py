"""Huge pages are asked for while they come quickly, and never cost a start more than they bring."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine_shim.handoff import hugepages, maps, posix
from engine_shim.handoff.hugepages import HugePages
from engine_shim.handoff.maps import HUGE_PAGE

COUNT = 64
SIZE = COUNT * HUGE_PAGE


class Kernel:
    """Says yes at once, or after the seconds that a huge page takes where others' pages have to be moved."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked: list[int] = []

    def make_huge(self, buffer: maps.Buffer, offset: int, length: int) -> bool:
        pages = range(offset // HUGE_PAGE, (offset + length) // HUGE_PAGE)
        self.asked += pages
        time.sleep(self.seconds * len(pages))
        return True


@pytest.fixture
def segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HugePages:
    monkeypatch.setattr(HugePages, "_asked_again", 0.0)
    path = tmp_path / "segment"
    fd = posix.create(path)
    os.ftruncate(fd, SIZE)
    return HugePages(fd, maps.shared(fd, SIZE), path)


def test_every_page_is_asked_for_once(segment: HugePages, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(maps, "make_huge", kernel.make_huge)
    segment.make(5 * HUGE_PAGE + 1, 20 * HUGE_PAGE)
    assert kernel.asked == list(range(5, 20))
    segment.make(20 * HUGE_PAGE, SIZE)
    segment.make(0, SIZE)
    assert sorted(set(kernel.asked)) == list(range(COUNT))
    before = len(kernel.asked)
    segment.make(0, SIZE)
    assert len(kernel.asked) == before


def test_a_kernel_that_has_to_search_is_not_asked_on(segment: HugePages, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(seconds=0.01)
    monkeypatch.setattr(maps, "make_huge", kernel.make_huge)
    segment.make(0, SIZE)
    assert len(kernel.asked) <= 8
    asked = len(kernel.asked)
    segment.make(0, SIZE)  # nor for the next segment
    assert len(kernel.asked) == asked
    # Some time later memory may have become free.
    later = time.monotonic() + hugepages.REST
    monkeypatch.setattr(hugepages.time, "monotonic", lambda: later)
    kernel.seconds = 0.0
    segment.make(0, SIZE)
    assert len(kernel.asked) == COUNT


def test_without_a_map_pages_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(maps, "make_huge", kernel.make_huge)
    fd = posix.create(tmp_path / "segment")
    HugePages(fd, None, tmp_path / "segment").make(0, SIZE)
    assert kernel.asked == []
    os.close(fd)
