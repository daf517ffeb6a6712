"""Publications of one storage whose bytes follow from a number. Needs neither pytest nor hypothesis."""

from __future__ import annotations

import random

from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Storage:
    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self._data = data

    def pieces(self) -> list[bytes]:
        return [self._data]


def publish(paths: PoolPaths, model: str, key: str, size: int = 1 << 20) -> str:
    """What an engine publishes. Returns the publication's id."""
    with Publication(paths, model) as publication:
        publication.add(Storage(content(len(key), size)))
        publication.commit({"slots": []}, {"module": "m"}, key)
        return publication.identifier
