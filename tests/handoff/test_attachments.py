"""Who holds a generation, and whether he lives: the kernel says so, and nobody else."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import posix
from engine_shim.handoff.attachment import Record, Token, alive, sweep
from engine_shim.handoff.errors import HandoffError, NoRoom
from engine_shim.handoff.names import PoolPaths, new_id, temporary
from tests.handoff import hammer
from tests.never_wrong.forked import Engine, engines


@pytest.fixture
def paths(pool_paths: PoolPaths) -> Iterator[PoolPaths]:
    yield pool_paths
    sweep(pool_paths)


def records(paths: PoolPaths) -> list[Path]:
    return [paths.dir / name.file for name in paths.objects() if name.kind == "attachment"]


def take(engine: Engine, paths: PoolPaths, generation: int = 1, model: str = "m") -> str:
    identifier: str = engine(hammer.take, paths.pool, str(paths.dir), generation, model)
    return identifier


def test_a_record_says_who_holds_what(paths: PoolPaths) -> None:
    before = time.time()
    with Engine() as engine:
        identifier = take(engine, paths, 7, "org/model")
        [record] = alive(paths)
        assert (record.generation, record.model, record.engine, record.rank) == (7, "org/model", "test", 3)
        assert (record.pid, record.identifier, record.residency) == (engine.pid, identifier, "host")
        assert before - 1 < record.since < time.time() + 1 and record.host and record.command
        assert records(paths) == [paths.attachment(identifier)]
        assert os.stat(paths.attachment(identifier)).st_mode & 0o777 == 0o600
        assert sweep(paths) == 0  # not of the living
        engine(hammer.release)
        assert not records(paths) and not list(alive(paths))


def test_a_note_is_written_while_the_record_stays_held(paths: PoolPaths) -> None:
    """While notes are written, another process sees a record of the living at every look, and a sweep takes none."""
    token = Token.take(paths, 7, "m", "an engine", 3)
    with Engine() as watcher:
        watcher.start(hammer.watch, paths.pool, str(paths.dir), 0.5)
        count = 0
        while watcher.busy(0):
            token.tell("a note, a long one, " * (count % 3) + str(count))
            count += 1
        looks, seen = watcher.result()
    assert count > 10 and looks > 10
    assert set(seen) <= {7, -1} and 7 in seen, "-1 is a record that is just being written"
    [record] = alive(paths)
    assert record.note.endswith(str(count - 1)) and record.rank == 3 and record.identifier == token.record.identifier
    assert sweep(paths) == 0
    token.release()
    token.tell("too late")
    assert not records(paths)


def test_kill_9(paths: PoolPaths) -> None:
    with engines(None, 3) as processes:
        for number, engine in enumerate(processes):
            take(engine, paths, number)
        assert sorted(record.generation for record in alive(paths)) == [0, 1, 2]
        processes[1].kill()
        assert sorted(record.generation for record in alive(paths)) == [0, 2]
        assert len(records(paths)) == 3
        assert sweep(paths) == 1
        assert len(records(paths)) == 2
        assert sweep(paths) == 0


def test_a_stopped_process_lives(paths: PoolPaths) -> None:
    with Engine() as engine:
        take(engine, paths)
        os.kill(engine.pid, signal.SIGSTOP)
        assert len(list(alive(paths))) == 1 and sweep(paths) == 0
        engine.kill()
        assert not list(alive(paths))


def test_a_forked_child_holds_what_its_parent_held(paths: PoolPaths) -> None:
    with Engine() as engine:
        take(engine, paths)
        child = engine(hammer.fork_and_end)
        engine.kill()
        assert len(list(alive(paths))) == 1 and sweep(paths) == 0
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while list(alive(paths)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert sweep(paths) == 1


def test_a_forked_child_lets_go_of_its_own_hold_only(paths: PoolPaths) -> None:
    with Engine() as engine:
        take(engine, paths)
        engine(hammer.fork_and_release)
        assert len(list(alive(paths))) == 1 and len(records(paths)) == 1


def test_release_twice(paths: PoolPaths) -> None:
    token = Token.take(paths, 1, "m")
    assert len(list(alive(paths))) == 1
    token.release()
    token.release()
    assert not records(paths)


def test_release_after_somebody_removed_the_record(paths: PoolPaths) -> None:
    token = Token.take(paths, 1, "m")
    records(paths)[0].unlink()
    token.release()
    assert not records(paths)


def test_one_process_may_hold_many(paths: PoolPaths) -> None:
    tokens = [Token.take(paths, number, "m") for number in range(20)]
    assert sorted(record.generation for record in alive(paths)) == list(range(20))
    tokens[3].release()
    assert 3 not in [record.generation for record in alive(paths)]
    for token in tokens:
        token.release()


def test_sweeping_while_others_come_and_go(paths: PoolPaths) -> None:
    """A sweep that comes between making a record and locking it must not take it for a dead one's."""
    with engines(None, 3) as processes:
        processes[0].start(hammer.sweep_for, paths.pool, str(paths.dir), 2.0)
        for engine in processes[1:]:
            engine.start(hammer.take_many, paths.pool, str(paths.dir), 300)
        assert [engine.result() for engine in processes[1:]] == [0, 0]
        processes[0].result()
    assert not records(paths)


def test_a_record_under_construction_counts(paths: PoolPaths) -> None:
    """Between locking it and naming it its maker has not yet looked at the catalog; a dead one's is swept."""
    path = temporary(paths.attachment(new_id()))
    fd = posix.create(path)
    assert posix.try_lock_byte(fd, 0)
    assert sweep(paths) == 0 and path.exists()
    os.close(fd)
    assert sweep(paths) == 1 and not path.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "1"}, {"generation": 1.0}, {"generation": True}, {"generation": None}, {"model": 1}, {"model": None},
        {"engine": []}, {"rank": "0"}, {"pid": 1.5}, {"since": "x"}, {"since": None}, {"command": 3},
        {"residency": {}}, {"identifier": 1}, {"host": False},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_counts_as_held(paths: PoolPaths, change: dict[str, Any]) -> None:
    """Whoever locks it holds something, and nobody knows what: then nothing may be freed."""
    sound = hammer.fields(Record(1, "m"))
    path = paths.attachment(new_id())
    fd = posix.create(path)
    posix.write_exactly(fd, json.dumps(sound).encode(), 0, path)
    posix.try_lock_byte(fd, 0)
    assert [record.generation for record in alive(paths)] == [1]
    os.truncate(fd, 0)
    posix.write_exactly(fd, json.dumps(sound | change).encode(), 0, path)
    assert [record.generation for record in alive(paths)] == [-1]
    os.close(fd)
    assert not list(alive(paths)) and sweep(paths) == 1


def test_a_record_of_a_later_version(paths: PoolPaths) -> None:
    path = paths.attachment(new_id())
    fd = posix.create(path)
    posix.write_exactly(fd, json.dumps(hammer.fields(Record(5, "m")) | {"unknown": [1]}).encode(), 0, path)
    posix.try_lock_byte(fd, 0)
    assert [record.generation for record in alive(paths)] == [5]
    os.close(fd)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[1]", b"\xff\xfe", b"[" * 60_000, b"x" * 200_000])
def test_a_record_that_is_no_record(paths: PoolPaths, data: bytes) -> None:
    path = paths.attachment(new_id())
    fd = posix.create(path)
    posix.write_exactly(fd, data, 0, path)
    posix.try_lock_byte(fd, 0)
    assert [record.generation for record in alive(paths)] == [-1]
    os.close(fd)


def test_strangers_hold_nothing(paths: PoolPaths, tmp_path: Path) -> None:
    """Nobody may keep memory from being freed by putting something into the directory, or have a link followed."""
    (tmp_path / "precious").write_text("precious")
    link, pipe, others = (paths.attachment(new_id()) for _ in range(3))
    link.symlink_to(tmp_path / "precious")
    os.mkfifo(pipe)
    fd = posix.create(others)
    posix.try_lock_byte(fd, 0)
    os.fchmod(fd, 0o666)
    try:
        assert not list(alive(paths))
        assert sweep(paths) == 0
        assert (tmp_path / "precious").read_text() == "precious"
    finally:
        os.close(fd)
        for path in (link, pipe, others):
            path.unlink()


def test_another_users_record(paths: PoolPaths) -> None:
    path = paths.attachment(new_id())
    fd = posix.create(path)
    posix.write_exactly(fd, json.dumps(hammer.fields(Record(1, "m"))).encode(), 0, path)
    posix.try_lock_byte(fd, 0)
    os.chown(path, 65534, 65534)
    try:
        assert not list(alive(paths)) and sweep(paths) == 0
    finally:
        os.close(fd)
        path.unlink()


@pytest.mark.parametrize("step", ["try_lock_byte", "rename"])
def test_a_sweep_between_making_and_locking(
    paths: PoolPaths, interrupted: Callable[[str], None], step: str
) -> None:
    """The cleaner took it for a dead one's: it is made again, under another name."""
    interrupted(step)
    token = Token.take(paths, 1, "m")
    [record] = alive(paths)
    assert record.identifier == token.record.identifier and len(records(paths)) == 1
    token.release()
    assert not records(paths)


def test_for_want_of_a_descriptor_everything_is_held(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot look must not think that nobody is there: what an engine holds would be freed."""
    token = Token.take(paths, 1, "m")

    def none_left(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        assert [record.generation for record in alive(paths)] == [-1]
        assert sweep(paths) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", none_left)
        for look in (alive, sweep):
            with pytest.raises(HandoffError, match="too many open files"):
                list(look(paths))  # type: ignore[call-overload]
    assert [record.generation for record in alive(paths)] == [1]
    token.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another: run the tests as root")
def test_records_of_a_groups_members(paths: PoolPaths) -> None:
    """In a pool that is shared, a member's record counts while he lives, and goes when he is dead. One that he has not given to
    the group, or that is still being made, is left to him."""
    page = posix.create(paths.control)
    posix.share(page, posix.PRIVATE, 64100)
    held = []
    for group, name in ((64100, ""), (64101, ""), (64100, f".{new_id()}.tmp")):
        path = paths.dir / f"{paths.attachment(new_id()).name}{name}"
        fd = posix.create(path)
        assert posix.try_lock_byte(fd, 0)
        posix.write_exactly(fd, json.dumps(hammer.fields(Record(5, "m"))).encode(), 0, path)
        os.chown(path, 64002, group)
        os.fchmod(fd, 0o640)
        held.append((fd, path))
    assert [record.generation for record in alive(paths)] == [5, 5], "that of no member is nobody's"
    assert sweep(paths) == 0
    own = Token.take(paths, 1, "m")
    assert os.stat(paths.attachment(own.record.identifier)).st_gid == 64100
    own.release()
    for fd, _ in held:
        os.close(fd)
    assert not list(alive(paths))
    assert sweep(paths) == 1 and not held[0][1].exists()
    for path in (held[1][1], held[2][1], paths.control):
        path.unlink()
    os.close(page)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another: run the tests as root")
def test_a_members_record_that_the_directory_keeps(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sticky directory lets nobody else remove it: no error, and no record of the living either."""
    page = posix.create(paths.control)
    posix.share(page, posix.PRIVATE, 64100)
    path = paths.attachment(new_id())
    os.close(posix.create(path))
    os.chown(path, 64002, 64100)

    def refuses(_: Any) -> None:
        raise PermissionError(1, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuses)
        assert sweep(paths) == 0
    assert sweep(paths) == 1
    paths.control.unlink()
    os.close(page)


def test_no_room_for_a_record_leaves_nothing(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(posix, "write_exactly", full)
    with pytest.raises(NoRoom):
        Token.take(paths, 1, "m")
    assert not records(paths)


def test_the_command_line_is_cut(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x" * 100_000])
    token = Token.take(paths, 1, "m")
    [record] = alive(paths)
    assert len(record.command) == 200
    token.release()


def test_a_record_that_was_closed_by_others(paths: PoolPaths, tmp_path: Path) -> None:
    """By a program that closes what it does not know: the number is its own file's then, which is left as it is."""
    own = tmp_path / "own"
    own.touch()
    token = Token.take(paths, 7, "m")
    number = token._fd
    assert token.held and number is not None
    with own.open("r+b") as file:
        os.dup2(file.fileno(), number)
        assert not token.held
        token.tell("nothing of it in there")
        token.release()
        assert not token.held and not records(paths)
        assert posix.still(number, posix.inode(file.fileno())) and not own.read_bytes()
    os.close(number)
    token = Token.take(paths, 7, "m")
    assert token._fd is not None
    os.close(token._fd)
    assert not token.held
    token.release()
    assert not records(paths)
