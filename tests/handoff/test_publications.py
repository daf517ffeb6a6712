"""A publication under construction: whole or not there, living or swept, and never larger than what there is room for."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_shim.handoff import manifest, posix, publication
from engine_shim.handoff.errors import Foreign, HandoffError, NameRefused, NoRoom, NotFound
from engine_shim.handoff.hugepages import HugePages
from engine_shim.handoff.manifest import ALIGNMENT, SEGMENT_ALIGNMENT
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication, alive
from engine_shim.handoff.room import Room, spare
from engine_shim.modules import TensorStorage
from tests.processes import die_with_parent


@pytest.fixture
def paths(empty_pool: PoolPaths) -> PoolPaths:
    return empty_pool


def storage(size: int, seed: int = 0) -> TensorStorage:
    generator = torch.Generator().manual_seed(seed)
    return TensorStorage(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).untyped_storage())


def data(given: TensorStorage) -> bytes:
    return b"".join(bytes(piece) for piece in given.pieces())


def files(paths: PoolPaths) -> list[str]:
    return sorted(name.file for name in paths.objects() if name.kind == "publication")


def test_what_was_added_is_there_once_committed(paths: PoolPaths) -> None:
    given = [storage(size, size) for size in (5000, 0, 1, 300_000, 17)]
    with Publication(paths, "org/m") as publishing:
        rows = [publishing.add(item) for item in given]
        assert rows == list(range(5))
        assert all(name.endswith(".tmp") for name in files(paths))
        publishing.commit({"slots": [[1]]}, {"torch": "x"}, "k")
        whole = files(paths)
        assert whole == [
            paths.publication(publishing.identifier).name,
            *(f"{whole[0]}.w{i}" for i in range(len(whole) - 1)),
        ]
    assert files(paths) == whole
    contents = manifest.decode((paths.dir / whole[0]).read_bytes(), paths.dir / whole[0])
    assert (contents.model, contents.kind, contents.complete) == ("org/m", "engine", False)
    assert contents.engine == {"torch": "x", "key": "k"} and contents.state == {"slots": [[1]]}
    for row, item in zip(contents.tensors, given, strict=True):
        segment = paths.publication_segment(publishing.identifier, row.segment)
        assert row.offset % ALIGNMENT == 0
        assert segment.read_bytes()[row.offset : row.offset + row.nbytes] == data(item)
        assert segment.stat().st_size == contents.segments[row.segment]
        assert segment.stat().st_size % SEGMENT_ALIGNMENT == 0
        assert segment.stat().st_mode & 0o777 == 0o400
        assert segment.stat().st_blocks * 512 >= segment.stat().st_size  # every page is there: no SIGBUS later


def test_segments_are_closed_when_they_are_large(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "SEGMENT_BYTES", 10_000)
    with Publication(paths, "m") as publishing:
        for size in (4000, 4000, 4000, 50_000, 10, 10):
            publishing.add(storage(size))
        publishing.commit({}, {}, "k")
    contents = manifest.decode(paths.publication(publishing.identifier).read_bytes(), Path("x"))
    assert [row.segment for row in contents.tensors] == [0, 0, 1, 2, 3, 3]


def test_room_that_is_reserved(paths: PoolPaths) -> None:
    """Written through a map by the engine itself; after `seal` what it writes is its own."""
    with Publication(paths, "m") as publishing:
        places = publishing.reserve([5000, 100_000])
        for place in places:
            place.buffer[:5000] = bytes([place.row + 1]) * 5000
        publishing.seal()
        for place in places:
            assert place.buffer[0] == place.row + 1
            place.buffer[:5000] = b"\xff" * 5000
        publishing.commit({}, {}, "k")
    contents = manifest.decode(paths.publication(publishing.identifier).read_bytes(), Path("x"))
    for row, place in zip(contents.tensors, places, strict=True):
        bytes_there = paths.publication_segment(publishing.identifier, row.segment).read_bytes()
        assert bytes_there[row.offset : row.offset + 5000] == bytes([place.row + 1]) * 5000


def test_a_process_that_is_forked_meanwhile(paths: PoolPaths) -> None:
    """What it writes is its own, it removes nothing, and it does not hold its parent's locks."""
    with Publication(paths, "m") as publishing:
        (place,) = publishing.reserve([100_000])
        place.buffer[:5000] = b"a" * 5000
        parent, child = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            place.buffer[:5000] = b"b" * 5000
            publishing.close()
            child.send(sum(os.readlink(f"/proc/self/fd/{fd}").count(paths.pool + ".in.") for fd in open_files()))
            child.poll(10)
            os._exit(0)
        assert parent.recv() == 0
        assert bytes(place.buffer[:5000]) == b"a" * 5000
        publishing.commit({}, {}, "k")
        parent.send(None)
        os.waitpid(pid, 0)
    segment = paths.publication_segment(publishing.identifier, 0).read_bytes()
    assert b"b" not in segment and segment.count(b"a") == 5000


def open_files() -> list[str]:
    """This process's descriptors, without the one that looks."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_room_that_nobody_looks_at_any_more(paths: PoolPaths) -> None:
    """Its shared map goes; the private one that the engine has instead is filled, and holds what was written."""

    def shared() -> int:
        return sum(publishing.identifier in line and "rw-s" in line for line in open("/proc/self/maps"))

    with Publication(paths, "m") as publishing:
        [place] = publishing.reserve([100_000])
        place.buffer[:3] = b"abc"
        assert shared() == 1
        buffer, offset = publishing.view(place.row)
        del place
        publishing.seal()
        for thread in threading.enumerate():
            if thread.name == "ballast-maps":
                thread.join(10)
        assert shared() == 0
        buffer[offset] = ord("x")
        assert bytes(buffer[offset : offset + 3]) == b"xbc"
        publishing.commit({}, {}, "k")
    assert paths.publication_segment(publishing.identifier, 0).read_bytes()[:3] == b"abc"


@pytest.mark.parametrize("when", ["empty", "added", "finished", "no pool", "error"])
def test_what_is_not_committed_is_gone(paths: PoolPaths, when: str) -> None:
    with pytest.raises((RuntimeError, NotFound)), Publication(paths, "m") as publishing:
        if when != "empty":
            publishing.add(storage(5000))
            publishing.reserve([100])
        if when == "finished":
            publishing.finish()
        if when == "no pool":
            paths.control.rename(paths.control.with_name("ballast-away"))
            try:
                publishing.commit({}, {}, "k")
            finally:
                paths.control.with_name("ballast-away").rename(paths.control)
        raise RuntimeError
    assert not files(paths)


def test_no_room(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before it is known to fit."""
    monkeypatch.setattr(publication, "room", lambda _: Room(paths.dir, 4000, None, None))
    monkeypatch.setattr(publication, "spare", lambda _: 0)
    with Publication(paths, "m") as publishing:
        publishing.add(storage(3000))
        with pytest.raises(NoRoom, match=r"publishing 'm' needs 4\.88 KiB"):
            publishing.add(storage(5000))
        before = files(paths)
        with pytest.raises(NoRoom):
            publishing.reserve([3000, 3000])
        assert files(paths) == before


def test_many_small_ones(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small tensors hold an engine up only if each asks the whole machine for room."""
    asked = []

    def counted(directory: Path) -> Room:
        asked.append(directory)
        return Room(directory, spare(directory) + (40 << 20), None, None)

    monkeypatch.setattr(publication, "room", counted)
    with Publication(paths, "m") as publishing:
        for _ in range(3000):
            publishing.add(storage(100))
        assert len(asked) == 1
        with pytest.raises(NoRoom):
            publishing.add(storage((40 << 20) + 1))
        large = storage(10 << 20)
        for _ in range(4):
            publishing.add(large)
        assert 3 <= len(asked) <= 5


def test_room_is_left_for_engines_own_use(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM does not start where /dev/shm has no 160 MiB for its own channels: publishing leaves them to the next start."""
    assert paths.dir == Path("/dev/shm") and spare(paths.dir) > 160 << 20
    monkeypatch.setattr(publication, "room", lambda _: Room(paths.dir, spare(paths.dir) + 4000, None, None))
    with Publication(paths, "m") as publishing:
        publishing.add(storage(3000))
        with pytest.raises(NoRoom, match=r"publishing 'm' needs 4\.88 KiB, with 256\.00 MiB left for engines' own use, and"):
            publishing.add(storage(5000))
        with pytest.raises(NoRoom):
            publishing.reserve([3000, 3000])
        publishing.reserve([3000])
    if os.stat(tmp_path).st_dev != os.stat("/dev/shm").st_dev:
        assert spare(tmp_path) == 0  # engines have nothing there
        assert spare(tmp_path / "gone") == 0
    assert not files(paths)


@pytest.mark.parametrize("step", ["try_lock_byte", "same_file"])
def test_a_sweep_between_making_and_locking(paths: PoolPaths, interrupted: Callable[[str], None], step: str) -> None:
    with Publication(paths, "m") as publishing:
        interrupted(step)
        publishing.add(storage(10))
        assert len(files(paths)) == 1 and alive(paths.dir / files(paths)[0])
        publishing.commit({}, {}, "k")
    assert len(files(paths)) == 2


def test_reserved_in_several_segments(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "SEGMENT_BYTES", 10_000)
    with Publication(paths, "m") as publishing:
        places = publishing.reserve([4000, 4000, 4000])
        assert len(files(paths)) == 2
        places[2].buffer[:3] = b"abc"
        assert publishing.reserve([]) == []
        publishing.finish()
        seen = [publishing.view(place.row) for place in places]
        assert seen[0][0] is seen[1][0] is not seen[2][0], "one map for each segment"
        buffer, offset = seen[2]
        assert bytes(buffer[offset : offset + 3]) == b"abc"
        publishing.commit({}, {}, "k")


@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
def test_every_page_of_reserved_room_is_there(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch, huge: bool) -> None:
    """Whatever the kernel gives, and however many segments: a page that had to be made later could kill the engine."""
    monkeypatch.setattr(HugePages, "_asked_again", 0.0 if huge else time.monotonic() + 3600)
    monkeypatch.setattr(publication, "_ALLOCATED", 1 << 20)
    monkeypatch.setattr(publication, "_SMALLEST", 8 << 20)
    with Publication(paths, "m") as publishing:
        places = publishing.reserve([5 << 20, 10, 4 << 20, 30 << 20, 3 << 20, 5 << 20])
        segments = [paths.dir / name for name in files(paths)]
        assert len(segments) == 4 and [len(place.buffer) for place in places][3] == 30 << 20
        for path in segments:
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0, path


def test_a_file_system_that_fills_up(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pages are made, by several threads: nothing of it stays."""
    allocate = posix.allocate

    def full(fd: int, offset: int, length: int, path: Path) -> None:
        if offset >= 3 << 20:
            raise NoRoom("the file system is full")
        allocate(fd, offset, length, path)

    monkeypatch.setattr(HugePages, "_asked_again", time.monotonic() + 3600)
    monkeypatch.setattr(publication, "_ALLOCATED", 1 << 20)
    monkeypatch.setattr(posix, "allocate", full)
    with pytest.raises(NoRoom, match="is full"), Publication(paths, "m") as publishing:
        publishing.reserve([8 << 20, 8 << 20])
    assert not files(paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another: run the tests as root")
def test_nobody_publishes_to_anothers_pool(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(paths.control, 64001, 64001)
    monkeypatch.setenv("BALLAST_TRUST", "64001")
    with pytest.raises(Foreign, match="belongs to another user, who alone publishes to it"):
        Publication(paths, "m")
    assert not files(paths)


def test_odd_names(paths: PoolPaths) -> None:
    with pytest.raises(NameRefused):
        Publication(paths, "../m")


def test_whether_its_publisher_lives(paths: PoolPaths) -> None:
    with Publication(paths, "m") as publishing:
        publishing.add(storage(10))
        [name] = files(paths)
        assert alive(paths.dir / name) is True
        publishing.commit({}, {}, "k")
        assert all(alive(paths.dir / name) for name in files(paths))
    assert [alive(paths.dir / name) for name in files(paths)] == [False, False]
    assert alive(paths.dir / "absent") is None


def test_a_state_that_is_no_json(paths: PoolPaths) -> None:
    with pytest.raises(TypeError), Publication(paths, "m") as publishing:
        publishing.add(storage(10))
        publishing.commit({"slots": object()}, {}, "k")
    assert not files(paths)


def test_files_that_were_closed_by_others(paths: PoolPaths, tmp_path: Path) -> None:
    """Their numbers are another program's files then: those are not written, not mapped, not closed."""
    own = tmp_path / "own"
    own.write_bytes(bytes(SEGMENT_ALIGNMENT))
    with own.open("r+b") as file, Publication(paths, "m") as publishing:
        [place] = publishing.reserve([5000])
        place.buffer[0] = 7
        publishing.add(storage(5000))
        taken = [fd for fd, _, _ in publishing._files]
        for number in taken:
            os.dup2(file.fileno(), number)
        for step in (lambda: publishing.add(storage(10)), lambda: publishing.view(0), publishing.seal, publishing.finish):
            with pytest.raises(HandoffError, match="closed by this program meanwhile"):
                step()
        publishing.close()
        assert place.buffer[0] == 7 and not files(paths) and not any(own.read_bytes())
        for number in taken:
            assert posix.still(number, posix.inode(file.fileno()))
            os.close(number)


def test_files_that_are_not_ours_to_remove_any_more(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after privileges were given up: they are let go of, without their locks, for a sweep to take."""
    publishing = Publication(paths, "m")
    publishing.add(storage(10))
    [(fd, path, _)] = publishing._files

    def foreign(path: Path) -> bool:
        raise Foreign(f"{path} is another user's")

    with monkeypatch.context() as patch:
        patch.setattr(posix, "remove", foreign)
        publishing.close()
    assert path.exists() and alive(path) is False
    path.unlink()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
