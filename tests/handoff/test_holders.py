"""Holders of device memory: their records, their pages, and that nobody takes a dead one's word."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import holder, manifest, posix
from engine_shim.handoff.errors import Damaged, DeviceError, Foreign, HandoffError, NoRoom, NotFound
from engine_shim.handoff.holder import Page, Token, Watch
from engine_shim.handoff.manifest import DeviceCopy, Window, device_row, parse_device
from engine_shim.handoff.names import PoolPaths, new_id

A, B = (f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "ab")
SEGMENTS = (1000, 2000)


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    return PoolPaths("p", tmp_path)


@pytest.fixture
def token(paths: PoolPaths) -> Iterator[Token]:
    token = Token(paths, [A, B])
    yield token
    token.release()
    assert not paths.objects()


def copy(identifier: str, gpu: str = A) -> DeviceCopy:
    windows = tuple(Window(bytes([index]) * manifest.HANDLE_BYTES, size + 512, 512) for index, size in enumerate(SEGMENTS))
    return DeviceCopy(gpu, identifier, windows)


def test_a_holder_says_who_it_is_and_what_it_holds(paths: PoolPaths, token: Token) -> None:
    [one] = holder.alive(paths)
    assert (one.identifier, one.gpus, one.pid, one.settled) == (token.identifier, (A, B), os.getpid(), False)
    token.settle()
    assert [one.settled for one in holder.alive(paths)] == [True]
    page = Page(3, (copy(token.identifier),), {B: "no room"}, (A,))
    token.write(page)
    read = holder.read(paths, token.identifier, 3, SEGMENTS)
    assert (read.copies, read.lacking, read.held, read.gpus) == (page.copies, page.lacking, (A,), (A,))
    assert holder.read(paths, token.identifier, 3).copies == (), "without the manifest's sizes no copy can be checked"
    assert [(number, found.gpus) for number, found in holder.pages(paths)] == [(3, (A,))]
    token.write(Page(3))
    assert list(holder.pages(paths)) == []
    with pytest.raises(NotFound):
        holder.read(paths, token.identifier, 3)


def test_a_watch_sees_the_death_although_the_record_is_gone(paths: PoolPaths) -> None:
    token = Token(paths, [A])
    watch = Watch(paths, token.identifier)
    assert watch.alive
    other = Token(paths, [B])
    token.release()
    assert [one.identifier for one in holder.alive(paths)] == [other.identifier]
    other.release()
    assert not watch.alive
    watch.close()
    with pytest.raises(NotFound):
        Watch(paths, token.identifier)


def test_a_record_that_others_may_write_to_is_not_watched(paths: PoolPaths, token: Token) -> None:
    paths.holder(token.identifier).chmod(0o666)
    with pytest.raises(Foreign, match="run holder and engine as one user"):
        Watch(paths, token.identifier)


def test_what_the_dead_have_left_is_swept_and_nothing_else(paths: PoolPaths, token: Token) -> None:
    token.write(Page(1, held=(A,)))
    dead = Token(paths, [B])
    dead.write(Page(1, held=(B,)))
    os.close(dead._fd)
    assert [one.identifier for one in holder.alive(paths)] == [token.identifier]
    assert [page.held for _, page in holder.pages(paths)] == [(A,)]
    assert holder.sweep(paths) == 2 and holder.sweep(paths) == 0
    assert {name.file.split(".")[2] for name in paths.objects()} == {token.identifier}


def test_records_that_make_no_sense(paths: PoolPaths, token: Token, tmp_path: Path) -> None:
    """A locked one, a stranger's, one under construction: no holder that anybody could use. The sweep leaves the living."""
    locked = []
    for data in (b"x", b"[]", b'{"gpus": 1}', b'{"gpus": [], "pid": "x", "host": "", "since": 0}'):
        path = paths.holder(new_id())
        fd = posix.create(path)
        posix.write_exactly(fd, data, 0, path)
        assert posix.try_lock_byte(fd, 0)
        locked.append((fd, path))
    link = paths.holder(new_id())
    link.symlink_to(tmp_path / "precious")
    assert [one.identifier for one in holder.alive(paths)] == [token.identifier]
    assert holder.sweep(paths) == 0
    for fd, path in locked:
        os.close(fd)
        path.unlink()
    link.unlink()


def test_pages_that_make_no_sense(paths: PoolPaths, token: Token) -> None:
    sound = {"copies": [device_row(copy(token.identifier))], "lacking": {}, "held": []}
    path = paths.copies(token.identifier, 1)

    def read(document: Any) -> Page:
        path.write_bytes(json.dumps(document).encode())
        path.chmod(0o600)
        return holder.read(paths, token.identifier, 1, SEGMENTS)

    assert read(sound).copies == (copy(token.identifier),)
    wrong: list[Any] = [
        [], {}, {**sound, "lacking": []}, {**sound, "held": None}, {**sound, "copies": [1]},
        {**sound, "copies": [device_row(copy(new_id()))]},
    ]  # fmt: skip
    for document in wrong:
        with pytest.raises(Damaged, match="restart the holder"):
            read(document)
    path.write_text("x")
    assert list(holder.pages(paths)) == []


@pytest.mark.parametrize(
    "change",
    [{"gpu": 1}, {"gpu": "GPU-0"}, {"holder": 1}, {"holder": "x"}, {"segments": {}}, {"segments": []},
     {"segments": [["AAAA", 2000, 0], ["AAAA", 3000, 0]]}, {"segments": [["!", 2000, 0]] * 2}],
)  # fmt: skip
def test_a_copy_that_breaks_a_rule(change: dict[str, Any]) -> None:
    row = device_row(copy("0" * 16))
    assert parse_device(row, SEGMENTS) == copy("0" * 16)
    with pytest.raises(ValueError):
        parse_device({**row, **change}, SEGMENTS)


@pytest.mark.parametrize("place", [(999 + 512, 512), (-1, 0), (1512, -1), (1512.0, 512)])
def test_a_window_that_is_too_small(place: tuple[int, int]) -> None:
    row = device_row(copy("0" * 16))
    row["segments"][0][1:] = place
    with pytest.raises(ValueError, match="place of a segment"):
        parse_device(row, SEGMENTS)


def test_a_sweep_between_making_and_locking(paths: PoolPaths, interrupted: Callable[[str], None]) -> None:
    for step in ("try_lock_byte", "rename"):
        interrupted(step)
        token = Token(paths, [A])
        assert [one.identifier for one in holder.alive(paths)] == [token.identifier]
        token.release()
        assert not paths.objects()


def test_no_room(paths: PoolPaths, token: Token, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise NoRoom("full")

    before = paths.objects()
    monkeypatch.setattr(posix, "write_exactly", full)
    with pytest.raises(NoRoom):
        token.write(Page(1, held=(A,)))
    with pytest.raises(NoRoom):
        Token(paths, [A])
    assert paths.objects() == before


@pytest.mark.parametrize("error", [HandoffError("too many open files"), Foreign("a stranger's")])
def test_a_holder_that_cannot_be_looked_at(
    paths: PoolPaths, token: Token, monkeypatch: pytest.MonkeyPatch, error: HandoffError
) -> None:
    """For want of a descriptor it may live, and its pages stay; a stranger's record is none."""
    token.write(Page(1, held=(A,)))

    def refused(*_: Any, **__: Any) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(posix, "open_existing", refused)
        assert list(holder.alive(paths)) == []
        assert holder.sweep(paths) == isinstance(error, Foreign)
    assert paths.copies(token.identifier, 1).exists() == (not isinstance(error, Foreign))


def test_a_page_that_is_a_strangers_to_remove(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.copies(new_id(), 1).touch(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(PermissionError(1, "no")))
        assert holder.sweep(paths) == 0
    assert holder.sweep(paths) == 1


def test_the_drivers_code_goes_with_its_error() -> None:
    assert DeviceError("it will not", 700).code == 700 and DeviceError("it was not asked").code == 0


def test_a_watch_whose_descriptor_was_closed_by_others(
    paths: PoolPaths, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the record anew: an engine must not end because a program in it has closed what it does not know."""
    watch = Watch(paths, token.identifier)
    own = os.open("/dev/null", os.O_RDONLY)
    os.dup2(own, watch._fd)
    taken = watch._fd
    with monkeypatch.context() as patch:

        def refuses(*_: Any) -> int:
            raise HandoffError("no descriptor left")

        patch.setattr(posix, "open_existing", refuses)
        assert watch.alive, "who cannot look has seen nothing"
    assert watch.alive and watch._fd != taken
    os.close(watch._fd)
    other = Token(paths, [A])
    paths.holder(token.identifier).rename(paths.dir / "aside")
    assert not watch.alive, "the record is gone"
    os.link(paths.holder(other.identifier), paths.holder(token.identifier))
    assert not watch.alive, "another one's record"
    os.unlink(paths.holder(token.identifier))
    (paths.dir / "aside").rename(paths.holder(token.identifier))
    other.release()
    watch.close()
    assert os.path.samestat(os.fstat(taken), os.fstat(own))
    for number in (taken, own):
        os.close(number)
