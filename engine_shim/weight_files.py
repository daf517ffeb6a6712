"""What an engine was told to load: the content of its weight files, as one digest, and the model's name in the pool.

Files that the sidecar has read and that were not written to since are known by their `stat`; others are read as far as their
identity goes (header and samples). Where an engine's container holds no weight files, BALLAST_MODEL names a checkpoint of the
pool, and the configuration files that are there must be that checkpoint's.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from engine_shim import ladder
from engine_shim.handoff import catalog, identity
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound
from engine_shim.handoff.identity import Stat
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import check_model

# Beside the weights, these decide what is made of them.
CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "params.json")

OTHER = "?"  # a content that is no generation's


@dataclass(frozen=True)
class Weights:
    """`digest` is equal for equal content, wherever it lies, as far as samples tell; `model` is the name that the pool has for
    it. It was taken of `files`, as they were, or of a `generation` of the pool. `content` is the whole content as the catalog
    has it, where that is known; OTHER where the files have taken the place of some that are."""

    digest: str
    model: str
    content: str = ""
    files: tuple[tuple[str, Stat], ...] = ()
    generation: int = 0

    def unchanged(self, pool: ladder.Pool) -> bool:
        """Whether no file has been written to or exchanged since, and the pool has no newer generation."""
        if self.generation:
            ready = _ready(self.model, pool)
            return bool(ready) and ready[0].number == self.generation
        try:
            return all(Stat.of(os.stat(path)) == state for path, state in self.files)
        except OSError:
            return False


def of_files(
    folder: Path, files: Iterable[str], code: bool, model: Optional[str], pool: ladder.Pool, more: Sequence[Any] = ()
) -> Weights:
    """Of safetensors files on disk. With `code`, the Python files in `folder` count as well, since they are run.

    `more` is what else is to be in the digest. `model` (BALLAST_MODEL) wins over the name that the pool has for the files.
    """
    known, places = _recorded(pool)
    rows = []
    names = set()
    contents: list[set[str]] = []
    states: list[tuple[str, Stat]] = []
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            states.append((file, Stat.of(os.fstat(fd))))
            found = known.get(states[-1][1])
            if found is None:
                header, sample = _read_identity(fd, Path(file))
                there = places.get(os.path.realpath(file))
                contents.append({OTHER} if there is not None and there.dev == states[-1][1].dev else {""})
            else:
                header, sample, name, of = found
                names.add(name)
                contents.append(of)
            rows.append([os.path.basename(file), os.fstat(fd).st_size, header, sample])
        finally:
            os.close(fd)
    name = model or (names.pop() if len(names) == 1 else _name(folder))
    digest = digest_of([sorted(rows), _configs(folder, code), *more])
    return Weights(digest, name, content_of(contents), tuple(states))


def content_of(parts: Sequence[set[str]]) -> str:
    """The content of all files, from what each may belong to."""
    if any(OTHER in part for part in parts):
        return OTHER
    common = set.intersection(*parts) if parts else set()
    return common.pop() if len(common) == 1 else ""


def of_pool(folder: Path, code: bool, model: str, pool: ladder.Pool, more: Sequence[Any] = ()) -> Weights:
    """Of the checkpoint `model` of the pool. Raises NotFound, or Mismatch if a configuration file in `folder` differs."""
    ready = _ready(model, pool)
    if not ready:
        raise NotFound(f"the pool holds no checkpoint {model!r} (BALLAST_MODEL)")
    contents = pool.manifest(ready[0])
    for name in CONFIG_FILES:
        if name in contents.config and file_digest(folder / name) != contents.config[name]:
            raise Mismatch(f"{folder / name} differs from the one that {model!r} was loaded with")
    rows = sorted([s.name, s.identity.size, s.identity.header, s.identity.sample] for s in contents.shards)
    return Weights(digest_of([rows, _configs(folder, code), *more]), model, ready[0].content, generation=ready[0].number)


def _ready(model: str, pool: ladder.Pool) -> list[catalog.Generation]:
    return [g for g in pool.catalog().of_model(model, catalog.READY) if g.kind == catalog.CHECKPOINT]


def _recorded(pool: ladder.Pool) -> tuple[dict[Stat, tuple[str, str, str, set[str]]], dict[str, Stat]]:
    """What the sidecar knows of files that were not written to since: state of a file -> header, sample, model, the contents
    that it is part of. And which file it read at each place."""
    found: dict[Stat, tuple[str, str, str, set[str]]] = {}
    places: dict[str, Stat] = {}
    for generation in sorted(pool.catalog().generations, key=lambda g: g.number):
        if generation.kind == catalog.CHECKPOINT and generation.state == catalog.READY:
            try:
                contents: Manifest = pool.manifest(generation)
            except HandoffError:
                continue
            for shard in contents.shards:
                known = shard.identity
                if known.stat is not None:
                    _, _, _, of = found.get(known.stat, ("", "", "", set()))
                    found[known.stat] = (known.header, known.sample, generation.model, of | {generation.content})
                    places[os.path.realpath(contents.file(shard))] = known.stat
    return found, places


def _read_identity(fd: int, path: Path) -> tuple[str, str]:
    """A file's header and sample digests, as the sidecar computes them."""
    header, length = identity.header_digest(fd, path)
    document = json.loads(os.pread(fd, length - 8, 8))
    spans = sorted(tuple(row["data_offsets"]) for name, row in document.items() if name != "__metadata__")
    plan = identity.sample_plan([end - begin for begin, end in spans])
    return header, identity.sample_digest(fd, [(length + spans[i][0] + at, count) for i, at, count in plan], path)


def _configs(folder: Path, code: bool) -> Mapping[str, Optional[str]]:
    names = [name for name in CONFIG_FILES if (folder / name).exists()]
    if code:
        names += sorted(path.name for path in folder.glob("*.py"))
    return {name: file_digest(folder / name) for name in names}


def file_digest(path: Path) -> Optional[str]:
    try:
        return identity.digest(path.read_bytes())
    except OSError:
        return None


def digest_of(value: Any) -> str:
    """Of anything that JSON can tell. Raises TypeError for what it cannot."""
    return identity.digest(json.dumps(value, sort_keys=True, allow_nan=True).encode())


def _name(folder: Path) -> str:
    """A name for a model that the pool does not know: as the sidecar would call its folder."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):  # a hub's cache
        candidate = folder.parent.parent.name[len("models--") :].replace("--", "/")
    else:
        candidate = folder.name
    try:
        return check_model(candidate)
    except HandoffError:
        return "engine-state"
