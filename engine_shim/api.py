"""The public API: open a model, attach it to a module, publish a module's state.

Unlike the hooks, which fall back to the engine's own loading, these functions raise: whoever calls them asked for Ballast.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Mapping, Optional, Union

import torch

from engine_shim import device as devices
from engine_shim import ladder, modules, onboard, state
from engine_shim.handoff import catalog, identity
from engine_shim.handoff.catalog import Catalog, Generation
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound, NotReady
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication
from engine_shim.handoff.room import gib
from engine_shim.mapping import Residency, Tensors
from engine_shim.weight_files import OTHER

_LATE_LOOKS = 5  # each of them means that a generation was replaced in the millisecond that attaching takes

PathLike = Union[str, "os.PathLike[str]"]


class Model:
    """An opened generation of a model's checkpoint weights. Keeps its lease while it or any of its tensors live.

    Attributes: `name`, `generation` (its number), `tensors` (name → torch tensor, made when first asked for, in the
    order of the files' headers), `metadata` (file → its `__metadata__`), `manifest`.
    """

    def __init__(self, contents: Manifest, segments: Residency) -> None:
        self.name = contents.model
        self.generation = contents.generation
        self.manifest = contents
        self.metadata = {shard.name: dict(shard.metadata or {}) for shard in contents.shards}
        self.tensors: Mapping[str, torch.Tensor] = Tensors(contents, segments)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors in a dictionary of its own, as `torch.nn.Module.load_state_dict` takes it."""
        return dict(self.tensors)

    def close(self) -> None:
        """Lets go of the tensors. Those that the program still holds stay valid, and so does the lease for them."""
        self.tensors = {}

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.name!r} generation {self.generation}: {len(self.tensors)} tensors>"


def open(
    name: Optional[str] = None,
    *,
    pool: Optional[str] = None,
    wait: Optional[float] = None,
    checkpoint: Optional[PathLike] = None,
    device: Optional[devices.Device] = None,
) -> Model:
    """Attaches to the newest ready generation of a model. Zero-copy; costs milliseconds whatever the model's size.

    With a `device` (`"cuda:0"`, a GPU's UUID) the tensors are there: zero-copy where the sidecar keeps a copy on that GPU,
    which then is shared and must not be written to; otherwise each is copied from host memory when it is first asked for.

    `name` may be left out where BALLAST_MODEL names it or the pool holds one model only. `pool` defaults to BALLAST_POOL.
    Waits up to `wait` seconds (default BALLAST_WAIT, 600) for a sidecar that is still loading it. With `checkpoint`, the
    directory (or file) that the caller would otherwise load, the weights must be those: sizes, headers, samples of
    content and config.json are compared.

    Raises NotFound, NotReady, Mismatch, Damaged or Foreign, all of them HandoffError, each one sentence with a remedy.
    """
    view = ladder.pool(PoolPaths.from_environment(pool=pool))
    where = None if device is None else devices.gpu(device)
    settings = ladder.Settings.read()
    limit = settings.wait if wait is None else wait
    progress = ladder.Progress()

    def look(now: Catalog) -> Optional[Generation]:
        model = name or settings.model or _only(now)
        found = ladder.newest(now, model)
        if found is None:
            progress.tell(now.of_model(model)[0])
        return found

    deadline = time.monotonic() + limit
    late = 0
    while True:
        generation = view.wait(look, max(0.0, deadline - time.monotonic()))
        if generation is None:
            raise NotReady(
                f"{name or settings.model or 'the model'} is not ready after {limit:.0f} s: see 'ballast status'"
            )
        try:
            contents = view.manifest(generation)
            segments = ladder.residency(view, generation, contents, where)
            break
        except NotFound:  # retired between two looks: look again; but what is missing from one that stays will not come
            late += time.monotonic() > deadline  # to look again takes no time, so a few times even if there is none left
            if late > _LATE_LOOKS or view.catalog().get(generation.number) == generation:
                raise
    if checkpoint is not None:
        check_checkpoint(contents, Path(checkpoint))
    return Model(contents, segments)


def _only(now: Catalog) -> str:
    models = sorted({g.model for g in now.generations if g.kind == catalog.CHECKPOINT})
    if len(models) != 1:
        held = ", ".join(models) or "none yet"
        raise NotFound(f"say which model (BALLAST_MODEL, or a name): the pool holds {held}")
    return models[0]


def check_checkpoint(contents: Manifest, checkpoint: Path) -> None:
    """Raises Mismatch unless the files at `checkpoint` are the ones that a generation was loaded from."""
    single = checkpoint.is_file()
    for shard in contents.shards:
        path = checkpoint if single and len(contents.shards) == 1 else checkpoint / shard.name
        rows = sorted(contents.rows(shard), key=lambda row: row.start)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Mismatch(f"{path}, which {contents.model!r} was loaded from, cannot be read: {error.strerror}") from None
        try:
            sizes, starts = [row.nbytes for row in rows], [row.start for row in rows]
            identity.File(fd, path).check(shard.identity, sizes, starts, source=contents.file(shard))
        finally:
            os.close(fd)
    if single:
        return
    for name, digest in contents.config.items():
        try:
            found = identity.digest((checkpoint / name).read_bytes())
        except OSError:
            raise Mismatch(f"{checkpoint / name} is not there, but {contents.model!r} has one") from None
        if found != digest:
            raise Mismatch(f"{checkpoint / name} differs from the one that {contents.model!r} was loaded with")


def attach(
    module: torch.nn.Module,
    name: Optional[str] = None,
    *,
    pool: Optional[str] = None,
    wait: Optional[float] = None,
    key: Optional[Mapping[str, Any]] = None,
    checkpoint: Optional[PathLike] = None,
    device: Optional[devices.Device] = None,
) -> torch.nn.Module:
    """Binds a model's weights into `module`, zero-copy, and returns it. The module may be built on `meta` or normally.

    Where the pool holds state that was published for this module's class, this torch and this `key`, that is used;
    otherwise the checkpoint's tensors by name, with the result of `load_state_dict`. Everything is checked before anything is
    touched: raises Mismatch, with the first difference, and leaves the module as it was, also where something outside the
    module looks at its bytes. With a `checkpoint`, as with `open`, published state must be of just those weights. With a
    `device`, on that GPU, as with `open`.
    """
    where = None if device is None else devices.gpu(device)
    published = _published(module, name, pool, key, checkpoint, where)
    _check_own(module)
    # In inference mode, too, the module's tensors become no inference tensors: with `load_state_dict` they do not.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        if published is not None:
            contents, segments = published
            _check_memory(module)
            modules.restore(module, contents, segments)
        else:
            model = open(name, pool=pool, wait=wait, checkpoint=checkpoint, device=device)
            modules.bind(module, model.tensors, model.name)
    return module if where is None else module.to(devices.torch_device(where.ordinal))  # what was not bound follows


def _check_own(module: torch.nn.Module) -> None:
    modules.check_shaped(module)
    try:
        state.check_seen_nowhere_else(module)
    except Mismatch as error:
        raise Mismatch(f"{error}: let go of views of its tensors before attaching, or load it in the ordinary way") from None


def _check_memory(module: torch.nn.Module) -> None:
    """Raises Mismatch if others look at the module's bytes: what is bound takes their place."""
    slots = list(modules.slots(modules.root(module)))
    theirs = modules.elsewhere(slot.tensor for slot in slots)
    for slot in slots:
        if id(slot.tensor) in theirs:
            raise Mismatch(
                f"{slot.label} lies in memory that is shared with other processes, or an array's: attach first and share "
                "afterwards, or load it in the ordinary way"
            )


def _published(
    module: torch.nn.Module,
    name: Optional[str],
    pool: Optional[str],
    key: Optional[Mapping[str, Any]],
    checkpoint: Optional[PathLike],
    where: Optional[devices.Gpu],
) -> Optional[tuple[Manifest, Residency]]:
    view = ladder.pool(PoolPaths.from_environment(pool=pool))
    now = view.catalog()
    model = name or ladder.Settings.read().model or _only(now)
    wanted = modules.key_digest(modules.module_key(module, key))
    contents_of = None if checkpoint is None else _contents_of(view, now, model, Path(checkpoint))
    for generation in now.of_model(model, catalog.READY):
        if generation.kind == catalog.ENGINE and generation.key == wanted and contents_of in (None, generation.content):
            try:
                contents = view.manifest(generation)
                return contents, ladder.residency(view, generation, contents, where)
            except NotFound:
                continue
    return None


def _contents_of(view: ladder.Pool, now: Catalog, model: str, checkpoint: Path) -> str:
    """What the files at `checkpoint` hold, as the catalog has it; OTHER if they are of no generation of the pool."""
    for generation in now.of_model(model, catalog.READY):
        if generation.kind == catalog.CHECKPOINT and generation.content:
            with contextlib.suppress(HandoffError):
                check_checkpoint(view.manifest(generation), checkpoint)
                return generation.content
    return OTHER


def publish(
    module: torch.nn.Module,
    name: str,
    *,
    pool: Optional[str] = None,
    key: Optional[Mapping[str, Any]] = None,
    wait: float = 0.0,
) -> str:
    """Hands the state of `module`, as it is now, to the sidecar, for later `attach`es; returns the publication's id.

    `key` is whatever else that state depends on (ranks, quantisation, arguments that change weights); it must be equal at
    `attach`. The sidecar adopts the publication shortly after; with `wait` this function returns only then. Only shared
    memory is needed besides the module: each tensor is written straight into it. Raises NotFound without a living
    sidecar, NoRoom, Busy, or NotReady after `wait` seconds.
    """
    paths = PoolPaths.from_environment(pool=pool)
    view = ladder.pool(paths)
    page = view.control()
    if not page.sidecar_alive:
        raise NotFound(f"pool {paths.pool!r} has no living sidecar to publish to: start one with 'ballast serve'")
    captured = modules.capture(module)
    full_key = modules.module_key(module, key)
    wanted = modules.key_digest(full_key)
    before = {g.number for g in view.catalog().of_model(name)}
    with Publication(paths, name) as publication:
        for tensor in captured.storages:
            publication.add(tensor)
        publication.commit({**captured.state, **onboard.home(captured)}, full_key, wanted)
        ladder.say_once(
            20, f"published the state of {name} to pool {paths.pool} ({gib(publication.nbytes)}, {publication.identifier})"
        )
        identifier = publication.identifier
    if wait:

        def adopted(now: Catalog) -> Optional[bool]:
            new = [g for g in now.of_model(name) if g.number not in before and g.key == wanted]
            failed = [g for g in new if g.state == catalog.FAILED]
            if failed:
                raise NotReady(f"the sidecar refused the publication: {failed[0].reason}")
            return True if any(g.state == catalog.READY for g in new) else None

        if view.wait(adopted, wait) is None:
            raise NotReady(f"the sidecar did not adopt the publication of {name!r} in {wait:.0f} s: see 'ballast status'")
    return identifier
