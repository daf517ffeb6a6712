from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.safetensors_api.side_by_side import Pool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Every file that is opened while this is in force is in the pool."""
    pool = Pool()
    ladder: Any = ModuleType("engine_shim.ladder")
    ladder.shard_for = pool.shard_for
    monkeypatch.setitem(sys.modules, "engine_shim.ladder", ladder)
    return pool
