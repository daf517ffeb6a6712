"""A GPU has one holder of a pool, however many start, and however close to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from engine_shim.handoff import holder
from engine_shim.handoff.errors import Busy
from engine_shim.handoff.names import PoolPaths
from sidecar import cuda
from sidecar import holder as holding
from sidecar.holder import Holder
from tests.device.emulated import A, B


class Gpu:
    """All of a GPU that a holder looks at when it starts."""

    def __init__(self, uuid: str = A) -> None:
        self.uuid = uuid


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[PoolPaths]:
    paths = PoolPaths("p", tmp_path)
    yield paths
    assert not paths.objects(), "who gives up leaves nothing"


def start(paths: PoolPaths, *gpus: str) -> Holder:
    return Holder(paths, cast("list[cuda.Gpu]", [Gpu(uuid) for uuid in gpus or (A,)]))


def named(monkeypatch: pytest.MonkeyPatch, digit: str) -> None:
    monkeypatch.setattr(holder, "new_id", lambda: digit * 16)


@pytest.mark.parametrize("digit", "28")
def test_who_has_settled_stays(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch, digit: str) -> None:
    named(monkeypatch, "5")
    first = start(paths)
    named(monkeypatch, digit)
    with pytest.raises(Busy, match=f"has {A} already: stop that one, or give this one other GPUs"):
        start(paths, B, A)
    start(paths, B)._token.release()
    assert [one.identifier for one in holder.alive(paths)] == [first.identifier]
    first._token.release()


def test_of_several_that_start_at_once_one_stays(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """They all come to the first thing that they do in the pool, look or record, in the same moment."""
    barrier = threading.Barrier(4)
    met = threading.local()

    def together(really: Any) -> Any:
        def call(*args: Any) -> Any:
            if not getattr(met, "there", False):
                met.there = True
                found = list(really(*args)) if really is alive else really(*args)
                barrier.wait(10)
                return found
            return really(*args)

        return call

    alive = holder.alive
    monkeypatch.setattr(holder, "alive", together(alive))
    monkeypatch.setattr(holder, "Token", together(holder.Token))
    for _ in range(5):
        with ThreadPoolExecutor(4) as executor:
            started = [executor.submit(start, paths) for _ in range(4)]
        stayed = [one.result() for one in started if one.exception() is None]
        assert len(stayed) == 1 and all(type(one.exception()) in (type(None), Busy) for one in started)
        assert [one.identifier for one in alive(paths)] == [stayed[0].identifier]
        stayed[0]._token.release()


def test_the_smaller_one_waits_for_what_the_other_does(paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other may have looked before we were there: then it settles. One that does neither is taken for settled."""
    for does in ("gives up", "settles", "nothing"):
        if does == "nothing":
            monkeypatch.setattr(holding, "_DECIDED", 0.2)
        named(monkeypatch, "8")
        other = holder.Token(paths, [A])
        named(monkeypatch, "2")
        with ThreadPoolExecutor(1) as executor:
            started = executor.submit(start, paths)
            time.sleep(0.1)
            assert not started.done()
            if does == "gives up":
                other.release()
                started.result(10)._token.release()
                continue
            if does == "settles":
                other.settle()
            with pytest.raises(Busy):
                started.result(10)
        other.release()
