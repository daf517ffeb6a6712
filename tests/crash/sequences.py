"""What processes of Ballast do, as sequences that can be run, recorded and cut short anywhere.

Each prepares a pool, then does something to it in a process of its own. `model` is a link that leads to the version of the
checkpoint that is to be served, so that an update is what a download into a cache makes of it: the same path, other files.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_shim.handoff import attachment, catalog, holder, manifest, posix, publication, request
from engine_shim.handoff.catalog import READY, ControlPage
from engine_shim.handoff.errors import HandoffError, NoRoom, NotReady
from engine_shim.handoff.names import PoolPaths, new_id, temporary
from engine_shim.handoff.publication import Publication
from engine_shim.handoff.semaphores import LIFE_BYTE
from sidecar import loader, pool, serve
from sidecar.checkpoint import CheckpointError
from tests.checkpoints import Checkpoint, entry
from tests.crash import dying

MODEL = "m"
PUBLISHED = "published"
VERSIONS = 3


@dataclass(frozen=True)
class Place:
    """Where a sequence happens."""

    paths: PoolPaths
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def version(self, number: int) -> Path:
        return self.folder / f"v{number}"

    def lead_to(self, version: int) -> None:
        """What is to be served from now on."""
        new = self.folder / "model.new"
        new.symlink_to(self.version(version))
        os.rename(new, self.model)

    @property
    def serves(self) -> int:
        return int(os.readlink(self.model)[-1])


def write_versions(folder: Path) -> None:
    """Versions that differ in content alone; the last one is a copy of the first."""
    for number in range(VERSIONS + 1):
        place = folder / f"v{number}"
        place.mkdir(parents=True)
        for part in range(2):
            seed = 10 * (number % VERSIONS) + part
            tensors = {f"{part}.w": entry("F32", (300,), seed), f"{part}.b": entry("U8", (3,), seed)}
            Checkpoint(tensors).write(place / f"{part}.safetensors")
        (place / "config.json").write_text("{}")


# The sidecar


class Turning(serve.Sidecar):
    """A sidecar that ends by itself: once `turn`, called in every turn, says so."""

    def __init__(
        self, place: Place, turn: Callable[[Turning], bool], name: str = MODEL, on_exit: str = serve.KEEP
    ) -> None:
        super().__init__(place.paths, serve.name_models([place.model], [name]), on_exit)
        self.turn = turn

    def _hopeless(self) -> bool:
        if self.turn(self):
            self._stop.set()
        return False

    @property
    def now(self) -> catalog.Catalog:
        return self._pool.catalog

    def ready(self) -> list[int]:
        return [g.number for g in self.now.generations if g.state == READY and g.model == MODEL]


def hurry() -> None:
    """A sidecar of this process looks often, so that what takes it seconds takes a test none."""
    serve._TURN, serve.WATCH_EVERY, serve.SETTLE, serve.SWEEP_EVERY, serve.RETRY_EVERY = 0.005, 0.01, 0.03, 0.02, 0.05


def in_order(paths: PoolPaths, now: catalog.Catalog) -> str:
    """What is not as it must be in a pool at rest; empty if every object belongs to a whole generation."""
    expected = {paths.control.name}
    for generation in now.generations:
        if generation.state == catalog.FAILED:
            continue
        if generation.state != READY:
            return f"generation {generation.number} is {generation.state}"
        try:
            contents = manifest.read(paths.manifest(generation.number))
        except HandoffError as error:
            return str(error)
        expected.add(paths.manifest(generation.number).name)
        expected |= {paths.segment(generation.number, index).name for index in range(len(contents.segments))}
    found = {name.file for name in paths.objects()}
    return " ".join(sorted(found ^ expected)) or too_many(now)


def too_many(now: catalog.Catalog) -> str:
    """Which generations are ready beyond those that are kept of a model, or of a configuration of an engine; empty if none."""
    ready = [g for g in now.generations if g.state == READY]
    contents = {(g.model, g.content) for g in ready if g.kind == catalog.CHECKPOINT}
    surplus = {g.number for g in ready if g.kind == catalog.ENGINE and g.content and (g.model, g.content) not in contents}
    for of, count in Counter((g.model, g.kind, g.key) for g in ready).items():
        if count > (1 if of[1] == catalog.ENGINE else pool.KEPT):
            surplus |= {g.number for g in ready if (g.model, g.kind, g.key) == of}
    return f"ready, and too many: {sorted(surplus)}" if surplus else ""


def serve_until(place: Place, turn: Callable[[Turning], bool], **more: Any) -> None:
    hurry()
    Turning(place, turn, **more).run()


def until_in_order(sidecar: Turning) -> bool:
    """Everything is loaded, adopted and swept."""
    waiting = any(model.plan is not None for model in sidecar.models.values()) or sidecar._pool.publications()
    return bool(sidecar.now.generations) and not waiting and not in_order(sidecar.paths, sidecar.now)


# Preparing


@contextlib.contextmanager
def a_sidecar(place: Place) -> Iterator[pool.PoolWriter]:
    """The writer of the pool, which leaves it as a killed one does."""
    writer = pool.PoolWriter(place.paths)
    try:
        yield writer
    finally:
        writer.close(remove=False)


def empty(place: Place) -> None:
    place.lead_to(0)


def serving(place: Place, *versions: int) -> None:
    """A pool with these versions, the last one served, whose sidecar is dead."""
    for version in versions:
        place.lead_to(version)
        with contextlib.suppress(FileExistsError):
            serve_until(place, until_in_order)


def with_a_state(place: Place, *versions: int) -> None:
    """The same, and an engine's state that belongs to the first of them."""
    serving(place, versions[0])
    with a_sidecar(place) as writer:
        _adopted(place, writer, MODEL)
    serving(place, *versions[1:])


def _adopted(place: Place, writer: pool.PoolWriter, model: str) -> None:
    """An engine has published its state of a model."""
    import engine_shim

    engine_shim.publish(dying.module(5), model, pool=place.paths.pool)
    assert all([writer.adopt_publication(identifier) for identifier in writer.publications()])
    assert writer.ready(model, catalog.ENGINE)[0].content


def leftovers(place: Place) -> None:
    """Of everything that the dead leave some, beside a generation that nobody asks for any more, with a state."""
    serving(place, 0)
    with a_sidecar(place) as writer, ThreadPoolExecutor(1):
        first = writer.catalog.generations[0]
        contents = manifest.read(place.paths.manifest(first.number))
        other = writer.begin(manifest.Manifest(**{**contents.__dict__, "model": "other"}))
        for index in range(2):
            source = place.paths.segment(first.number, index).read_bytes()
            _make(place.paths.segment(other.generation, index), source, posix.PUBLISHED)
        table = manifest.Manifest(**{**contents.__dict__, "generation": other.generation, "model": "other"})
        writer.publish(table)
        _adopted(place, writer, "other")
    paths = place.paths
    for path in (
        paths.manifest(77), paths.segment(77, 0), temporary(paths.manifest(1)), temporary(paths.control),
        paths.attachment(new_id()), temporary(paths.attachment(new_id())), paths.publication_segment(new_id(), 0),
        temporary(paths.publication(new_id())), paths.holder(new_id()), paths.copies(new_id(), 1), paths.request(new_id()),
        paths.answer(new_id()),
    ):  # fmt: skip
        _make(path, b"left")


def _make(path: Path, data: bytes, mode: int = posix.PRIVATE) -> None:
    fd = posix.create(path)
    posix.write_exactly(fd, data, 0, path)
    os.fchmod(fd, mode)
    os.close(fd)


def half_loaded(place: Place) -> None:
    """Announced and half in memory when its sidecar was killed."""
    place.lead_to(0)
    found = serve.checkpoint.open_checkpoint(place.model, MODEL)
    with a_sidecar(place) as writer:
        contents = writer.begin(serve.plan(found, MODEL)[0])
        number = contents.generation
        _make(place.paths.segment(number, 0), bytes(contents.segments[0]), posix.PUBLISHED)
        writer.progress(number, 1203, segment_done=0)
        _make(place.paths.segment(number, 1).with_name(place.paths.segment(number, 1).name + ".tmp"), bytes(5000))


def broken_page(place: Place) -> None:
    serving(place, 0)
    with open(place.paths.control, "r+b") as file:
        file.write(b"BROKEN")


def leaked_guard(place: Place) -> None:
    """Its semaphore was taken by somebody who was killed."""
    import posix_ipc

    serving(place, 0)
    posix_ipc.Semaphore(place.paths.guard).acquire(5)


def published(place: Place, times: int = 1, broken: bool = False) -> None:
    """Publications that wait for a sidecar."""
    serving(place, 0)
    with alive(place):
        for _ in range(times):
            publish(place)
    if broken:
        [path] = [p for p in place.paths.dir.glob(f"ballast-{place.paths.pool}.in.*.w0")]
        os.truncate(path, os.stat(path).st_size + 4096)


@contextlib.contextmanager
def alive(place: Place) -> Iterator[None]:
    """As if a sidecar lived, too busy to do anything."""
    page = ControlPage.open(place.paths, write=True)
    try:
        assert posix.try_lock_byte(page.fd, LIFE_BYTE)
        yield
    finally:
        page.close()


# Acting


def first_start(place: Place) -> None:
    serve_until(place, until_in_order)


def update(place: Place, to: int) -> None:
    """Other files at the same path, under a sidecar that serves the old ones."""
    before = place.serves

    def turn(sidecar: Turning) -> bool:
        if place.serves == before:
            if until_in_order(sidecar):
                place.lead_to(to)
            return False
        there = sidecar.models[MODEL]
        new = there.generation is not None and there.plan is None and there.seen_at <= there.tried_at
        return new and _looked(place, sidecar) and until_in_order(sidecar)

    serve_until(place, turn)


def _looked(place: Place, sidecar: Turning) -> bool:
    """Whether the newest generation was loaded from, or compared with, the files that are there now."""
    newest = max(sidecar.ready())
    stat = os.stat(place.model / "0.safetensors")
    identity = manifest.read(place.paths.manifest(newest)).shards[0].identity
    return identity.stat is not None and identity.stat.ino == stat.st_ino


def failing_first(place: Place) -> None:
    """A shard fails, in the middle of loading; the next attempt finds no room; the third succeeds."""
    sample, allocate = loader.ShardLoader._sample, posix.allocate

    def failing(self: loader.ShardLoader, *args: Any) -> str:
        if ".g1.w1." in self._path.name:
            raise CheckpointError("a test's disk is broken")
        return sample(self, *args)

    full = [True]

    def no_room(fd: int, offset: int, length: int, path: Path) -> None:
        if ".w0." in path.name and ".g1." not in path.name and full:
            full.clear()
            raise NoRoom("a test's memory is full")
        allocate(fd, offset, length, path)

    loader.ShardLoader._sample = failing  # type: ignore[method-assign]
    posix.allocate = no_room
    serve_until(place, lambda sidecar: bool(sidecar.ready()) and until_in_order(sidecar))


def stopped_for_good(place: Place) -> None:
    """As on SIGINT."""
    serve_until(place, lambda _: True, on_exit=serve.REMOVE)


def purged(place: Place) -> None:
    pool.purge(place.paths, force=True)


def attach(place: Place) -> None:
    """By name, and file by file through the hook; and once more without room for a record."""
    import safetensors

    import engine_shim
    from engine_shim import ladder

    model = engine_shim.open(MODEL, wait=0)
    assert all(tensor.numel() for tensor in model.state_dict().values())
    model.close()
    del model
    for path in sorted(place.model.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        del file
    ladder._pools.clear()
    with _full("a."), contextlib.suppress(NoRoom):
        engine_shim.open(MODEL, wait=0)
    token = attachment.Token.take(place.paths, 1, MODEL)
    token.tell("a note")
    token.release()


@contextlib.contextmanager
def _full(kind: str) -> Iterator[None]:
    """No room for objects of this kind."""
    really = posix.write_exactly

    def write(fd: int, data: Any, offset: int, path: Path) -> None:
        if f".{kind}" in path.name:
            raise NoRoom("a test's memory is full")
        really(fd, data, offset, path)

    posix.write_exactly = write
    try:
        yield
    finally:
        posix.write_exactly = really


def ask(place: Place) -> None:
    """Something of a sidecar that does not answer; and once more, without room for the question."""
    with contextlib.suppress(NotReady):
        request.ask(place.paths, request.ROLLBACK, MODEL, timeout=0.05)
    with _full("do."), contextlib.suppress(NoRoom):
        request.ask(place.paths, request.ROLLBACK, MODEL, timeout=0.05)


def roll_back(place: Place) -> None:
    """A sidecar is asked for the previous version, and answers."""
    asking = threading.Thread(target=request.ask, args=(place.paths, request.ROLLBACK, MODEL))

    def turn(sidecar: Turning) -> bool:
        if asking.ident is None:
            if until_in_order(sidecar):
                asking.start()
            return False
        return not asking.is_alive() and until_in_order(sidecar)

    serve_until(place, turn)


def hold_device_memory(place: Place) -> None:
    """The records of a process that holds copies on a GPU; and of one that finds no room for them."""
    token = holder.Token(place.paths, ["GPU-0"])
    token.settle()
    page = holder.Page(1, lacking={"GPU-0": "a test has none"})
    token.write(page)
    token.write(holder.Page(1))
    token.write(page)
    with _full("d."), contextlib.suppress(NoRoom):
        token.write(page)
    with _full("d."), contextlib.suppress(NoRoom):
        holder.Token(place.paths, ["GPU-0"])
    token.release()


def publish(place: Place) -> None:
    """A module's state, copied."""
    import engine_shim

    engine_shim.publish(dying.module(5), PUBLISHED, pool=place.paths.pool)


def publish_in_place(place: Place) -> None:
    """Room first, then bytes written straight into it; one that is given up; and one that finds no room."""
    from engine_shim.modules import TensorStorage

    contents = publication_state()
    with Publication(place.paths, PUBLISHED) as making:
        places = making.reserve([storage.nbytes for storage in contents.storages])
        for room, storage in zip(places, contents.storages, strict=True):
            position = 0
            for piece in TensorStorage(storage.storage).pieces():
                data = memoryview(piece).cast("B")
                room.buffer[position : position + len(data)] = data
                position += len(data)
        making.seal()
        making.commit(contents.state, *publication_key())
    with Publication(place.paths, PUBLISHED) as given_up:
        given_up.add(contents.storages[0])
        given_up.finish()
    assert not publication.alive(place.paths.publication(making.identifier))


def publication_state() -> Any:
    from engine_shim import modules

    return modules.capture(dying.module(5))


def publication_key() -> tuple[Any, str]:
    from engine_shim import modules

    key = modules.module_key(dying.module(5), None)
    return key, modules.key_digest(key)


def no_room_to_announce(place: Place) -> None:
    """Not even a manifest fits, at first."""
    turns = iter(range(10_000))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_full("g1.manifest"))

        def turn(sidecar: Turning) -> bool:
            if next(turns) == 3:
                stack.close()
            return bool(sidecar.ready()) and until_in_order(sidecar)

        serve_until(place, turn)


def adopt_published(place: Place) -> None:
    """Two states with one key, of which the second makes the first one too many."""

    def turn(sidecar: Turning) -> bool:
        return until_in_order(sidecar) and any(g.kind == catalog.ENGINE for g in sidecar.now.generations)

    serve_until(place, turn)


@dataclass(frozen=True)
class Sequence:
    """`act` is what dies; `busy`: while a sidecar lives that does nothing."""

    prepare: Callable[[Place], None]
    act: Callable[[Place], None]
    busy: bool = False
    rolls_back: bool = False  # then the version before is right, too


SEQUENCES = {
    "the first start": Sequence(empty, first_start),
    "adopting": Sequence(lambda place: serving(place, 0), first_start),
    "adopting with a leaked guard": Sequence(leaked_guard, first_start),
    "adopting what was half loaded": Sequence(half_loaded, first_start),
    "replacing a damaged control page": Sequence(broken_page, first_start),
    "retiring and sweeping": Sequence(leftovers, first_start),
    "an update": Sequence(lambda place: serving(place, 0), lambda place: update(place, 1)),
    "an update that frees the oldest": Sequence(lambda place: serving(place, 0, 1), lambda place: update(place, 2)),
    "an update that a state does not outlive": Sequence(
        lambda place: with_a_state(place, 0, 1), lambda place: update(place, 2)
    ),
    "files that were only copied": Sequence(lambda place: serving(place, 0), lambda place: update(place, VERSIONS)),
    "loading that fails and succeeds": Sequence(empty, failing_first),
    "no room to announce": Sequence(empty, no_room_to_announce),
    "removing": Sequence(lambda place: serving(place, 0), stopped_for_good),
    "purging": Sequence(leftovers, purged),
    "attaching": Sequence(lambda place: serving(place, 0), attach),
    "asking": Sequence(lambda place: serving(place, 0), ask, busy=True),
    "rolling back": Sequence(lambda place: serving(place, 0, 1), roll_back, rolls_back=True),
    "holding device memory": Sequence(lambda place: serving(place, 0), hold_device_memory),
    "publishing": Sequence(lambda place: serving(place, 0), publish, busy=True),
    "publishing in place": Sequence(lambda place: serving(place, 0), publish_in_place, busy=True),
    "adopting publications": Sequence(lambda place: published(place, 2), adopt_published),
    "refusing a publication": Sequence(lambda place: published(place, broken=True), first_start),
}
