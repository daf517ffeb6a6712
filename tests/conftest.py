"""What all tests share: a pool of their own, and a look at what they leave behind."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.names import DEFAULT_DIR, PREFIX, PoolPaths

# Where the tests are a job in the background, SIGINT and SIGQUIT are ignored, and so they would be in every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def left_behind(pool: str, directory: str = DEFAULT_DIR) -> list[str]:
    """The objects and semaphores that are in shared memory now, of a pool and of those named like it (`<pool>-…`)."""
    prefixes = tuple(f"{kind}{PREFIX}{pool}{end}" for kind in ("", "sem.") for end in ".-")
    return sorted(name for name in os.listdir(directory) if name.startswith(prefixes))


@pytest.fixture
def pool_name() -> Iterator[str]:
    """The name of a pool for this test alone. The test fails if anything of it is left in /dev/shm; that is removed then.

    A test that means to leave its pool, because it kills the sidecar, ends by purging it.
    """
    pool = f"t-{os.getpid():x}-{secrets.token_hex(4)}"
    yield pool
    left = left_behind(pool)
    for name in left:
        (Path(DEFAULT_DIR) / name).unlink(missing_ok=True)
    assert not left, f"the test left {', '.join(left)} in {DEFAULT_DIR}"


@pytest.fixture
def pool_paths(pool_name: str) -> PoolPaths:
    """The same pool's paths."""
    return PoolPaths(pool_name)


@pytest.fixture
def empty_pool(pool_paths: PoolPaths) -> Iterator[PoolPaths]:
    """The same pool with a control page, as publishers need it. What is in it goes at the end."""
    page = ControlPage.create_or_open(pool_paths)
    yield pool_paths
    page.close()
    for name in pool_paths.objects():
        (pool_paths.dir / name.file).unlink()
