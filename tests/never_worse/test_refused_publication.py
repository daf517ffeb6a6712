"""A publication that cannot be adopted, for whatever reason, is refused; one that can does not hold its engine up."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from engine_shim.handoff.catalog import FAILED, READY
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication
from engine_shim.modules import TensorStorage
from sidecar import pool


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
