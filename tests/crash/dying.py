"""Processes that are killed at their n-th change to shared memory: for tests that want every instant, not a lucky one.

    with Engine(pool) as engine:
        engine.start(dying.load, 17, directory, pool, folder)     # kill -9 before the 17th change, or in the middle of it

Every system call that changes what others see counts. One that writes is cut in half. Which instant this is may vary a
little from run to run, since progress is written by the clock; that all of them are met does not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_shim.handoff.names import PoolPaths

CALLS = ("posix_fallocate", "rename", "link", "unlink", "ftruncate", "fchmod")


class Fuse:
    """Counts; kills this process when the count has come."""

    def __init__(self, count: int) -> None:
        self._left = count

    def burn(self) -> bool:
        """One change more. True if it is the last."""
        self._left -= 1
        return self._left == 0

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def light(self) -> None:
        really: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*CALLS, "pwrite", "open")}

        def counted(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.burn():
                    self.die()
                return really[name](*args, **kwargs)

            return call

        def write(fd: int, data: Any, offset: int) -> int:
            if self.burn():
                really["pwrite"](fd, bytes(data)[: len(data) // 2], offset)
                self.die()
            written: int = really["pwrite"](fd, data, offset)
            return written

        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT and self.burn():
                self.die()
            fd: int = really["open"](path, flags, *args, **kwargs)
            return fd

        for name in CALLS:
            setattr(os, name, counted(name))
        setattr(os, "pwrite", write)  # noqa: B010
        setattr(os, "open", opened)  # noqa: B010


def light(count: int) -> None:
    Fuse(count).light()


def paths_of(directory: str, pool: str) -> PoolPaths:
    return PoolPaths(pool, Path(directory))


# What a sidecar does


def load(count: int, directory: str, pool: str, folder: str) -> None:
    """Starts, adopts what is there, loads the checkpoint if it is another, and stops as on SIGTERM."""
    from tests.never_wrong.loading import loading

    light(count)
    with loading(paths_of(directory, pool), remove=False) as parts:
        if not parts.adopt(Path(folder)):
            parts.load(Path(folder))
            parts.pool.collect()


def remove(count: int, directory: str, pool: str, folder: str) -> None:
    """Starts, adopts, and stops as on SIGINT."""
    from tests.never_wrong.loading import Loading

    light(count)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as executor:
        parts = Loading(paths_of(directory, pool), executor)
        parts.adopt(Path(folder))
        parts.pool.close(remove=True)


def adopt_publications(count: int, directory: str, pool: str, folder: str) -> None:
    from tests.never_wrong.loading import loading

    light(count)
    with loading(paths_of(directory, pool), remove=False) as parts:
        parts.adopt(Path(folder))
        for identifier in parts.pool.publications():
            parts.pool.adopt_publication(identifier)


def purge(count: int, directory: str, pool: str, folder: str) -> None:
    from sidecar.pool import purge as really

    light(count)
    really(paths_of(directory, pool), force=True)


# What an engine does


def module(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    linear = torch.nn.Linear(50, 30)
    linear.register_buffer("cache", torch.rand(5), persistent=False)
    return linear


def publish(count: int, seed: int) -> str:
    import engine_shim

    light(count)
    return engine_shim.publish(module(seed), "published")


def attach(count: int) -> int:
    import engine_shim

    light(count)
    with engine_shim.open("m") as model:
        return model.generation
