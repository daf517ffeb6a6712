"""What the system says no to: each refusal has its type and one sentence, and nothing is left open or behind."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NoRoom, NotFound
from engine_shim.handoff.names import PoolPaths

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another: run the tests as root")

CODES = [
    (errno.ENOENT, NotFound, "is not there: start the sidecar"),
    (errno.ENOTDIR, NotFound, "is not there"),
    (errno.ENOSPC, NoRoom, "has no room left for"),
    (errno.EDQUOT, NoRoom, "has no room left for"),
    (errno.EACCES, Foreign, "belongs to another user: run the sidecar and the engine as one user"),
    (errno.EPERM, Foreign, "belongs to another user"),
    (errno.ELOOP, Foreign, "is a symbolic link, which nothing of Ballast ever is: remove it"),
    (errno.EISDIR, Foreign, "is a directory, which nothing of Ballast ever is: remove it"),
    (errno.EMFILE, HandoffError, "too many open files; raise the limit"),
    (errno.ENFILE, HandoffError, "too many open files; raise the limit"),
    (errno.EIO, HandoffError, "Input/output error"),
]

# system call → what of ours makes it
CALLS: dict[str, Callable[[Path, int], Any]] = {
    "open": lambda path, fd: posix.open_existing(path),
    "pwrite": lambda path, fd: posix.write_exactly(fd, b"x", 0, path),
    "pwritev": lambda path, fd: posix.write_parts(fd, [b"x", b"y"], 0, path),
    "posix_fallocate": lambda path, fd: posix.allocate(fd, 0, 1, path),
    "rename": lambda path, fd: posix.rename(path, path.with_name("other")),
    "link": lambda path, fd: posix.link_new(path, path.with_name("other")),
    "unlink": lambda path, fd: posix.remove(path),
    "stat": lambda path, fd: posix.status(path),
    "listdir": lambda path, fd: posix.files(path.parent),
}
QUIET = {("unlink", errno.ENOENT), ("listdir", errno.ENOENT)}  # gone is what was wanted, or nothing


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("code", "kind", "text"), CODES, ids=[errno.errorcode[code] for code, *_ in CODES])
def test_every_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[HandoffError], text: str
) -> None:
    path = tmp_path / "object"
    fd = posix.create(path)

    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuses)
            if (call, code) in QUIET:
                assert not CALLS[call](path, fd)
                return
            with pytest.raises(HandoffError) as caught:
                CALLS[call](path, fd)
        assert type(caught.value) is kind and text in str(caught.value) and "\n" not in str(caught.value)
    finally:
        os.close(fd)


def test_creating_where_nothing_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        posix.create(tmp_path / "absent" / "object")
    (tmp_path / "object").touch()
    with pytest.raises(FileExistsError):
        posix.create(tmp_path / "object")


def test_a_write_cut_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "object"
    fd = posix.create(path)
    posix.write_parts(fd, [b"xx", b"yy"], 0, path)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real(fd, [bytes(parts[0])[:2]], offset))
    posix.write_parts(fd, [b"abc", memoryview(b"def"), b"g"], 0, path)
    posix.write_parts(fd, [], 7, path)
    assert path.read_bytes() == b"abcdefg"
    posix.allocate(fd, 0, 0, path)
    assert path.stat().st_size == 7
    os.close(fd)


def test_what_is_larger_than_makes_sense_or_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "object"
    fd = posix.create(path)
    os.truncate(path, 100)
    assert posix.read_all(path, 100) == bytes(100)
    with pytest.raises(Damaged, match="has 100 bytes where at most 99 make sense"):
        posix.read_all(path, 99)
    with pytest.raises(Damaged, match="ends at byte 100, 1 bytes too early"):
        posix.read_exactly(fd, 51, 50, path)
    os.truncate(path, posix._LARGE + 1)
    with pytest.raises(Damaged, match="mostly holes"):
        posix.read_all(path, 1 << 40)
    os.close(fd)


def test_what_is_there_already_is_not_linked_over(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    assert not posix.link_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "b"
    assert posix.link_new(tmp_path / "a", tmp_path / "c")


def test_the_same_file_or_another(tmp_path: Path) -> None:
    path = tmp_path / "object"
    fd = posix.create(path)
    assert posix.same_file(fd, path) and posix.inode(fd) == (path.stat().st_dev, path.stat().st_ino)
    path.unlink()
    assert not posix.same_file(fd, path)
    path.touch()
    assert not posix.same_file(fd, path)
    os.close(fd)


def test_a_lock_of_the_whole_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "object"
    one, two = posix.create(path), posix.open_existing(path, write=True)
    assert posix.try_flock(one) and not posix.try_flock(two)
    assert posix.try_lock_byte(one, 3) and not posix.try_lock_byte(two, 3) and posix.try_lock_byte(two, 4)
    assert posix.byte_is_locked(two, 3) and not posix.byte_is_locked(one, 3)
    posix.unlock_byte(one, 3)
    assert not posix.byte_is_locked(two, 3)
    os.close(one)
    assert posix.try_flock(two)
    os.close(two)


def test_a_group_may_read_what_is_given_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "object"
    fd = posix.create(path)
    assert posix.group_of(path) is None and posix.group_of(tmp_path / "absent") is None
    posix.share(fd, posix.PUBLISHED, os.getgid())
    assert path.stat().st_mode & 0o777 == 0o440 and posix.group_of(path) == os.getgid()
    posix.share(fd, posix.PRIVATE, None)
    assert path.stat().st_mode & 0o777 == 0o600

    def refuses(*_: Any) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "fchown", refuses)
    with pytest.raises(HandoffError, match="nothing can be given to group 7: this process's user is not a member"):
        posix.share(fd, posix.PRIVATE, 7)
    os.close(fd)


@needs_root
def test_whose_files_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "object"
    os.close(posix.create(path))
    os.chown(path, 64002, 64100)
    with pytest.raises(Foreign, match="belongs to user 64002"):
        posix.open_existing(path)
    with pytest.raises(Foreign):
        posix.open_existing(path, group=64101)
    os.close(posix.open_existing(path, group=64100))
    for named in ("64002", "nobody-of-this-name,64002", f"64002 {pwd.getpwuid(0).pw_name}"):
        monkeypatch.setenv("BALLAST_TRUST", named)
        os.close(posix.open_existing(path))
        assert posix.status(path).st_uid == 64002
    path.chmod(0o620)
    with pytest.raises(Foreign, match="is writable by other users"):
        posix.open_existing(path)


def test_a_number_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("17\n")
    (tmp_path / "m").write_text("max\n")
    assert [posix.read_number(tmp_path / name) for name in ("n", "m", "absent")] == [17, None, None]


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert PoolPaths("p", tmp_path / "absent").objects() == []
