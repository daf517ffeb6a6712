"""Which of a model's kept generations is served: forward with new weights, back on request.

Engines take the newest ready generation, always. Going back therefore makes a new one, which holds what the previous one
held: the same segments under new names. No reader has to know of it, nothing is copied, and engines that are attached keep
what they have. The files of what was gone back from are still on disk and must not undo it, while they stay as they are: so
the new one's manifest says in `over` what they are, whatever becomes of the generation that was loaded from them. Once other
files are there, that is over.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from engine_shim.handoff import manifest
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import HandoffError, NotFound
from engine_shim.handoff.manifest import Manifest
from sidecar.checkpoint import Checkpoint
from sidecar.pool import PoolWriter

log = logging.getLogger("ballast")


def kept(pool: PoolWriter, model: str) -> list[tuple[Generation, Manifest]]:
    """A model's ready generations with their manifests, newest first; what cannot be read is left out."""
    found = []
    for generation in pool.ready(model):
        try:
            found.append((generation, manifest.read(pool.paths.manifest(generation.number))))
        except HandoffError as error:
            log.warning("%s, generation %d: %s", model, generation.number, error)
    return found


def files(of: Manifest | Checkpoint) -> list[list[Any]]:
    """Name, header and state of each weight file: as a generation was loaded from it, or as it is on disk."""
    if isinstance(of, Manifest):
        return [[shard.name, shard.identity.header, manifest.stat_row(shard.identity.stat)] for shard in of.shards]
    return [[shard.name, shard.header_digest, manifest.stat_row(shard.stat)] for shard in of.shards]


def gone_back(newest: Manifest, now: Checkpoint | Manifest) -> bool:
    """Whether the files are those that the newest generation was rolled back from: by their state, or once they were read, by
    what they hold."""
    by = newest.over.get
    return bool(newest.over) and (by("files") == files(now) or by("content") == getattr(now, "content", None))


def settle(pool: PoolWriter, generation: Generation, back: bool = False) -> Generation:
    """The files on disk hold what this ready generation does, or, with `back`, are those that it was rolled back from. Returns
    the one that is served from now on: the newest, if it holds the same or was rolled back from that; and otherwise this
    one's content once more: the files were put back.

    Raises NotFound if it is ready no longer.
    """
    with pool.lock:
        ready = pool.ready(generation.model)
        if generation.number not in [g.number for g in ready]:
            raise NotFound(f"generation {generation.number} was retired meanwhile: the files are looked at again")
        newest = ready[0]
        if back:
            return generation
        if generation.number == newest.number or generation.content == newest.content != "":
            return _ended(pool, newest)
        if generation.content == manifest.read(pool.paths.manifest(newest.number)).over.get("content"):
            return newest
        made = pool.again(generation.number)
    log.info(
        "%s: the files of generation %d are back; generation %d holds the same", made.model, generation.number, made.number
    )
    return made


def _ended(pool: PoolWriter, newest: Generation) -> Generation:
    """Forgets that the newest was rolled back to: its own files are there."""
    if newest.over:
        pool.amend(newest.number, lambda contents: dataclasses.replace(contents, over={}))
    return newest


def rollback(pool: PoolWriter, model: str) -> Generation:
    """Serves what the model's previous kept generation holds. Raises NotFound if there is none."""
    with pool.lock:
        ready = pool.ready(model)
        if len(ready) < 2:
            have = f"only generation {ready[0].number} of {model!r} is there" if ready else f"{model!r} has no ready generation"
            raise NotFound(f"{have}, so there is nothing to go back to: put the older files in place, and they are loaded")
        newest = manifest.read(pool.paths.manifest(ready[0].number))
        disk = newest.over or {"content": ready[0].content, "files": files(newest)}
        if disk["content"] == ready[1].content:  # forward again, to what the files hold
            made = pool.again(ready[1].number)
        else:
            made = pool.again(ready[1].number, ready[0].number, disk)
    log.info(
        "%s: rolled back from generation %d; generation %d holds what generation %d held",
        model, ready[0].number, made.number, ready[1].number,
    )  # fmt: skip
    return made
