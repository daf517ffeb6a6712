"""A publication that cannot be adopted, for whatever reason, is refused; one that can does not hold its engine up."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine_shim.handoff.catalog import FAILED, READY, ControlPage
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication
from engine_shim.modules import TensorStorage
from sidecar import loader, pool
from sidecar.serve import Sidecar


def published(paths: PoolPaths, writer: pool.PoolWriter) -> str:
    with Publication(paths, "m") as publication:
        publication.add(TensorStorage(torch.ones(5000).untyped_storage()))
        publication.commit({"slots": []}, {}, "0" * 32)
    (identifier,) = writer.publications()
    return identifier


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("a fault of ours")])
def test_any_error(error: Exception, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    writer = pool.PoolWriter(pool_paths)
    try:
        identifier = published(pool_paths, writer)
        monkeypatch.setattr(pool, "recompute", fails)
        assert writer.adopt_publication(identifier) is False
        assert [g.state for g in writer.catalog.of_model("m")] == [FAILED]
        assert writer.publications() == []
    finally:
        writer.close(remove=True)


def test_digests_wait_for_the_engine(pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed while the engine is on its way to its first answer: at a low priority, that of one thread."""
    niceness = []
    recompute = pool.recompute

    def seen(*given: Any) -> Any:
        niceness.append(os.getpriority(os.PRIO_PROCESS, 0))
        return recompute(*given)

    monkeypatch.setattr(pool, "recompute", seen)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    writer = pool.PoolWriter(pool_paths)
    try:
        assert writer.adopt_publication(published(pool_paths, writer))
        assert [g.state for g in writer.catalog.of_model("m")] == [READY]
    finally:
        writer.close(remove=True)
    assert niceness == [max(before, 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_low_priority_is_not_raised() -> None:
    """That of a sidecar which was started with `nice -n 19`."""

    def niceness() -> int:
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # of this thread
        pool._step_back()
        return os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(niceness).result() == 19


def test_a_sidecar_that_is_stopped_does_not_digest_on(pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be given up otherwise, and end with 1: a state of some GiB takes longer than it has to end in an orderly way."""
    sidecar = Sidecar(pool_paths, [], on_exit="remove")
    # It serves no model, so it would end by itself if it looked before the publication is announced.
    monkeypatch.setattr(sidecar, "_hopeless", lambda: False)
    blocks = []
    digest = loader.digest.block

    def slow(data: Any) -> Any:
        blocks.append(len(data))
        sidecar._signal = signal.SIGTERM
        assert sidecar._stop.wait(10)
        return digest(data)

    monkeypatch.setattr(loader.digest, "block", slow)
    failed = []
    monkeypatch.setattr(pool.PoolWriter, "fail", lambda _, model, reason, *__: failed.append((model, reason)))
    page = ControlPage.create_or_open(pool_paths)
    with Publication(pool_paths, "m") as publication:
        publication.add(TensorStorage(torch.ones(50 << 18).untyped_storage()))
        publication.commit({"slots": []}, {}, "0" * 32)
    page.close()
    assert sidecar.run() == 0
    assert len(blocks) == 1
    ((model, reason),) = failed
    assert model == "m" and "stopped" in reason
