"""Which of a model's kept generations is served: forward with new weights, back on request.

Engines take the newest ready generation, always. Going back therefore makes a new one, which holds what the previous one
held: the same segments under new names. No reader has to know of it, nothing is copied, and engines that are attached keep
what they have. `over` in its line of the catalog remembers which generation it stands before, because that one's files are
still on disk and must not undo it: not while they stay as they are, and not by a restart of the sidecar.
"""

from __future__ import annotations

import logging

from engine_shim.handoff import manifest
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import HandoffError, NotFound
from engine_shim.handoff.manifest import Manifest
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


def settle(pool: PoolWriter, generation: Generation) -> Generation:
    """The files on disk are those of this ready generation. Returns the one that is served from now on: the newest, if it
    holds them or was rolled back to from them, and otherwise this one's content once more: the files were put back."""
    newest = pool.ready(generation.model)[0]
    if generation.number == newest.number or newest.over == generation.number or generation.content == newest.content != "":
        return newest
    made = pool.again(generation.number)
    log.info(
        "%s: the files of generation %d are back; generation %d holds the same", made.model, generation.number, made.number
    )
    return made


def rollback(pool: PoolWriter, model: str) -> Generation:
    """Serves what the model's previous kept generation holds. Raises NotFound if there is none."""
    ready = pool.ready(model)
    if len(ready) < 2:
        have = f"only generation {ready[0].number} of {model!r} is there" if ready else f"{model!r} has no ready generation"
        raise NotFound(f"{have}, so there is nothing to go back to: put the older files in place, and they are loaded")
    made = pool.again(ready[1].number, over=ready[0].number)
    log.info(
        "%s: rolled back from generation %d; generation %d holds what generation %d held",
        model, ready[0].number, made.number, ready[1].number,
    )  # fmt: skip
    return made
