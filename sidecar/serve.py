"""The sidecar's life: take the pool, adopt what is intact, load what is not, watch the files, keep order, leave.

One thread loads; the main thread looks after everything else and is never away for long, so that signals, publications and
changed files are met at once. What happens to one model does not touch the others.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from engine_shim.handoff import catalog, identity, posix, request
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import Busy, HandoffError, NameRefused, NotFound
from engine_shim.handoff.identity import FileIdentity, Stat
from engine_shim.handoff.manifest import Manifest, Shard, Tensor
from engine_shim.handoff.names import PoolPaths, check_model, temporary
from engine_shim.handoff.room import gib
from sidecar import checkpoint, history, loader
from sidecar.budget import Budget, Postponed
from sidecar.checkpoint import Checkpoint, CheckpointError
from sidecar.loader import Cancelled, Loaded, Placed, ShardLoader
from sidecar.pool import PoolWriter
from sidecar.residency import Residency
from sidecar.scrub import Scrubber

log = logging.getLogger("ballast")

WATCH_EVERY = 1.0  # seconds between two looks at the checkpoint files: a stat each
SWEEP_EVERY = 5.0
RETRY_EVERY = 30.0  # a checkpoint that could not be loaded is tried again this often, or once its files change
SETTLE = 2.0  # a changed checkpoint is loaded once it has stayed as it is for this long: something may still be writing
_TURN = 0.2  # seconds between two looks for publications; the bell is left to the engines, whom it should wake
# How long an ending sidecar waits for its reads. One that does not come back (a volume that is gone) must not keep it from
# ending: docker gives it 10 s, Kubernetes 30.
END_WITHIN = 5.0

# A downloader's marks as well: when they go, a checkpoint is whole without having changed.
_WATCHED = frozenset({".safetensors", ".json", *checkpoint.IN_PLACE, *checkpoint.UNFINISHED})

KEEP = "keep"
REMOVE = "remove"

# Told of every model's progress: name, bytes done, bytes in all, state.
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """A checkpoint about to be loaded: its files, its announced manifest, each shard's tensors in file order."""

    found: Checkpoint
    contents: Manifest
    layouts: list[list[Placed]]


@dataclass
class Model:
    """A checkpoint that this sidecar serves, and how it stands with it."""

    path: Path
    name: str
    found: Checkpoint | None = None
    generation: int | None = None  # the one that is served
    plan: Plan | None = None  # the one that is to be loaded next, or is being loaded
    evicted: bool = False  # or put off: not in memory until somebody asks for it, to keep within the budget
    asked: bool = False  # so others may go for it
    reason: str = ""
    seen: object = None  # the files as last looked at
    seen_at: float = 0.0
    tried_at: float = field(default=0.0)


def name_models(paths: Sequence[Path], names: Sequence[str]) -> list[Model]:
    """The models to serve. Raises NameRefused for names that cannot be, collide, or do not match the checkpoints in number."""
    if names and len(names) != len(paths):
        raise NameRefused(f"{len(names)} --name for {len(paths)} checkpoints: give one for each, in the same order, or none")
    chosen = list(names) or [checkpoint.default_name(path) for path in paths]
    models: dict[str, Model] = {}
    for path, name in zip(paths, chosen, strict=True):
        check_model(name)
        if name in models:
            raise NameRefused(f"{models[name].path} and {path} would both be called {name!r}: give each a --name")
        models[name] = Model(path, name)
    return list(models.values())


def plan(found: Checkpoint, name: str) -> tuple[Manifest, list[list[Placed]]]:
    """The manifest of a checkpoint before it is loaded, and each shard's tensors in file order."""
    rows: list[Tensor] = []
    shards: list[Shard] = []
    layouts: list[list[Placed]] = []
    segments: list[int] = []
    for index, shard in enumerate(found.shards):
        placed, size = loader.place(shard)
        offsets = {tensor.entry.name: tensor.offset for tensor in placed}
        stat = shard.stat if shard.stat.settled(time.time_ns()) else None
        known = FileIdentity(shard.size, shard.header_digest, "", stat)
        shards.append(Shard(shard.name, known, shard.metadata, len(rows), len(shard.tensors), index))
        rows.extend(
            Tensor(e.name, e.dtype, e.shape, None, index, offsets[e.name], e.nbytes, None, e.begin) for e in shard.tensors
        )
        layouts.append(placed)
        segments.append(size)
    contents = Manifest(
        generation=0, model=name, kind=catalog.CHECKPOINT, complete=False, created=time.time(),
        source=str(found.path.absolute()), segments=tuple(segments), tensors=rows, shards=tuple(shards),
        config=dict(found.config),
    )  # fmt: skip
    return contents, layouts


def completed(contents: Manifest, layouts: list[list[Placed]], loaded: Sequence[Loaded]) -> Manifest:
    """The manifest with what loading has found: digests, samples, the files' state."""
    rows = list(contents.tensors)
    shards = []
    for shard, placed, result in zip(contents.shards, layouts, loaded, strict=True):
        digests = {tensor.entry.name: value for tensor, value in zip(placed, result.digests, strict=True)}
        for index in range(shard.first, shard.first + shard.count):
            rows[index] = rows[index]._replace(digest=digests[rows[index].name])
        known = dataclasses.replace(shard.identity, sample=result.sample, stat=result.stat)
        shards.append(dataclasses.replace(shard, identity=known))
    return dataclasses.replace(contents, complete=True, tensors=rows, shards=tuple(shards))


class Sidecar:
    """Serves checkpoints in one pool until it is told to stop."""

    def __init__(
        self,
        paths: PoolPaths,
        models: Sequence[Model],
        on_exit: str | None = None,
        progress: Progress | None = None,
        budget: Budget | None = None,
        device: str | None = None,
        scrub_every: float | None = None,
    ) -> None:
        self.paths = paths
        self.models = {model.name: model for model in models}
        self._on_exit = on_exit
        self._budget = budget or Budget()
        self._device = device
        self._scrub_every = scrub_every
        self._damaged: queue.SimpleQueue[Generation] = queue.SimpleQueue()  # found by the scrubber, retired by now
        self._tell = progress or (lambda *_: None)
        self._stop = threading.Event()  # told to those who load
        self._signal = 0
        self._queue: queue.Queue[Model | str | None] = queue.Queue()  # models to load, publications to adopt
        self._queued: set[str] = set()  # publications met so far; one that cannot be removed is refused only once
        self._buffers = threading.local()
        self._answers: dict[str, tuple[bool, str]] = {}  # to requests that were carried out, while they are there

    # Life

    def run(self) -> int:
        """Serves until a signal comes. 0 after an orderly end, 1 if there is nothing that could be served.

        Raises Busy if the pool has a sidecar already.
        """
        pool = self._pool = PoolWriter(self.paths)
        pool.admit, pool.pace = self._admit, self._pace
        self._residency = Residency(pool, self._device)
        previous = [signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)]
        remove = False
        worker = threading.Thread(target=self._work, name="ballast-loader")
        scrubber = None if self._scrub_every is None else Scrubber(pool, self._scrub_every, self._damaged.put)
        try:
            self._adopt()
            pool.collect()
            for model in self.models.values():
                if model.generation is None and model.found is not None:
                    self._enqueue(model, model.found)
            for number in pool.unfinished:
                pool.drop(number)
            worker.start()
            if scrubber is not None:
                scrubber.start()
            code = self._turn_until_stopped()
            remove = code != 0 or self._leaves_nothing()
            return code
        finally:
            self._stop.set()
            self._queue.put(None)
            if worker.ident is not None:
                worker.join(END_WITHIN)
            scrubbed = scrubber is None or scrubber.stop(END_WITHIN)
            if worker.is_alive() or not scrubbed:
                self._abandon(remove, "a checkpoint's file" if worker.is_alive() else "shared memory")
            pool.close(remove)
            self._residency.end(remove)
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
                signal.signal(number, handler)
            log.info("stopped; the pool %s", "is removed" if remove else "stays for the next sidecar")

    def _abandon(self, remove: bool, what: str) -> None:
        """Ends the process although a thread still reads: closing under it would hand its descriptors to others."""
        log.error(
            "a read of %s does not come back after %.0f s (is its disk or network volume gone?); ending "
            "without it, the pool %s", what, END_WITHIN, "is removed" if remove else "stays for the next sidecar",
        )  # fmt: skip
        if remove:
            self._pool.remove()
        logging.shutdown()
        os._exit(1)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Nothing more: whatever takes a lock here, `Event.set` too, waits for ever if it interrupts one who holds that lock.
        self._signal = number

    def _leaves_nothing(self) -> bool:
        if self._on_exit is not None:
            return self._on_exit == REMOVE
        return self._signal == signal.SIGINT

    def _turn_until_stopped(self) -> int:
        pool = self._pool
        next_watch = next_sweep = time.monotonic()
        while not self._signal and not self._stop.is_set():
            time.sleep(_TURN)  # not `self._stop.wait`: before Python 3.11 that goes by the wall clock, which may be set back
            now = time.monotonic()
            if not pool.page.current:
                log.error(
                    "pool %s was removed from %s under this sidecar (does an engine's start script wipe it? then give the "
                    "pool a directory of its own with --dir); ending, so that a restart can load it again",
                    self.paths.pool, self.paths.dir,
                )  # fmt: skip
                return 1
            try:
                self._budget.look(pool)
                self._answer()
                self._replace_damaged()
                for identifier in pool.publications():
                    if identifier not in self._queued:
                        self._queued.add(identifier)
                        self._queue.put(identifier)
                if now >= next_watch:
                    next_watch = now + WATCH_EVERY
                    for model in self.models.values():
                        self._watch(model, now)
                if now >= next_sweep:
                    next_sweep = now + SWEEP_EVERY
                    pool.sweep()
                pool.collect()
                self._residency.turn()
            except HandoffError as error:  # somebody held the guard for too long, or there was no room: next time
                log.warning("%s", error)
            if self._hopeless():
                return 1
        return 0

    def _hopeless(self) -> bool:
        """Whether every model has failed and nothing is left to serve: then somebody should know, by our exit code."""
        return (
            all(model.reason and model.plan is None and model.generation is None for model in self.models.values())
            and not any(g.state in (catalog.READY, catalog.LOADING) for g in self._pool.catalog.generations)
            and self._queue.empty()
        )

    # Adopting

    def _adopt(self) -> None:
        """Takes over intact generations; plans the rest, so that waiting engines know at once what will come."""
        began = time.monotonic()
        adopted = self._pool.adopt()
        by_model = {}
        for item in adopted:
            if item.generation.kind == catalog.CHECKPOINT:
                by_model[item.generation.model] = item
            if item.generation.model not in self.models:
                if item.generation.kind == catalog.CHECKPOINT:
                    log.info("%s is no longer asked for and is retired", item.generation.model)
                    self._pool.withdraw(item.generation.model)
        for model in self.models.values():
            self._open(model)
            if model.name not in by_model:
                continue
            item = by_model[model.name]
            if model.found is None:
                log.warning("%s: %s; serving what the pool holds of it", model.name, model.reason)
                model.generation, model.reason = item.generation.number, ""
                continue
            try:
                served = self._served(model, model.found)
            except HandoffError as error:  # no room to write that down, say: what is there goes on meanwhile
                self._failed(model, str(error))
                model.generation, model.found = item.generation.number, None
                continue
            if served is not None:
                log.info(
                    "adopted %s, generation %d, %s, in %.1f ms, without reading it",
                    model.name, served.number, gib(served.total), 1000 * (time.monotonic() - began),
                )  # fmt: skip
                self._tell(model.name, served.total, served.total, catalog.READY)

    def _open(self, model: Model) -> bool:
        """Looks at the files. What is wrong with them becomes the model's reason."""
        model.seen = _look(model.path)
        model.seen_at = model.tried_at = time.monotonic()
        try:
            model.found = checkpoint.open_checkpoint(model.path, model.name)
            model.reason = ""
            for note in model.found.notes:
                log.warning("%s: %s", model.name, note)
        except CheckpointError as error:
            model.found = None
            self._failed(model, str(error))
        return model.found is not None

    def _failed(self, model: Model, reason: str, number: int | None = None) -> None:
        model.reason, model.evicted = reason, False
        log.error("%s cannot be loaded: %s", model.name, reason)
        self._pool.fail(model.name, reason, number)
        self._tell(model.name, 0, 0, catalog.FAILED)

    # Watching

    def _watch(self, model: Model, now: float) -> None:
        """Notices changed files, and has them loaded once they have settled."""
        if model.plan is not None or model.evicted:
            return
        seen = _look(model.path)
        if seen != model.seen:
            model.seen, model.seen_at = seen, now
            log.info("%s has changed on disk", model.path)
            return
        retry = model.reason and now - model.tried_at > RETRY_EVERY
        if (model.seen_at > model.tried_at and now - model.seen_at >= SETTLE) or retry:
            self._see_to(model)

    def _see_to(self, model: Model) -> None:
        """Has what a model's files hold now served: a generation that is kept, or one to be loaded. What is in the way of that
        becomes the model's reason, and is tried again."""
        found = model.found if self._open(model) else None
        if found is None:
            return
        try:
            if self._served(model, found) is None:
                self._enqueue(model, found)
        except HandoffError as error:
            self._failed(model, str(error))

    def _served(self, model: Model, found: Checkpoint) -> Generation | None:
        """The generation that is served if nothing needs to be loaded: the files are those of one that is kept, since nothing
        changed but a tokenizer's file, say, or since they were put back."""
        kept = history.kept(self._pool, model.name)
        for generation, contents in kept:
            back = contents is kept[0][1] and history.gone_back(contents, found)
            if back or self._same_files(contents, found):
                with self._pool.lock:  # the loader may evict it at any time
                    served = history.settle(self._pool, generation, back)
                    model.generation, model.evicted = served.number, False
                    self._pool.forget_failures(model.name)
                return served
        return None

    def _same_files(self, contents: Manifest, found: Checkpoint) -> bool:
        """Whether the weight files are, by their inodes and times, the ones that a generation was loaded from. What else
        belongs to the checkpoint's identity is then brought up to date in its manifest."""
        if history.files(contents) != history.files(found):
            return False
        if contents.config != found.config:
            try:
                self._pool.amend(contents.generation, lambda now: dataclasses.replace(now, config=dict(found.config)))
            except NotFound:  # taken out of service meanwhile
                return False
        return True

    def _enqueue(self, model: Model, found: Checkpoint) -> None:
        """Announces a generation to come, so that engines wait for it even while others are being loaded, and queues it."""
        contents, layouts = plan(found, model.name)
        try:
            model.plan = Plan(found, self._pool.begin(contents), layouts)
        except HandoffError as error:  # not even room for the manifest
            self._failed(model, str(error))
            return
        self._queue.put(model)

    # Loading

    def _work(self) -> None:
        with ThreadPoolExecutor(loader.THREADS, thread_name_prefix="ballast-read") as executor:
            while (item := self._queue.get()) is not None and not self._stop.is_set():
                try:
                    if isinstance(item, str):
                        self._adopt_publication(item)
                    elif item.plan is not None:
                        self._load_planned(item, item.plan, executor)
                except Cancelled:
                    break
                except Exception as error:  # while a failure was being dealt with: the next item is another's
                    log.error("%s: %s", item if isinstance(item, str) else item.name, error)
                    log.debug("the whole story", exc_info=True)

    def _adopt_publication(self, identifier: str) -> None:
        try:
            if self._pool.adopt_publication(identifier):
                self._pool.collect()
        except Exception:
            self._queued.discard(identifier)  # what is left of it is met again
            raise

    def _load_planned(self, model: Model, planned: Plan, executor: ThreadPoolExecutor) -> None:
        try:
            self._load(model, planned, executor)
        except Cancelled:
            raise
        except Exception as error:
            if not model.evicted:
                model.reason = model.reason or str(error)  # so that it is tried again
            raise
        finally:
            model.tried_at = time.monotonic()
            model.plan = None
            self._buffers = threading.local()  # the threads stay, their buffers need not

    def _load(self, model: Model, planned: Plan, executor: ThreadPoolExecutor) -> None:
        """Makes the announced generation ready, or failed. Raises Cancelled."""
        contents = planned.contents
        number = contents.generation
        began = time.monotonic()
        try:
            _wait_until_settled(planned.found)
            if self._still_the_same(model, planned, executor):
                self._pool.drop(number)
                return
            self._budget.make_room(self._pool, model.name, sum(contents.segments), self._evicted, self._may_evict(model))
            loaded = self._load_shards(planned, executor)
            self._pool.publish(completed(contents, planned.layouts, loaded))
        except Cancelled:
            self._pool.reset(number)
            raise
        except Postponed as error:
            self._set_aside(model, str(error), number)
            return
        except (CheckpointError, HandoffError) as error:
            self._failed(model, str(error), number)
            return
        except Exception as error:  # one model's trouble is not the others'
            log.debug("the whole story", exc_info=True)
            self._failed(model, f"{type(error).__name__}: {error}", number)
            return
        model.generation = number
        model.found = None  # a row for each tensor, of no use any more
        model.reason = ""
        model.evicted = model.asked = False
        took = time.monotonic() - began
        log.info(
            "%s is ready: generation %d, %s in %d tensors, %.1f s, %s/s",
            model.name, number, gib(contents.nbytes), len(contents.tensors), took, gib(int(contents.nbytes / (took or 1))),
        )  # fmt: skip
        self._tell(model.name, contents.nbytes, contents.nbytes, catalog.READY)

    def _load_shards(self, planned: Plan, executor: ThreadPoolExecutor) -> list[Loaded]:
        contents, layouts = planned.contents, planned.layouts
        done = 0
        lock = threading.Lock()

        def progress(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                self._pool.progress(contents.generation, done)
                self._tell(contents.model, done, contents.nbytes, catalog.LOADING)

        loaded = []
        for index, shard in enumerate(planned.found.shards):
            path = self.paths.segment(contents.generation, index)
            building = temporary(path)  # nobody can have guessed that name and be in the way
            fd = loader.create_segment(building, layouts[index], contents.segments[index])
            try:
                work = ShardLoader(shard, layouts[index], fd, building, self._stop, progress)
                loaded.append(work.load(executor, self._buffers))
                posix.share(fd, posix.PUBLISHED, self.paths.group)
                posix.rename(building, path)
            finally:
                os.close(fd)
            self._pool.progress(contents.generation, done, segment_done=index)
        return loaded

    def _still_the_same(self, model: Model, planned: Plan, executor: ThreadPoolExecutor) -> bool:
        """Whether files that were touched or copied hold what the pool holds: then only the record of them is renewed.

        Reads them once, comparing every tensor's digest; needs no memory. Raises CheckpointError or Cancelled.
        """
        contents, layouts = planned.contents, planned.layouts

        def headers(of: Manifest) -> list[tuple[str, int, str]]:
            return [(shard.name, shard.identity.size, shard.identity.header) for shard in of.shards]

        kept = history.kept(self._pool, model.name)
        alike = [old for old in kept if headers(old[1]) == headers(contents)]
        names = [row[:2] for row in history.files(contents)]
        back = bool(kept) and [row[:2] for row in kept[0][1].over.get("files", ())] == names
        loaded = []
        for index, shard in enumerate(planned.found.shards):
            if not alike and not back:
                return False
            work = ShardLoader(shard, layouts[index], None, shard.path, self._stop, lambda _: None)
            loaded.append(work.load(executor, self._buffers))
            new = {t.entry.name: d for t, d in zip(layouts[index], loaded[-1].digests, strict=True)}
            alike = [old for old in alike if new == {row.name: row.digest for row in old[1].rows(old[1].shards[index])}]
        now = completed(contents, layouts, loaded)
        back = back and history.gone_back(kept[0][1], now)
        if not alike and not back:
            return False
        generation = (kept[0] if back else alike[0])[0]

        def renewed(there: Manifest) -> Manifest:
            if back:
                return dataclasses.replace(there, over={"content": now.content, "files": history.files(now)})
            # What is said of the memory stays: the table, the inodes, copies on GPUs.
            both = zip(there.shards, now.shards, strict=True)
            shards = tuple(dataclasses.replace(shard, identity=new.identity) for shard, new in both)
            return dataclasses.replace(there, source=now.source, config=now.config, shards=shards)

        try:
            self._pool.amend(generation.number, renewed)
        except NotFound:  # taken out of service meanwhile
            return False
        served = history.settle(self._pool, generation, back)
        model.generation, model.reason, model.evicted = served.number, "", False
        self._pool.forget_failures(model.name)
        if served.number == generation.number:
            log.info("%s was touched but not changed: generation %d stays", model.name, served.number)
        return True

    def _replace_damaged(self) -> None:
        """Loads again, from its files, what the scrubber has taken out of service, if it was what the model's files hold."""
        while not self._damaged.empty():
            generation = self._damaged.get()
            model = self.models.get(generation.model)
            if model is not None and generation.kind == catalog.CHECKPOINT and model.plan is None and not model.evicted:
                self._see_to(model)

    # Requests, and what has to stay outside

    def _answer(self) -> None:
        """Does what commands ask for."""
        there = [identifier for identifier in self._answers if self.paths.request(identifier).exists()]
        self._answers = {identifier: self._answers[identifier] for identifier in there}
        for asked in request.pending(self.paths):
            # Never twice: a rollback that is done again goes forward. Where the answer cannot be written, that comes later.
            if asked.identifier not in self._answers:
                self._answers[asked.identifier] = self._carry_out(asked)
            try:
                request.answer(self.paths, asked, *self._answers[asked.identifier])
            except HandoffError as error:
                log.warning("what was asked of %s, to %s it, cannot be answered yet: %s", asked.model, asked.verb, error)

    def _carry_out(self, asked: request.Request) -> tuple[bool, str]:
        """Whether it is done, and the sentence that says so, or why not."""
        model = self.models.get(asked.model)
        try:
            if asked.verb not in request.VERBS:
                raise HandoffError(f"this sidecar does not know what {asked.verb!r} is: use one version for all")
            if model is None:
                raise NotFound(f"this sidecar does not serve {asked.model!r}: it serves {', '.join(sorted(self.models))}")
            return True, self._roll_back(model) if asked.verb == request.ROLLBACK else self._load_asked(model)
        except HandoffError as error:
            return False, str(error)

    def _roll_back(self, model: Model) -> str:
        before = self._pool.ready(model.name)
        if model.plan is not None:
            raise Busy(f"{model.name!r} is being loaded from its files just now: try again when that is done")
        made = history.rollback(self._pool, model.name)
        model.generation = made.number
        return (
            f"{model.name} serves generation {made.number}, which holds what generation {before[1].number} held; "
            f"the same again goes forward to what generation {before[0].number} holds"
        )

    def _load_asked(self, model: Model) -> str:
        """Loads a model that is not in memory for want of room in the budget; others may go for it."""
        if model.plan is None and not self._pool.ready(model.name):
            model.asked = True
            found = model.found if self._open(model) else None
            if found is None:
                raise HandoffError(model.reason)
            self._enqueue(model, found)
            model.evicted = False
        return f"{model.name} is being loaded" if model.plan is not None else f"{model.name} is there"

    def _may_evict(self, model: Model) -> bool:
        """Whether others may go for it: not so that a sidecar that starts with too many models throws out what it has loaded
        first, but if somebody asks for it, or had it."""
        return model.asked or bool(self._pool.ready(model.name))

    def _admit(self, contents: Manifest) -> None:
        """Keeps within the budget what engines publish."""
        self._budget.make_room(self._pool, contents.model, contents.nbytes, self._evicted, there=contents.nbytes)

    def _pace(self, _: int) -> None:
        """Whoever stops this sidecar does not wait until a large state is digested, at a low priority."""
        if self._stop.is_set():
            raise HandoffError("the sidecar was stopped before it was done with it: start the engine once more to publish it")

    def _evicted(self, generation: Generation) -> None:
        model = self.models.get(generation.model)
        if model is not None and generation.kind == catalog.CHECKPOINT:
            self._set_aside(model, "it was evicted to keep the pool within --max-bytes")

    def _set_aside(self, model: Model, why: str, number: int | None = None) -> None:
        """Says in the catalog that a model is known and not in memory, and how to get it there."""
        model.evicted, model.asked, model.generation, model.found = True, False, None, None
        why = f"{why}; 'ballast wait {model.name}' has it loaded"
        log.info("%s is not in memory: %s", model.name, why)
        self._pool.fail(model.name, why, number, evicted=True)
        self._tell(model.name, 0, 0, catalog.FAILED)


def _look(path: Path) -> object:
    """The checkpoint's files as a watcher sees them: names, and what stat says of those links lead to."""
    found: list[tuple[str, Stat | None]] = []
    try:
        folders = [path] if not path.is_dir() else [path, *(p for p in sorted(path.iterdir()) if p.is_dir())]
    except OSError:
        folders = [path]
    for folder in folders:
        try:
            entries = [folder] if not folder.is_dir() else sorted(folder.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.suffix in _WATCHED or entry == path:
                try:
                    status = entry.stat()
                except OSError:
                    found.append((str(entry), None))
                    continue
                if not entry.is_dir():
                    found.append((str(entry), Stat.of(status)))
    return found


def _wait_until_settled(found: Checkpoint) -> None:
    """Waits, for a moment at most, until a write to any file would show in its times."""
    deadline = time.monotonic() + identity.COARSE_TICK_NS / 1e9
    while time.monotonic() < deadline and not all(shard.stat.settled(time.time_ns()) for shard in found.shards):
        time.sleep(0.02)
