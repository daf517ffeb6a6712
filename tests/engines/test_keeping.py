"""An engine whose state is kept goes on as without Ballast: whoever looks at bytes of its model, before, while and after it is
loaded, reads and writes what he would have; and what was published stays as it was."""

from __future__ import annotations

import pytest

from engine_shim.handoff.names import PoolPaths
from engine_shim.state import PROCESSED
from tests.engines import keeping
from tests.never_wrong.forked import Engine

# Captured as it was loaded, or after its post-processing.
LEVELS: dict[str, dict[str, str]] = {"loaded": {}, "processed": {"": PROCESSED}}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", keeping.CASES)
def test_who_looks_at_bytes(empty_pool: PoolPaths, name: str, level: str) -> None:
    with Engine() as engine:
        assert engine(keeping.kept, empty_pool.pool, name, LEVELS[level]) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", keeping.REFUSED)
def test_what_cannot_be_kept(empty_pool: PoolPaths, name: str, level: str) -> None:
    """A tensor whose bytes are not its values, or what loading has made besides tensors of the tree."""
    with Engine() as engine:
        assert engine(keeping.given_up, empty_pool.pool, name, LEVELS[level], False) == []


@pytest.mark.parametrize("name", ["nobody", "a view in a list, made while loading", "an inference tensor"])
def test_no_private_maps(empty_pool: PoolPaths, name: str) -> None:
    """As where the kernel does not overcommit memory: the engine goes on with the maps that it has."""
    with Engine() as engine:
        assert engine(keeping.given_up, empty_pool.pool, name, LEVELS["loaded"], True) == []
