"""A publication that cannot be adopted, for whatever reason, is refused; the sidecar goes on."""

from __future__ import annotations

import pytest
import torch

from engine_shim.handoff.catalog import FAILED
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication
from engine_shim.modules import TensorStorage
from sidecar import pool


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("a fault of ours")])
def test_any_error(error: Exception, pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    writer = pool.PoolWriter(pool_paths)
    try:
        with Publication(pool_paths, "m") as publication:
            publication.add(TensorStorage(torch.ones(5000).untyped_storage()))
            publication.commit({"slots": []}, {}, "0" * 32)
        (identifier,) = writer.publications()
        monkeypatch.setattr(pool, "recompute", fails)
        assert writer.adopt_publication(identifier) is False
        assert [g.state for g in writer.catalog.of_model("m")] == [FAILED]
        assert writer.publications() == []
    finally:
        writer.close(remove=True)
