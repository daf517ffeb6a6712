"""Every allocation fails in its turn: each time a typed error that says so, nothing left behind, and the next try works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import attachment, request
from engine_shim.handoff.catalog import ENGINE, FAILED, READY
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from sidecar import history, serve
from sidecar.pool import damaged
from tests.conftest import left_behind
from tests.crash.sequences import in_order
from tests.generations.parts import checkpoint
from tests.generations.states import publish
from tests.never_wrong.loading import Loading, loading

SIZE = 40_000
CALLS = ("open", "pwrite", "pwritev", "posix_fallocate", "link")  # that may find a file system full
NEW = ("open", "link")  # that make something; the control page has its room from the beginning
LOOKS = ("open", "listdir")  # that take a descriptor


class Full:
    """Makes the n-th call that takes room in a directory fail, and every one after it while `lasting`; with LOOKS, the n-th
    that takes a descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, calls: tuple[str, ...] = CALLS) -> None:
        self.turn = 0
        self.count = 0
        self.lasting = False
        self._code = code
        self._calls = calls
        for name in calls:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or self._calls is LOOKS or args[1] & os.O_CREAT:
                self.count += 1
                if self.turn and (self.count == self.turn or (self.lasting and self.count > self.turn)):
                    raise OSError(self._code, os.strerror(self._code))
            return really(*args, **more)

        return call

    @contextmanager
    def at(self, turn: int, lasting: bool) -> Iterator[None]:
        self.turn, self.lasting, self.count = turn, lasting, 0
        try:
            yield
        finally:
            self.turn = 0


def everything(paths: PoolPaths, folder: Path, told: list[str]) -> None:
    """All that a sidecar and its engines write: a page, two generations, a rollback, a state, a record, an answer."""
    with loading(paths) as pool:
        for seed in (1, 2):
            load(pool, checkpoint(folder, seed, SIZE), told)
        history.rollback(pool.pool, "m")
        if not pool.pool.adopt_publication(publish(paths, "m", "k", SIZE)):
            told.extend(g.reason for g in pool.pool.catalog.generations if g.kind == ENGINE)
        attachment.Token.take(paths, 1, "m").release()
        request.answer(paths, request.Request("load", "m", "0" * 16), True, "done")


def load(pool: Loading, folder: Path, told: list[str]) -> None:
    model = serve.Model(folder, "m")
    assert pool._sidecar._open(model) and model.found is not None
    pool._sidecar._enqueue(model, model.found)
    if model.plan is not None:
        pool._sidecar._queue.get_nowait()
        pool._sidecar._load(model, model.plan, pool._executor)
    if model.reason:
        told.append(model.reason)
        raise HandoffError(model.reason)
    for generation, contents in history.kept(pool.pool, "m"):
        assert not list(damaged(pool.paths, contents)), generation


@pytest.mark.parametrize(
    ("code", "words", "lasting"),
    [(errno.ENOSPC, "no room left", False), (errno.ENOSPC, "no room left", True), (errno.EMFILE, "too many open files", False)],
    ids=["full_once", "full_from_then_on", "no_descriptor_once"],
)
def test_every_allocation(
    pool_paths: PoolPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool, code: int, words: str
) -> None:
    monkeypatch.setattr(serve, "_wait_until_settled", lambda found: None)  # hundreds of loads; their times do not matter here
    files = tmp_path / "m"
    full = Full(monkeypatch, code)
    turn = 0
    errors = 0
    while True:
        turn += 1
        told: list[str] = []
        checkpoint(files, 0, SIZE)
        with full.at(turn, lasting):
            try:
                everything(pool_paths, files, told)
                ended = full.count < turn
            except (HandoffError, OSError) as error:
                told.append(str(error) if isinstance(error, HandoffError) else os.strerror(error.errno or 0))
                ended = False
        if told:
            errors += 1
            assert all("\n" not in sentence for sentence in told)
            assert any(words in sentence.lower() or os.strerror(code) in sentence for sentence in told), told
        left = left_behind(pool_paths.pool)
        if left:  # a sidecar that died of it leaves what the next one sweeps
            with loading(pool_paths):
                pass
            assert not left_behind(pool_paths.pool), (turn, left)
        if ended:
            break
        assert turn < 200
    assert turn > 20 and errors > 10, "the scenario has become smaller than it was"
    told = []
    everything(pool_paths, files, told)
    assert not told


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from_then_on"])
def test_no_descriptor_to_look_with(
    pool_paths: PoolPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Who cannot look does not conclude: what an engine holds is not freed, a living one's record not swept, what is whole not
    dropped by the next sidecar."""
    monkeypatch.setattr(serve, "_wait_until_settled", lambda found: None)
    short = Full(monkeypatch, errno.EMFILE, LOOKS)

    def at_each(deed: Callable[[], Any], whole: Callable[[], bool]) -> None:
        turn = failed = 0
        while True:
            turn += 1
            with short.at(turn, lasting):
                try:
                    deed()
                except HandoffError as error:
                    failed += 1
                    assert "too many open files" in str(error)
            assert whole(), turn
            if short.count < turn:
                break
            assert turn < 200
        assert turn > 2 and failed

    def starts() -> None:
        with loading(pool_paths, remove=False) as again:
            assert [adopted.generation.number for adopted in again.pool.adopt()] == [2]

    with loading(pool_paths, remove=False) as pool:
        for seed in (1, 2):
            load(pool, checkpoint(tmp_path / "m", seed, SIZE), [])
        token = attachment.Token.take(pool_paths, 1, "m")
        pool.pool.retire(1)
        record = pool_paths.attachment(token.record.identifier)
        for deed in (pool.pool.collect, pool.pool.sweep):
            at_each(deed, lambda: record.exists() and all(pool_paths.segment(number, 0).exists() for number in (1, 2)))
    at_each(starts, pool_paths.segment(2, 0).exists)
    token.release()
    with loading(pool_paths):
        pass


def test_the_loader_outlives_a_failure_to_tell_of_a_failure(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor for a while it loads and adopts nothing, and goes on once there are some."""
    sidecar, pool = filled._sidecar, filled.pool
    model = serve.Model(checkpoint(tmp_path / "m", 1, SIZE), "m")
    published = publish(filled.paths, "other", "k", SIZE)
    filled.look(model)
    for item in (published, None):
        sidecar._queue.put(item)
    sidecar._queued.add(published)
    with Full(monkeypatch, errno.EMFILE, LOOKS).at(1, lasting=True):
        sidecar._work()
    assert "too many open files" in model.reason and model.plan is None, "so it is tried again"
    assert published not in sidecar._queued and not pool.ready("m")
    filled.look(model)
    for item in (published, None):
        sidecar._queue.put(item)
    sidecar._work()
    assert [(g.model, g.state) for g in pool.catalog.generations] == [("m", READY), ("other", READY)]
    pool.sweep()
    assert not in_order(filled.paths, pool.catalog)


def test_files_that_could_not_be_seen_to_are_looked_at_again(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps a sidecar from going back to files that are back is the model's reason, and so it is tried again."""
    link = tmp_path / "m"
    contents = []
    for seed in (1, 2):
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint(tmp_path / f"v{seed}", seed, SIZE))
        contents.append(filled.load(link).content)
    link.unlink()
    link.symlink_to(tmp_path / "v1")
    full = Full(monkeypatch, errno.ENOSPC, NEW)
    turn = 0
    while True:
        turn += 1
        model = serve.Model(link, "m")
        with full.at(turn, lasting=False):
            filled.look(model)
        if full.count < turn:
            break
        assert model.reason and filled.pool.catalog.of_model("m")[0].reason == model.reason
    served = filled.pool.ready("m")[0]
    assert turn >= 3 and model.generation == served.number and served.content == contents[0]


def test_a_sidecar_starts_although_it_cannot_write_down_what_has_changed(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    (folder / "config.json").write_text("{}")
    with Full(monkeypatch, errno.ENOSPC, NEW).at(1, lasting=True):
        assert filled.adopt(folder)
    assert [g.state for g in filled.pool.catalog.generations] == [READY, FAILED]
    assert filled.look(serve.Model(folder, "m")).generation == 1
    assert [g.state for g in filled.pool.catalog.generations] == [READY]
