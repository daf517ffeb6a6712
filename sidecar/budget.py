"""How much of shared memory a pool may take, and which generations go when something else needs the room.

Without a budget (`--max-bytes`) a model only ever makes room for itself: its own previous generations go, down to the one
that is served. With one, models and engines' states that nobody is attached to go as well, the least recently used first.
What an engine holds stays, and so does what is pinned. Nothing goes in vain: if it would not be enough, nothing is evicted.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from engine_shim.handoff import catalog
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import NameRefused, NoRoom
from engine_shim.handoff.room import gib, room
from sidecar.pool import PoolWriter

log = logging.getLogger("ballast")

_LET_GO = 2.0  # seconds that the scrubber is waited for, which lets go after each block; it runs when nobody else does
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?P<rest>i?B?)\s*\Z", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from what people write: 40G, 40GiB, 512m, 1.5T, 1000000. Units are powers of 1024. Raises NameRefused."""
    found = _SIZE.match(text)
    if not found or (found["rest"].lower().startswith("i") and not found["unit"]):
        raise NameRefused(f"{text!r} is not a size: write it like 40G, 512M or 1.5T (powers of 1024), or in bytes")
    return int(float(found["number"]) * (1 << _UNITS[found["unit"].upper()]))


class Postponed(NoRoom):
    """There would be room if others went, and this is not important enough for that."""


@dataclass(frozen=True)
class _Holding:
    """The segments that generations have in memory: inode → bytes each. A rollback shares its segments with its origin."""

    of: dict[int, dict[int, int]]
    others: int  # bytes of what belongs to no generation: publications, records, the control page

    def bytes(self, without: Collection[int] = ()) -> int:
        kept: dict[int, int] = {}
        for number, inodes in self.of.items():
            if number not in without:
                kept.update(inodes)
        return sum(kept.values()) + self.others


class Budget:
    """What a pool may take in all (bytes; None: whatever fits), and when each generation was last in use."""

    def __init__(self, limit: int | None = None, pinned: Iterable[str] = ()) -> None:
        self.limit = limit
        self.pinned = frozenset(pinned)
        self._used: dict[int, float] = {}

    def look(self, pool: PoolWriter) -> None:
        """Notes who is in use now. Called a few times a second; a use that falls between two looks is not seen."""
        if self.limit is not None:
            now = time.time()
            self._used.update(dict.fromkeys(pool.used(), now))
            listed = {generation.number for generation in pool.catalog.generations}
            self._used = {number: when for number, when in self._used.items() if number in listed}

    def last_used(self, generation: Generation) -> float:
        """When an engine was last seen attached to it, or else when it became ready. Seconds since the epoch."""
        return max(self._used.get(generation.number, 0.0), generation.since)

    def make_room(
        self,
        pool: PoolWriter,
        model: str,
        needed: int,
        evicted: Callable[[Generation], None],
        others: bool = True,
        there: int = 0,
    ) -> None:
        """Sees to it that `needed` bytes for `model`, of which `there` are in memory already, fit the budget and the machine.

        Tells `evicted` of each generation that engines could have had until now. Raises Postponed if it takes evicting other
        models and `others` is false; NoRoom, with numbers, if nothing helps.
        """
        label = f"{model!r}"
        if self.limit is not None and needed > self.limit:
            raise NoRoom(f"{label} needs {gib(needed)} and --max-bytes allows the whole pool {gib(self.limit)}: raise it")
        _free(pool)
        held = pool.used()
        holding = _holding(pool)
        free = room(pool.paths.dir).bytes
        going: list[Generation] = []

        def missing() -> int:
            numbers = {generation.number for generation in going}
            total = holding.bytes(numbers)
            lack = needed - there - (free + holding.bytes() - total)
            return max(lack, 0 if self.limit is None else total + needed - there - self.limit)

        for candidate in self._candidates(pool, model, held):
            if missing() <= 0:
                break
            before = missing()
            going.append(candidate)
            if missing() == before:  # its bytes are another's as well, who stays
                going.pop()
        if missing() > 0:
            going = []
            if self.limit is not None and holding.bytes() + needed - there > self.limit:
                raise NoRoom(self._why(pool, label, needed, holding, held))
            room(pool.paths.dir).require(needed - there, label)
        if not others and any(_is_newest(pool, g) and g.model != model for g in going):
            raise Postponed(f"it waits to be asked for, to keep the pool within --max-bytes {gib(self.limit or 0)}")
        for generation in going:
            with pool.lock:  # so that nobody finds it ready in between
                newest = _is_newest(pool, generation)
                # Older ones that are attached to are still there: who came now would get them in its place.
                older = [g for g in pool.ready(generation.model, generation.kind) if g.key == generation.key] if newest else []
                pool.retire(generation.number, *(g.number for g in older))
                if newest:
                    evicted(generation)
            if newest:
                log.info(
                    "%s, generation %d, is evicted for %s: nobody is attached to it, and it was used least recently",
                    generation.model, generation.number, label,
                )  # fmt: skip
        _free(pool)
        room(pool.paths.dir).require(needed - there, label)

    def _candidates(self, pool: PoolWriter, model: str, held: set[int]) -> list[Generation]:
        """What may go for a generation of `model`, in the order in which it goes."""
        ready = [g for g in pool.catalog.generations if g.state == catalog.READY and g.number not in held]
        previous = [g for g in ready if not _is_newest(pool, g)]
        own = [g for g in previous if g.model == model]
        if self.limit is None:
            # The newest of all, which is being served, stays until the new one is there. Older ones, oldest first.
            return own
        # What was rolled back to is on no disk any more.
        newest = [g for g in ready if _is_newest(pool, g) and not g.over and g.model not in (*self.pinned, model)]
        others = [g for g in previous if g.model != model]
        return own + sorted(others, key=self.last_used) + sorted(newest, key=self.last_used)

    def _why(self, pool: PoolWriter, label: str, needed: int, holding: _Holding, held: set[int]) -> str:
        parts = []
        for generation in pool.catalog.generations:
            if generation.number in holding.of:
                why = (
                    "attached" if generation.number in held
                    else "pinned" if generation.model in self.pinned
                    else "rolled back to" if generation.over
                    else generation.state if generation.state != catalog.READY
                    else "would go"
                )  # fmt: skip
                parts.append(f"{generation.model} {generation.number} ({gib(generation.total)}, {why})")
        return (
            f"{label} needs {gib(needed)}, and of --max-bytes {gib(self.limit or 0)} the pool holds {gib(holding.bytes())}: "
            f"{', '.join(parts) or 'nothing'}; raise it, stop an engine, or pin less"
        )


def _free(pool: PoolWriter) -> None:
    """Frees what is retired, also what the scrubber has yet to let go of. Engines are not waited for."""
    deadline = time.monotonic() + _LET_GO
    while True:
        pool.collect()
        retired = {g.number for g in pool.catalog.generations if g.state == catalog.RETIRED}
        if not retired or not retired & (pool.held() - pool.used()) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _is_newest(pool: PoolWriter, generation: Generation) -> bool:
    """Whether it is the one that new engines get: of a model, or of a configuration of an engine (its key)."""
    return all(
        other.number <= generation.number or other.key != generation.key
        for other in pool.ready(generation.model, generation.kind)
    )


def _holding(pool: PoolWriter) -> _Holding:
    of: dict[int, dict[int, int]] = {}
    others = 0
    for name in pool.paths.objects():
        try:
            status = os.stat(pool.paths.dir / name.file, follow_symlinks=False)
        except OSError:
            continue
        if name.kind == "segment" and name.generation is not None:
            of.setdefault(name.generation, {})[status.st_ino] = status.st_size
        else:
            others += status.st_blocks * 512
    return _Holding(of, others)
