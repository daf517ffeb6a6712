"""An engine whose state is kept goes on as without Ballast: whoever looks at bytes of its model, before, while and after it is
loaded, reads and writes what he would have; and what was published stays as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.names import PoolPaths
from tests.engines import keeping
from tests.never_wrong.forked import Engine


@pytest.fixture
def paths(pool_paths: PoolPaths) -> Iterator[PoolPaths]:
    """A pool with a control page."""
    page = ControlPage.create_or_open(pool_paths)
    yield pool_paths
    page.close()
    for name in pool_paths.objects():
        (pool_paths.dir / name.file).unlink()


@pytest.mark.parametrize("name", keeping.CASES)
def test_who_looks_at_bytes(paths: PoolPaths, name: str) -> None:
    with Engine() as engine:
        assert engine(keeping.kept, paths.pool, name) == []


@pytest.mark.parametrize("name", keeping.REFUSED)
def test_what_cannot_be_kept(paths: PoolPaths, name: str) -> None:
    """A tensor whose bytes are not its values."""
    with Engine() as engine:
        assert engine(keeping.given_up, paths.pool, name, False) == []


@pytest.mark.parametrize("name", ["nobody", "a view in a list, made while loading", "an inference tensor"])
def test_no_private_maps(paths: PoolPaths, name: str) -> None:
    """As where the kernel does not overcommit memory: the engine goes on with the maps that it has."""
    with Engine() as engine:
        assert engine(keeping.given_up, paths.pool, name, True) == []
