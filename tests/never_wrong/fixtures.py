"""A pool that a test fills itself, and a process that looks at it as an engine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.handoff.names import PoolPaths
from tests.never_wrong.loading import Loading, loading
from tests.never_wrong.logs import Lines, forget_pools, listening


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What the shim says in this process from now on, as if it had said nothing before."""
    with listening() as lines:
        yield lines


@pytest.fixture
def filled(pool_paths: PoolPaths, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    """A pool of this test, empty still, which this process is switched to."""
    for name in ("BALLAST_MODE", "BALLAST_MODEL", "BALLAST_DIR", "BALLAST_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BALLAST_POOL", pool_paths.pool)
    monkeypatch.setenv("BALLAST_WAIT", "5")
    with loading(pool_paths) as parts:
        yield parts
    forget_pools()
