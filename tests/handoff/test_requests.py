"""Requests: what a living command asks is met once, answered once, and nothing of it stays."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import posix, request
from engine_shim.handoff.catalog import CHECKPOINT, READY, Catalog, ControlPage, Generation
from engine_shim.handoff.errors import Damaged, HandoffError, NameRefused, NoRoom, NotFound, NotReady
from engine_shim.handoff.names import PoolPaths, new_id
from engine_shim.handoff.request import LOAD, ROLLBACK, Refused, abandoned, answer, ask, pending
from engine_shim.handoff.semaphores import LIFE_BYTE


@pytest.fixture
def page(pool_paths: PoolPaths) -> Iterator[ControlPage]:
    """A pool with a sidecar: its life byte is locked."""
    page = ControlPage.create_or_open(pool_paths)
    assert posix.try_lock_byte(page.fd, LIFE_BYTE)
    yield page
    page.close()
    pool_paths.control.unlink()


def left(paths: PoolPaths) -> list[str]:
    return [name.kind for name in paths.objects() if name.kind in ("request", "answer")]


class Asking:
    """A command that asks, in a thread; what came of it."""

    def __init__(self, paths: PoolPaths, verb: str, model: str, timeout: float = 10) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._ask, args=(paths, verb, model, timeout))
        self._thread.start()

    def _ask(self, *what: Any) -> None:
        try:
            self.answer = ask(*what)
        except HandoffError as error:
            self.answer = error

    def end(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.answer


def met(paths: PoolPaths) -> request.Request:
    """The one request that is pending, once it is there."""
    deadline = time.monotonic() + 10
    while not (found := pending(paths)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    [one] = found
    return one


def test_asked_met_and_answered_once(page: ControlPage, pool_paths: PoolPaths) -> None:
    asking = Asking(pool_paths, ROLLBACK, "org/m")
    one = met(pool_paths)
    assert (one.verb, one.model) == (ROLLBACK, "org/m")
    path = pool_paths.request(one.identifier)
    assert not abandoned(pool_paths, path)
    answer(pool_paths, one, True, "it is so")
    assert asking.end() == "it is so" and not left(pool_paths)


def test_answered_is_not_pending(page: ControlPage, pool_paths: PoolPaths) -> None:
    identifier = new_id()
    fd = request._write(pool_paths, identifier, {"verb": LOAD, "model": "m"})
    [one] = pending(pool_paths)
    answer(pool_paths, one, True, "done")
    assert pending(pool_paths) == []
    assert not abandoned(pool_paths, pool_paths.answer(identifier)), "he may not have read it yet"
    pool_paths.request(identifier).unlink()
    assert abandoned(pool_paths, pool_paths.answer(identifier))
    pool_paths.answer(identifier).unlink()
    os.close(fd)


def test_a_refusal_is_the_sidecars_sentence(page: ControlPage, pool_paths: PoolPaths) -> None:
    asking = Asking(pool_paths, LOAD, "m")
    answer(pool_paths, met(pool_paths), False, "there is no 'm'")
    said = asking.end()
    assert type(said) is Refused and str(said) == "there is no 'm'" and not left(pool_paths)


def test_nobody_answers(page: ControlPage, pool_paths: PoolPaths) -> None:
    said = Asking(pool_paths, LOAD, "m", 0.1).end()
    assert type(said) is NotReady and "has not answered in 0.1 s" in str(said) and not left(pool_paths)


def test_the_sidecar_dies_meanwhile_or_before(page: ControlPage, pool_paths: PoolPaths) -> None:
    asking = Asking(pool_paths, LOAD, "m")
    met(pool_paths)
    posix.unlock_byte(page.fd, LIFE_BYTE)
    said = asking.end()
    assert type(said) is NotFound and "ended before it answered" in str(said) and not left(pool_paths)
    with pytest.raises(NotFound, match="no living sidecar to ask"):
        ask(pool_paths, LOAD, "m")


def test_a_rollback_whose_answer_is_lost(page: ControlPage, pool_paths: PoolPaths) -> None:
    """It was done: that is in the catalog. What was made before the request, or by no rollback, is not it."""
    rows = [Generation(1, "m", CHECKPOINT, READY), Generation(2, "m", CHECKPOINT, READY, over=1)]
    now = page.write(Catalog("0" * 32, pool=pool_paths.pool).with_generation(rows[0]).with_generation(rows[1]))
    for verb, row, expected in (
        (ROLLBACK, None, NotFound),
        (ROLLBACK, Generation(3, "m", CHECKPOINT, READY), NotFound),
        (LOAD, Generation(4, "m", CHECKPOINT, READY, over=3), NotFound),
        (ROLLBACK, Generation(5, "n", CHECKPOINT, READY, over=3), NotFound),
        (ROLLBACK, Generation(6, "m", CHECKPOINT, READY, over=4), str),
    ):
        assert posix.byte_is_locked(page.fd, LIFE_BYTE) or posix.try_lock_byte(page.fd, LIFE_BYTE)
        asking = Asking(pool_paths, verb, "m")
        met(pool_paths)
        if row is not None:
            now = page.write(now.with_generation(row))
        posix.unlock_byte(page.fd, LIFE_BYTE)
        said = asking.end()
        assert type(said) is expected and not left(pool_paths), said
    assert "m serves generation 6, gone back to from generation 4" in said


def test_a_rollback_that_is_not_answered_in_time(page: ControlPage, pool_paths: PoolPaths) -> None:
    page.write(Catalog("0" * 32, pool=pool_paths.pool))
    asking = Asking(pool_paths, ROLLBACK, "m", 0.5)
    met(pool_paths)
    page.write(page.read().with_generation(Generation(2, "m", CHECKPOINT, READY, over=1)))
    assert "m serves generation 2" in asking.end() and not left(pool_paths)


def test_answered_and_gone(page: ControlPage, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that ends right after its answer, between two looks of the command."""
    really = posix.read_all

    def slowly(path: Path, limit: int) -> bytes:
        try:
            return really(path, limit)
        except NotFound:
            if one := pending(pool_paths):
                answer(pool_paths, one[0], True, "done")
                posix.unlock_byte(page.fd, LIFE_BYTE)
            raise

    monkeypatch.setattr(posix, "read_all", slowly)
    assert Asking(pool_paths, LOAD, "m").end() == "done" and not left(pool_paths)


def test_a_name_that_is_none(page: ControlPage, pool_paths: PoolPaths) -> None:
    with pytest.raises(NameRefused):
        ask(pool_paths, LOAD, "../m")
    assert not left(pool_paths)


def test_an_answer_that_makes_no_sense(page: ControlPage, pool_paths: PoolPaths) -> None:
    asking = Asking(pool_paths, LOAD, "m")
    one = met(pool_paths)
    fd = posix.create(pool_paths.answer(one.identifier))
    posix.write_exactly(fd, b"x", 0, pool_paths.answer(one.identifier))
    os.close(fd)
    assert type(said := asking.end()) is Damaged and "does not make sense" in str(said) and not left(pool_paths)
    for document in ({"done": 1, "text": "x"}, {"done": True, "text": 1}, {"done": True}, []):
        with pytest.raises(Damaged):
            request._decode_answer(json.dumps(document).encode())


def test_the_dead_ask_for_nothing(page: ControlPage, pool_paths: PoolPaths) -> None:
    identifier = new_id()
    fd = request._write(pool_paths, identifier, {"verb": LOAD, "model": "m"})
    assert len(pending(pool_paths)) == 1
    os.close(fd)
    assert pending(pool_paths) == [] and abandoned(pool_paths, pool_paths.request(identifier))
    pool_paths.request(identifier).unlink()


def test_what_is_no_request(page: ControlPage, pool_paths: PoolPaths, tmp_path: Path) -> None:
    """Nonsense, one under construction, a link: none is met, and each is another's to remove or nobody's."""
    held = [request._write(pool_paths, new_id(), document) for document in ({"verb": 1, "model": "m"}, {"verb": LOAD}, [])]
    link = pool_paths.request(new_id())
    link.symlink_to(tmp_path)
    building = pool_paths.dir / f"{pool_paths.request(new_id()).name}.{new_id()}.tmp"
    building.touch(0o600)
    assert pending(pool_paths) == []
    assert not abandoned(pool_paths, link) and abandoned(pool_paths, building)
    for fd in held:
        os.close(fd)
    for name in pool_paths.objects():
        if name.kind == "request":
            (pool_paths.dir / name.file).unlink()


def test_a_sweep_between_making_and_locking(
    page: ControlPage, pool_paths: PoolPaths, interrupted: Callable[[str], None]
) -> None:
    """Whichever step it comes before, the request is made again, under the same name."""
    for step in ("try_lock_byte", "rename"):
        interrupted(step)
        identifier = new_id()
        fd = request._write(pool_paths, identifier, {"verb": LOAD, "model": "m"})
        assert [one.identifier for one in pending(pool_paths)] == [identifier]
        pool_paths.request(identifier).unlink()
        os.close(fd)
    assert not left(pool_paths)


def test_no_room(page: ControlPage, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(posix, "write_exactly", full)
    with pytest.raises(NoRoom):
        ask(pool_paths, LOAD, "m")
    with pytest.raises(NoRoom):
        answer(pool_paths, request.Request(LOAD, "m", new_id()), True, "x")
    assert not left(pool_paths)
