"""What people look at: a pool's models, who holds them, what is left over; and waiting until a model is ready.

Everything here only reads, as an engine does, and works whether the sidecar lives, is busy, or is dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_shim.handoff import attachment, catalog, holder, manifest, publication, request, room
from engine_shim.handoff.attachment import Record
from engine_shim.handoff.catalog import Catalog, ControlPage, Generation
from engine_shim.handoff.errors import NOT_AS_PUBLISHED, Damaged, DeviceError, HandoffError, NotFound, NotReady
from engine_shim.handoff.manifest import DeviceCopy, Manifest
from engine_shim.handoff.names import DEFAULT_DIR, ObjectName, PoolPaths
from sidecar import pool

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LOOK_EVERY = 0.1  # seconds; polling, since a ring of the bell is for one waiter and an engine should have it

# Told how far a model is that is waited for: name, bytes done, bytes in all, state.
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Leftover:
    """An object in shared memory that belongs to nobody alive. The next sidecar of the pool sweeps it."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class PoolStatus:
    """One pool at one moment. Sizes in bytes, times in seconds since the epoch."""

    paths: PoolPaths
    sidecar_alive: bool
    boot: str | None
    problem: str | None  # why there is no catalog to look at
    generations: tuple[Generation, ...]
    attachments: tuple[Record, ...]
    leftovers: tuple[Leftover, ...]
    bytes: int  # of shared memory that the pool's objects take
    room: room.Room
    devices: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # generation -> GPU -> "resident", or why not

    def attached(self, generation: Generation) -> int:
        return sum(record.generation == generation.number for record in self.attachments)

    def as_json(self) -> dict[str, Any]:
        """What `ballast status --json` prints of a pool."""
        return {
            "pool": self.paths.pool,
            "dir": str(self.paths.dir),
            "sidecar": {"alive": self.sidecar_alive, "boot": self.boot},
            "problem": self.problem,
            "bytes": self.bytes,
            "room": self.room.bytes,
            "generations": [
                {
                    "model": generation.model,
                    "generation": generation.number,
                    "kind": generation.kind,
                    "state": generation.state,
                    "bytes": generation.total,
                    "bytes_done": generation.done,
                    "since": generation.since,
                    "reason": generation.reason or None,
                    "key": generation.key or None,
                    "evicted": generation.evicted,
                    "attachments": self.attached(generation),
                    "devices": dict(self.devices.get(generation.number, {})),
                }
                for generation in self.generations
            ],
            "attachments": [asdict(record) for record in self.attachments],
            "leftovers": [asdict(leftover) for leftover in self.leftovers],
        }


def look(paths: PoolPaths) -> PoolStatus:
    """The pool as it is now. Raises NotFound if nothing of it is there."""
    now: Catalog | None = None
    problem = None
    alive = False
    try:
        page = ControlPage.open(paths)
    except HandoffError as error:
        problem = str(error)
    else:
        try:
            alive = page.sidecar_alive
            now = page.read()
        except HandoffError as error:
            problem = str(error)
        finally:
            page.close()
    objects = paths.objects()
    if not objects:
        raise NotFound(f"there is no pool {paths.pool!r} in {paths.dir}: start it with 'ballast serve', or check --dir")
    records = tuple(attachment.alive(paths))
    return PoolStatus(
        paths=paths,
        sidecar_alive=alive,
        boot=now.boot if now else None,
        problem=problem,
        generations=now.generations if now else (),
        attachments=records,
        leftovers=tuple(_leftovers(paths, objects, now, records)),
        bytes=sum(_allocated(paths.dir / found.file) for found in objects),
        room=room.room(paths.dir),
        devices=_devices(paths),
    )


def _devices(paths: PoolPaths) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for number, page in holder.pages(paths):
        where = {gpu: "resident" if gpu in page.gpus else "being freed once unused" for gpu in page.held}
        found.setdefault(number, {}).update({**where, **page.lacking})
    return found


def exists(paths: PoolPaths) -> bool:
    """Whether anything of the pool is there, be it only a semaphore."""
    semaphores = [Path(DEFAULT_DIR) / f"sem.{name.lstrip('/')}" for name in (paths.guard, paths.bell)]
    return bool(paths.objects()) or any(os.path.lexists(path) for path in semaphores)  # sem_overview(7) on their place


def _allocated(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def _leftovers(
    paths: PoolPaths, objects: list[ObjectName], now: Catalog | None, records: tuple[Record, ...]
) -> Iterator[Leftover]:
    """What the next sweep removes, by the same rules (PoolWriter.sweep), and why."""
    listed = {generation.number for generation in now.generations} if now else set()
    building = {g.number for g in now.generations if g.state == catalog.LOADING} if now else set()
    alive = {record.identifier for record in records}
    for name in objects:
        path = paths.dir / name.file
        why = ""
        if name.generation is not None:
            if name.generation not in listed:
                why = "of a generation that the catalog does not list"
            elif name.tmp and name.generation not in building:
                why = "unfinished, and nothing is being loaded"
        elif name.kind in ("request", "answer"):
            why = "of a command that is gone" if request.abandoned(paths, path) else ""
        elif name.kind == "ctl":
            why = "an unfinished control page" if name.tmp else ""
        elif name.kind == "attachment":
            if name.file.rpartition(".")[2] not in alive and not name.tmp:
                why = "the record of an engine that is gone"
        elif name.tmp and publication.alive(path) is False:
            why = "a publication whose engine is gone"
        if why:
            yield Leftover(name.file, _allocated(path), why)


# On a terminal --------------------------------------------------------------------------------------------------------


def show(status: PoolStatus, console: Console) -> None:
    """Prints one pool as tables."""
    from rich.text import Text

    heading = Text(f"pool {status.paths.pool}", style="bold")
    heading.append(
        f" in {status.paths.dir}: {room.gib(status.bytes)} held, {room.gib(status.room.bytes)} free, ", style=""
    )
    heading.append(*("sidecar alive", "green") if status.sidecar_alive else ("no sidecar", "red"))
    console.print(heading)
    if status.problem:
        console.print(Text(printable(status.problem), style="red"))
    now = time.time()
    if status.generations:
        table = _table("model", "generation", "kind", "state", ">size", ">age", ">attached", "")
        for g in sorted(status.generations, key=lambda g: (g.model, -g.number)):
            detail = printable(g.reason)
            if g.state == catalog.LOADING:
                detail = f"{100 * g.done // (g.total or 1)} %" + ("" if status.sidecar_alive else ", stopped")
            state = "evicted" if g.evicted else g.state
            for gpu, how in status.devices.get(g.number, {}).items():
                detail += f"{'; ' if detail else ''}{printable(gpu)}: {printable(how)}"
            table.add_row(
                g.model, str(g.number), g.kind, Text(state, style=_STYLES[g.state]), room.gib(g.total),
                age(now - g.since), str(status.attached(g)), Text(detail),
            )  # fmt: skip
        console.print(table)
    if status.attachments:
        table = _table("attached to", "generation", "engine", ">pid", "host", ">age", "note", "command")
        for record in sorted(status.attachments, key=lambda record: (record.model, record.generation, record.since)):
            texts = (record.engine or "-", str(record.pid), record.host, age(now - record.since), record.note, record.command)
            table.add_row(printable(record.model), str(record.generation), *(Text(printable(text)) for text in texts))
        console.print(table)
    for leftover in status.leftovers:
        text = f"left over: {printable(leftover.name)}, {room.gib(leftover.bytes)}, {leftover.why}"
        console.print(Text(text, style="yellow"))
    if status.leftovers:
        how = "it is swept in a moment" if status.sidecar_alive else "the next 'ballast serve' sweeps it"
        console.print(Text(f"{how}; 'ballast purge' removes a whole pool", style="dim"))


_STYLES = {catalog.READY: "green", catalog.LOADING: "yellow", catalog.RETIRED: "dim", catalog.FAILED: "red"}


def _table(*columns: str) -> Table:
    """A plain table; a column whose title begins with > is set to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in columns:
        right = title.startswith(">")
        wraps = title in ("", "note", "command")  # what people write, of any length
        table.add_column(title.lstrip(">"), justify="right" if right else "left", no_wrap=not wraps, overflow="fold")
    return table


def age(seconds: float) -> str:
    """A duration in the largest unit that makes it at least one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """What another process wrote, on one line and without anything that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


# Waiting --------------------------------------------------------------------------------------------------------------


def wait_until_ready(paths: PoolPaths, model: str | None, timeout: float, tell: Progress | None = None) -> list[str]:
    """Waits until `model`, or with None every model of the pool, can be attached to; returns the names.

    The pool need not be there yet. Raises NotReady or NotFound after `timeout` seconds, HandoffError as soon as a living
    sidecar says that it cannot load the model.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _ready(paths, model, tell)
        except _Evicted as error:  # without an error: it may be gone again before we have looked
            if time.monotonic() >= deadline:
                raise NotReady(f"after {timeout:g} s, {error}") from None
            request.ask(paths, request.LOAD, error.model, max(1.0, deadline - time.monotonic()))
        except (NotFound, NotReady) as error:
            if time.monotonic() >= deadline:
                raise type(error)(f"after {timeout:g} s, {error}") from None
        time.sleep(max(0.0, min(_LOOK_EVERY, deadline - time.monotonic())))


class _Evicted(NotReady):
    """Not in memory to keep the pool within its budget; the sidecar loads it when it is asked to."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model!r} is not in memory: {reason}")
        self.model = model


def _ready(paths: PoolPaths, model: str | None, tell: Progress | None) -> list[str]:
    page = ControlPage.open(paths)
    try:
        now, alive = page.read(), page.sidecar_alive
    finally:
        page.close()
    # A pool as a whole is ready without what does not fit its budget anyway.
    aside = {g.model for g in now.generations if g.evicted}
    wanted = [model] if model is not None else [name for name in now.models() if name not in aside]
    missing: HandoffError | None = None
    for name in wanted:
        generations = now.of_model(name)
        states = {generation.state: generation for generation in reversed(generations)}
        if catalog.READY in states:
            continue
        if catalog.LOADING in states and alive:
            loading = states[catalog.LOADING]
            if tell:
                tell(name, loading.done, loading.total, loading.state)
            missing = missing or NotReady(
                f"{name!r} is still being loaded ({room.gib(loading.done)} of {room.gib(loading.total)}): wait longer"
            )
        elif catalog.FAILED in states and alive:
            if states[catalog.FAILED].evicted:
                raise _Evicted(name, states[catalog.FAILED].reason)
            raise HandoffError(f"the sidecar could not load {name!r}: {states[catalog.FAILED].reason}")
        elif not alive:  # a failure that it left may be cured by the next sidecar
            missing = missing or NotReady(
                f"{name!r} is not ready and its sidecar is gone: restart it with 'ballast serve'"
            )
        else:
            held = ", ".join(now.models()) or "no model yet"
            missing = missing or NotFound(
                f"pool {paths.pool!r} holds {held} and not {name!r}: name it in 'ballast serve'"
            )
    if missing:
        raise missing
    if not wanted:
        raise NotReady(f"pool {paths.pool!r} holds no model yet: see its sidecar's log")
    return wanted


# Manifests ------------------------------------------------------------------------------------------------------------


def find_manifest(paths: PoolPaths, model: str, number: int | None = None) -> Manifest:
    """The manifest of one generation of `model`: that number, or the newest that is ready, or else being loaded.

    Raises NotFound, or Damaged and others of the protocol.
    """
    page = ControlPage.open(paths)
    try:
        now = page.read()
    finally:
        page.close()
    known = [g for g in now.of_model(model) if g.state != catalog.FAILED and number in (None, g.number)]
    known.sort(key=lambda generation: generation.state != catalog.READY)
    if not known:
        what = f"generation {number} of {model!r}" if number is not None else f"{model!r}"
        held = ", ".join(f"{g.model} ({g.number})" for g in now.generations) or "nothing"
        raise NotFound(f"pool {paths.pool!r} does not hold {what}: it holds {held}")
    return read_manifest(paths, known[0])


def read_manifest(paths: PoolPaths, generation: Generation) -> Manifest:
    """The manifest of a generation of the catalog. Raises NotFound, Damaged and others of the protocol."""
    path = paths.manifest(generation.number)
    contents = manifest.read(path)
    if (contents.generation, contents.model) != (generation.number, generation.model):
        raise Damaged(f"{path} is the manifest of something else: restart the sidecar to have it loaded again")
    return contents


def manifest_json(contents: Manifest) -> dict[str, Any]:
    """What `ballast manifest --json` prints."""
    return {
        "model": contents.model,
        "generation": contents.generation,
        "kind": contents.kind,
        "complete": contents.complete,
        "created": contents.created,
        "source": contents.source,
        "bytes": contents.nbytes,
        "segments": list(contents.segments),
        "config": dict(contents.config),
        "shards": [
            {
                "name": shard.name,
                "bytes": shard.identity.size,
                "segment": shard.segment,
                "header_digest": shard.identity.header,
                "sample_digest": shard.identity.sample,
                "metadata": shard.metadata,
                "tensors": [row.name for row in contents.rows(shard)],
            }
            for shard in contents.shards
        ],
        "tensors": [
            {
                "name": row.name,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "segment": row.segment,
                "offset": row.offset,
                "bytes": row.nbytes,
                "digest": row.digest,
            }
            for row in contents.tensors
        ],
    }


def manifest_lines(contents: Manifest) -> Iterator[str]:
    """The same for people, line by line: there may be a million tensors."""
    yield f"{contents.model}, generation {contents.generation}, {contents.kind}, from {printable(contents.source) or '-'}"
    yield (
        f"{len(contents.tensors)} tensors, {room.gib(contents.nbytes)}, {len(contents.segments)} segments, "
        f"{len(contents.shards)} files"
    )
    yield ""
    rows = [
        (
            printable(r.name),
            r.dtype,
            "x".join(map(str, r.shape)) or "scalar",
            f"w{r.segment}",
            str(r.offset),
            str(r.nbytes),
        )
        for r in contents.tensors
    ]
    titles = ("tensor", "dtype", "shape", "segment", "offset", "bytes")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row, digest in zip((titles, *rows), ("digest", *(r.digest or "-" for r in contents.tensors)), strict=True):
        cells = [
            cell.rjust(width) if index > 3 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join((*cells, digest))


# Verifying ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """What computing a generation's digests again has shown. `damaged` names tensors; `problem` is of the manifest."""

    model: str
    generation: int
    tensors: int
    bytes: int
    seconds: float
    damaged: tuple[str, ...] = ()
    problem: str | None = None
    residency: str = "host"

    @property
    def intact(self) -> bool:
        return not self.damaged and self.problem is None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "intact": self.intact}


def verify(paths: PoolPaths, model: str | None = None, device: bool = False) -> Iterator[Verified]:
    """Computes the digests of every ready generation, of `model` or of all models, from the bytes in memory now; with `device`
    also of the copies on GPUs, which are read back for it.

    Holds an attachment meanwhile, so that nothing is freed under it. Raises NotFound if there is nothing to verify, and
    HandoffError if it cannot be looked at: that is no damage.
    """
    page = ControlPage.open(paths)
    try:
        now = page.read()
        ready = [g for g in now.generations if g.state == catalog.READY and model in (None, g.model)]
        if not ready:
            held = ", ".join(now.models()) or "nothing"
            what = "no model that is ready" if model is None else f"no {model!r} that is ready"
            raise NotFound(f"pool {paths.pool!r} has {what} (it holds {held}): see 'ballast status'")
        for generation in ready:
            token = attachment.Token.take(paths, generation.number, generation.model, "ballast verify")
            try:
                still = page.read().get(generation.number)
                if still is not None and still.state == catalog.READY:
                    yield _verify(paths, generation)
                    if device:
                        yield from _verify_copies(paths, generation)
            finally:
                token.release()
    finally:
        page.close()


def _verify(paths: PoolPaths, generation: Generation) -> Verified:
    began = time.monotonic()
    try:
        contents = read_manifest(paths, generation)
        if not contents.complete:
            raise Damaged(f"{paths.manifest(generation.number)} has no digests, although the catalog calls it ready")
        damaged = [what for what, _ in pool.damaged(paths, contents)]
    except NOT_AS_PUBLISHED as error:
        return Verified(generation.model, generation.number, 0, generation.total, 0.0, problem=str(error))
    return Verified(
        generation.model, generation.number, len(contents.tensors), contents.nbytes, time.monotonic() - began,
        tuple(damaged),
    )  # fmt: skip


class _Kept:
    """Stands where an engine's lease stands: here the attachment is given up by hand, once the copy is closed."""

    def hold(self, thing: object) -> None:
        pass


def _verify_copies(paths: PoolPaths, generation: Generation) -> Iterator[Verified]:
    try:
        contents = read_manifest(paths, generation)
    except NOT_AS_PUBLISHED:
        return  # that was said of the host residency
    for copy in contents.devices:
        began = time.monotonic()
        token = attachment.Token.take(
            paths, generation.number, generation.model, "ballast verify", residency=holder.DEVICE + copy.gpu
        )
        try:
            damaged, problem = tuple(_damaged_on_device(paths, contents, copy)), None
        except (*NOT_AS_PUBLISHED, DeviceError) as error:
            damaged, problem = (), str(error)
        finally:
            token.release()
        yield Verified(
            generation.model, generation.number, len(contents.tensors), contents.nbytes, time.monotonic() - began,
            damaged, problem, holder.DEVICE + copy.gpu,
        )  # fmt: skip


def _damaged_on_device(paths: PoolPaths, contents: Manifest, copy: DeviceCopy) -> Iterator[str]:
    """The names of the tensors whose bytes on a GPU are not what was published. As an engine would see them: by the handles."""
    from engine_shim import device
    from sidecar import digest

    where = device.gpu(copy.gpu)
    watch = holder.Watch(paths, copy.holder)
    try:
        device.check_served(paths, contents, copy, watch)
        opened = device.import_copy(copy, where, _Kept())
        buffer = bytearray(digest.BLOCK)
        for row in contents.tensors:
            parts = []
            for offset, size in digest.blocks(row.nbytes):
                view = memoryview(buffer)[:size]
                if size:
                    opened.read(row, offset, view)
                parts.append(digest.block(view))
            if digest.join(parts) != row.digest:
                yield row.name
    finally:
        watch.close()
