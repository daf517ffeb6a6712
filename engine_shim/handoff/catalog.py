"""The control page: which generations a pool holds and what state each is in.

One file, written by the sidecar alone and read by everybody without a lock. It has two slots. A new catalog goes into the
older slot, its checksum last; readers take the newest slot whose checksum is right, so a write that was cut short by a
kill is skipped and never seen. `docs/protocol.md` gives the layout byte by byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
import time
from dataclasses import dataclass
from typing import Any, Optional

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Damaged, NotFound
from engine_shim.handoff.names import PoolPaths, check_model, temporary
from engine_shim.handoff.semaphores import LIFE_BYTE

MAGIC = b"BALLAST\x01"
LAYOUT = 1  # of the control page; another number is another layout, which we neither read nor write
BYTE_ORDER = 0x01020304  # read back as 0x04030201 by a machine of the other endianness

# magic, layout version, byte-order mark, offset of the first slot, size of a slot
_HEADER = struct.Struct("<8sIIQQ")
# sequence number, payload length, digest of both and of the payload
_SLOT = struct.Struct("<QQ32s")
_KEY = struct.Struct("<QQ")

SLOT_OFFSET = posix.PAGE  # a page of its own, so that locks on bytes 0 and 1 stay apart from what is written
SLOT_SIZE = 256 * 1024  # some 500 generations at about 500 bytes each; sparse until used
FILE_SIZE = SLOT_OFFSET + 2 * SLOT_SIZE

LOADING = "loading"
READY = "ready"
RETIRED = "retired"
FAILED = "failed"
STATES = (LOADING, READY, RETIRED, FAILED)

CHECKPOINT = "checkpoint"
ENGINE = "engine"
KINDS = (CHECKPOINT, ENGINE)

_NONCE = re.compile(r"[0-9a-f]{32}\Z")
_HEX = re.compile(r"[0-9a-f]*\Z")
_READ_ATTEMPTS = 100  # a reader that meets a torn slot in both places looks again; writers are thousands of times slower


@dataclass(frozen=True)
class Generation:
    """One line of the catalog. Sizes in bytes, times in seconds since the epoch (for people; nothing depends on them)."""

    number: int
    model: str
    kind: str
    state: str
    total: int = 0
    done: int = 0
    shards: str = ""  # while loading: bit k of this hexadecimal number is set once segment k is complete
    reason: str = ""  # of a failure, one sentence
    key: str = ""  # of an engine's state: digest of everything that has to be equal
    since: float = 0.0  # when this state began
    content: str = ""  # digest of what its files hold; of an engine's state: of the checkpoint that was newest with it
    over: int = 0  # of a generation made by a rollback: the one that it stands before, whose files are still on disk
    evicted: bool = False  # with FAILED: not for a fault, but to keep the pool within its budget; it can be asked for

    def shard_done(self, index: int) -> bool:
        return bool(int(self.shards or "0", 16) >> index & 1)


@dataclass(frozen=True)
class Catalog:
    """What a pool holds. `boot` names the sidecar's present life; `next` is the next generation's number."""

    boot: str
    next: int = 1
    sequence: int = 0
    generations: tuple[Generation, ...] = ()
    pool: str = ""  # whose catalog it is: a page that somebody has linked to another pool's name is not that pool's

    def get(self, number: int) -> Optional[Generation]:
        for generation in self.generations:
            if generation.number == number:
                return generation
        return None

    def of_model(self, model: str, state: Optional[str] = None) -> list[Generation]:
        """The generations of a model, newest first."""
        found = [g for g in self.generations if g.model == model and (state is None or g.state == state)]
        return sorted(found, key=lambda g: g.number, reverse=True)

    def models(self) -> list[str]:
        return sorted({generation.model for generation in self.generations})

    def with_generation(self, generation: Generation) -> Catalog:
        """This catalog with one line added or replaced."""
        others = tuple(g for g in self.generations if g.number != generation.number)
        ordered = tuple(sorted((*others, generation), key=lambda g: g.number))
        return dataclasses.replace(self, generations=ordered, next=max(self.next, generation.number + 1))

    def without(self, number: int) -> Catalog:
        return dataclasses.replace(self, generations=tuple(g for g in self.generations if g.number != number))


_FIELDS = frozenset(field.name for field in dataclasses.fields(Generation))


def encode(catalog: Catalog) -> bytes:
    return json.dumps(
        {
            "boot": catalog.boot,
            "pool": catalog.pool,
            "next": catalog.next,
            "generations": [dataclasses.asdict(generation) for generation in catalog.generations],
        },
        separators=(",", ":"),
    ).encode()


def decode(payload: bytes, sequence: int) -> Catalog:
    """Validates every field. Raises Damaged."""
    try:
        raw = json.loads(payload)
        boot, following, rows, pool = raw["boot"], raw["next"], raw["generations"], raw.get("pool", "")
        if not (isinstance(boot, str) and _NONCE.match(boot) and _whole(following) and isinstance(rows, list)):
            raise ValueError("boot nonce, next number or list of generations")
        if not isinstance(pool, str):
            raise ValueError("name of the pool")
        generations = tuple(_generation(row) for row in rows)
        numbers = [generation.number for generation in generations]
        if len(set(numbers)) != len(numbers) or any(number >= following for number in numbers):
            raise ValueError("generation numbers")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"the catalog does not make sense ({error}): run 'ballast purge' and start the sidecar") from None
    return Catalog(boot, following, sequence, generations, pool)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _generation(row: Any) -> Generation:
    # Fields that a later version has added are no concern of ours.
    generation = Generation(**{name: value for name, value in row.items() if name in _FIELDS})
    texts = (
        generation.model, generation.kind, generation.state, generation.shards, generation.reason, generation.key,
        generation.content,
    )  # fmt: skip
    if not (
        all(isinstance(text, str) for text in texts)
        and all(map(_whole, (generation.number, generation.total, generation.done, generation.over)))
        and type(generation.evicted) is bool
        and generation.kind in KINDS
        and generation.state in STATES
        and len(generation.shards) <= 1 << 16
        and _HEX.match(generation.shards)
        and type(generation.since) in (int, float)
    ):
        raise ValueError(f"generation {generation.number!r}")
    try:
        check_model(generation.model)
    except Exception as error:
        raise ValueError(str(error)) from None
    return generation


class ControlPage:
    """An open control page. Readers open it with `open`; the sidecar with `create_or_open`."""

    def __init__(self, paths: PoolPaths, fd: int) -> None:
        self.paths = paths
        self.fd = fd
        self.inode = posix.inode(fd)
        self._sequence = 0

    @classmethod
    def open(cls, paths: PoolPaths, write: bool = False) -> ControlPage:
        """The control page of a pool. Raises NotFound, Foreign or Damaged."""
        fd = posix.open_existing(paths.control, write)
        try:
            _check_header(fd, paths)
        except BaseException:
            os.close(fd)
            raise
        return cls(paths, fd)

    @classmethod
    def create_or_open(cls, paths: PoolPaths) -> ControlPage:
        """Opened for writing; made first where there is none. Built aside and linked into place, so never half made."""
        while True:
            try:
                return cls.open(paths, write=True)
            except NotFound:
                new = temporary(paths.control)
                fd = posix.create(new)
                try:
                    posix.allocate(fd, 0, FILE_SIZE, new)
                    posix.write_exactly(fd, _HEADER.pack(MAGIC, LAYOUT, BYTE_ORDER, SLOT_OFFSET, SLOT_SIZE), 0, new)
                    posix.link_new(new, paths.control)
                except NotFound:
                    pass  # swept by another sidecar, which has a page then
                finally:
                    os.close(fd)
                    posix.remove(new)

    @property
    def current(self) -> bool:
        """Whether the pool's name still leads to this page, and not to a newer one or to none."""
        return posix.same_file(self.fd, self.paths.control)

    @property
    def sidecar_alive(self) -> bool:
        return posix.byte_is_locked(self.fd, LIFE_BYTE)

    def read(self) -> Catalog:
        """The newest whole catalog. Never blocks. Raises NotFound before the first was written, Damaged if none is whole."""
        for attempt in range(_READ_ATTEMPTS):
            slots = [self._read_slot(index) for index in (0, 1)]
            whole = [slot for slot in slots if isinstance(slot, tuple)]
            if whole:
                newest = max(whole)
                # Beside a slot that is being written, the other is the newest only if it is still what it was: otherwise we
                # have been asleep for two writes, and would go back to a catalog older than one we may have seen.
                if False not in slots or self._read_slot(slots.index(newest)) == newest:
                    return self._ours(decode(newest[1], newest[0]))
                continue
            if slots == [None, None]:
                raise NotFound(
                    f"pool {self.paths.pool!r} holds nothing yet: its sidecar is just starting, or died doing so"
                )
            time.sleep(0.001 * min(attempt, 10))
        raise Damaged(f"both catalogs of pool {self.paths.pool!r} are torn: run 'ballast purge' and start the sidecar")

    def _ours(self, catalog: Catalog) -> Catalog:
        if catalog.pool not in ("", self.paths.pool):
            raise Damaged(
                f"{self.paths.control} is the control page of pool {catalog.pool[:80]!r}, which somebody has put under another "
                "name: remove it, and give the pool a directory of its own (--dir)"
            )
        return catalog

    def _read_slot(self, index: int) -> Optional[tuple[int, bytes]] | bool:
        """(sequence, payload); None if it was never written; False if it is torn."""
        start = SLOT_OFFSET + index * SLOT_SIZE
        sequence, length, digest = _SLOT.unpack(posix.read_exactly(self.fd, _SLOT.size, start, self.paths.control))
        if not sequence:
            return None
        if length > SLOT_SIZE - _SLOT.size:
            return False
        payload = posix.read_exactly(self.fd, length, start + _SLOT.size, self.paths.control)
        return (sequence, payload) if digest == _digest(sequence, payload) else False

    def write(self, catalog: Catalog) -> Catalog:
        """Publishes `catalog` as the newest and returns it with its sequence number. For the sidecar only."""
        payload = encode(catalog)
        if len(payload) > SLOT_SIZE - _SLOT.size:
            raise Damaged(f"the catalog of pool {self.paths.pool!r} is full: serve fewer models in one pool")
        slots = [self._read_slot(index) for index in (0, 1)]
        sequences = [slot[0] if isinstance(slot, tuple) else 0 for slot in slots]
        sequence = max(*sequences, self._sequence) + 1
        start = SLOT_OFFSET + sequences.index(min(sequences)) * SLOT_SIZE
        posix.write_exactly(self.fd, payload, start + _SLOT.size, self.paths.control)
        slot = _SLOT.pack(sequence, len(payload), _digest(sequence, payload))
        posix.write_exactly(self.fd, slot, start, self.paths.control)
        self._sequence = sequence
        return dataclasses.replace(catalog, sequence=sequence)

    def close(self) -> None:
        posix.close_kept(self.fd, self.inode)


def _digest(sequence: int, payload: bytes) -> bytes:
    return hashlib.blake2b(_KEY.pack(sequence, len(payload)) + payload, digest_size=32).digest()


def _check_header(fd: int, paths: PoolPaths) -> None:
    size = os.fstat(fd).st_size
    remedy = "stop its sidecar and run 'ballast purge'"
    if size != FILE_SIZE:
        raise Damaged(f"{paths.control} has {size} bytes and not {FILE_SIZE}: {remedy}")
    magic, layout, order, offset, slot = _HEADER.unpack(posix.read_exactly(fd, _HEADER.size, 0, paths.control))
    if magic != MAGIC or order != BYTE_ORDER:
        raise Damaged(f"{paths.control} is not a control page of Ballast: {remedy}")
    if layout != LAYOUT:
        raise Damaged(
            f"{paths.control} has layout {layout} and this is a Ballast of layout {LAYOUT}: use the same version for "
            f"sidecar and engine, or {remedy}"
        )
    if (offset, slot) != (SLOT_OFFSET, SLOT_SIZE):
        raise Damaged(f"{paths.control} has slots where none can be: {remedy}")
