"""A pool filled in this very process, by the sidecar's own parts, for tests with too many pools for as many sidecars."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.names import PoolPaths
from sidecar import serve
from sidecar.pool import PoolWriter, purge


class Loading:
    """What a sidecar does with its pool, one step at a time."""

    def __init__(self, paths: PoolPaths, executor: ThreadPoolExecutor) -> None:
        self.paths = paths
        self.pool = PoolWriter(paths)
        self._sidecar = serve.Sidecar(paths, [])
        self._sidecar._pool = self.pool
        self._executor = executor

    def adopt(self, path: Path, name: str = "m") -> bool:
        """As at the start of a sidecar that serves `path`; says whether the pool held it already."""
        model = self._sidecar.models[name] = serve.Model(Path(path), name)
        self._sidecar._adopt()
        if model.generation is not None:
            self._drop_unfinished()
        return model.generation is not None

    def _drop_unfinished(self) -> None:
        """As the sidecar does once it has announced everything that it will load."""
        for number in self.pool.unfinished:
            self.pool.drop(number)
        self.pool.unfinished.clear()

    def look(self, model: serve.Model) -> serve.Model:
        """As at a look at files that have changed: they cannot be read, or are what is kept, or else are to be loaded."""
        self._sidecar._see_to(model)
        return model

    def see_to(self, model: serve.Model) -> None:
        """The same, and loads them."""
        if self.look(model).plan is not None:
            self._load_next(model)

    def load(self, path: Path, name: str = "m") -> Generation:
        """Loads a checkpoint, as a new generation unless it is the one that is there. Returns the generation."""
        model = serve.Model(Path(path), name)
        assert self._sidecar._open(model) and model.found is not None, model.reason
        self._sidecar._enqueue(model, model.found)
        self._load_next(model)
        assert model.generation is not None, model.reason
        generation = self.pool.catalog.get(model.generation)
        assert generation is not None
        return generation


    def _load_next(self, model: serve.Model) -> None:
        assert model.plan is not None and self._sidecar._queue.get_nowait() is model
        self._drop_unfinished()
        self._sidecar._load_planned(model, model.plan, self._executor)


@contextmanager
def loading(paths: PoolPaths, remove: bool = True) -> Iterator[Loading]:
    """The pool of `paths`, removed in the end or else left as a sidecar leaves it on SIGTERM."""
    with ThreadPoolExecutor(2) as executor:
        parts = Loading(paths, executor)
        try:
            yield parts
        finally:
            parts.pool.close(remove)
            if remove:  # a pool that has lost its control page is not its sidecar's to remove any more
                purge(paths, force=True)
