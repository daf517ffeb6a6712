"""The name of every object in shared memory, in one place.

A pool is a family of files `ballast-<pool>.…` in one directory of a memory file system. Pool names hold no dot, so one
pool's prefix is never the beginning of another's. An object under construction ends in `.tmp` until it is renamed.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Optional

from engine_shim.handoff import posix
from engine_shim.handoff.errors import NameRefused

DEFAULT_POOL = "main"
DEFAULT_DIR = "/dev/shm"  # where glibc keeps POSIX shared memory: shm_overview(7)
PREFIX = "ballast-"
TMP = ".tmp"

_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_MODEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,254}[A-Za-z0-9._-])?\Z")
_OBJECT = re.compile(
    r"(?:(?P<ctl>ctl)|g(?P<generation>[0-9]{1,18})\.(?:(?P<manifest>manifest)|w(?P<segment>[0-9]{1,9}))"
    r"|a\.(?P<attachment>[0-9a-f]{16})|do\.(?P<request>[0-9a-f]{16})|did\.(?P<answer>[0-9a-f]{16})"
    r"|d\.(?P<holder>[0-9a-f]{16})(?:\.g(?P<copy>[0-9]{1,18}))?"
    r"|in\.(?P<publication>[0-9a-f]{16})(?:\.w(?P<part>[0-9]{1,9}))?)"
    r"(?P<tmp>(?:\.[0-9a-f]{16})?\.tmp)?\Z"
)


def check_pool(name: str) -> str:
    """`name`, if a pool may be called so; raises NameRefused otherwise."""
    if not _POOL.match(name):
        raise NameRefused(
            f"{name!r} cannot name a pool: use 1 to 64 letters, digits, '-' or '_', beginning with a letter or digit"
        )
    return name


def check_model(name: str) -> str:
    """`name`, if a model may be called so; raises NameRefused otherwise."""
    if not _MODEL.match(name) or "//" in name or ".." in name:
        raise NameRefused(
            f"{name!r} cannot name a model: use up to 256 letters, digits, '.', '_', '-' and single '/' between them, "
            "beginning with a letter or digit (give one with --name)"
        )
    return name


def new_id() -> str:
    """Sixteen random hexadecimal digits, for records that need a name of their own."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class ObjectName:
    """A parsed file name of a pool: which kind of object it is, and of which generation."""

    file: str
    kind: str  # ctl | manifest | segment | attachment | publication | request | answer | holder | copies
    generation: Optional[int]
    tmp: bool


@dataclass(frozen=True)
class PoolPaths:
    """Where the objects of one pool are. Immutable and cheap: it only joins strings."""

    pool: str = DEFAULT_POOL
    dir: Path = Path(DEFAULT_DIR)
    group: Optional[int] = field(default=None, compare=False)  # for the sidecar: whom to let read what it makes

    def __post_init__(self) -> None:
        check_pool(self.pool)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, pool: Optional[str] = None) -> PoolPaths:
        """The pool that `BALLAST_POOL` and `BALLAST_DIR` name; `pool`, where given, wins over the former."""
        name = pool or environ.get("BALLAST_POOL") or DEFAULT_POOL
        return cls(name, Path(environ.get("BALLAST_DIR") or DEFAULT_DIR))

    def path(self, rest: str) -> Path:
        return self.dir / f"{PREFIX}{self.pool}.{rest}"

    @property
    def control(self) -> Path:
        return self.path("ctl")

    def manifest(self, generation: int) -> Path:
        return self.path(f"g{generation}.manifest")

    def segment(self, generation: int, index: int) -> Path:
        return self.path(f"g{generation}.w{index}")

    def attachment(self, identifier: str) -> Path:
        return self.path(f"a.{identifier}")

    def holder(self, identifier: str) -> Path:
        return self.path(f"d.{identifier}")

    def copies(self, identifier: str, generation: int) -> Path:
        """What a holder says of one generation's device copies."""
        return self.path(f"d.{identifier}.g{generation}")

    def publication(self, identifier: str) -> Path:
        """The manifest of an engine's publication; its segments are `publication_segment`s."""
        return self.path(f"in.{identifier}")

    def publication_segment(self, identifier: str, index: int) -> Path:
        return self.path(f"in.{identifier}.w{index}")

    def request(self, identifier: str) -> Path:
        """What a command asks of the sidecar; its answer is `answer`."""
        return self.path(f"do.{identifier}")

    def answer(self, identifier: str) -> Path:
        return self.path(f"did.{identifier}")

    @property
    def guard(self) -> str:
        return f"/{PREFIX}{self.pool}.guard"

    @property
    def bell(self) -> str:
        return f"/{PREFIX}{self.pool}.bell"

    def parse(self, file: str) -> Optional[ObjectName]:
        """What `file`, a name in the pool's directory, is; None if it is not this pool's or of no kind known."""
        prefix = f"{PREFIX}{self.pool}."
        if not file.startswith(prefix):
            return None
        found = _OBJECT.match(file[len(prefix) :])
        if not found:
            return None
        part = found.groupdict()
        kind = (
            "ctl" if part["ctl"] else "manifest" if part["manifest"] else "segment" if part["segment"]
            else "attachment" if part["attachment"] else "request" if part["request"] else "answer" if part["answer"]
            else "copies" if part["copy"] else "holder" if part["holder"]
            else "publication"
        )  # fmt: skip
        generation = int(part["generation"]) if part["generation"] else None
        return ObjectName(file, kind, generation, part["tmp"] is not None)

    def objects(self) -> list[ObjectName]:
        """Every object of this pool that is there now, whole or under construction. Raises HandoffError."""
        return [found for found in map(self.parse, sorted(posix.files(self.dir))) if found]


def temporary(path: Path) -> Path:
    """A name for `path` while it is under construction, nobody else's."""
    return path.with_name(f"{path.name}.{new_id()}{TMP}")


def pools(directory: Path = Path(DEFAULT_DIR)) -> list[str]:
    """The names of the pools that have an object in `directory`."""
    found = set()
    for file in os.listdir(directory) if directory.is_dir() else []:
        if file.startswith(PREFIX) and "." in file:
            name = file[len(PREFIX) :].split(".", 1)[0]
            if _POOL.match(name) and PoolPaths(name, directory).parse(file):
                found.add(name)
    return sorted(found)
