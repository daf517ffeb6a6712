"""Wait, attach, fall back or stop: decided here and nowhere else.

An engine asks for weights. Where the pool holds exactly those, it gets them from memory, under a lease. Where it will hold
them soon, it waits. Otherwise it is told nothing was found, with one log line that says why, and loads as it would without
Ballast; with `BALLAST_MODE=require` it stops with that line instead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, NoReturn, Optional, Sequence, TypeVar

from engine_shim import device, onboard
from engine_shim.handoff import attachment, catalog, holder, identity, manifest, posix
from engine_shim.handoff.catalog import Catalog, ControlPage, Generation
from engine_shim.handoff.errors import Damaged, HandoffError, Mismatch, NotFound, NotReady
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.room import gib
from engine_shim.handoff.semaphores import Bell
from engine_shim.mapping import Residency, Segments, Shard, Uploaded

log = logging.getLogger("ballast")

DEFAULT_WAIT = 600.0  # seconds; a terabyte from a good disk takes less
# A pool whose sidecar is dead is waited for no longer than a container takes to be restarted.
RESTART_GRACE = 10.0
_PROGRESS_EVERY = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What the environment says. Read anew at every decision, so that a test or a program may change it."""

    pool: str
    model: Optional[str]
    mode: str
    wait: float
    publish: bool

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        mode = environ.get("BALLAST_MODE", "auto").strip().lower() or "auto"
        if mode not in ("auto", "require", "off"):
            say_once(logging.WARNING, f"BALLAST_MODE={mode} is none of auto, require and off; taken as auto")
            mode = "auto"
        try:
            wait = float(environ.get("BALLAST_WAIT") or DEFAULT_WAIT)
            if wait != wait:
                raise ValueError("nan")
        except ValueError:
            say_once(logging.WARNING, f"BALLAST_WAIT is not a number of seconds; taken as {DEFAULT_WAIT:.0f}")
            wait = DEFAULT_WAIT
        return cls(
            environ.get("BALLAST_POOL") or "main",
            environ.get("BALLAST_MODEL") or None,
            mode,
            max(0.0, wait),
            environ.get("BALLAST_PUBLISH", "1").strip().lower() not in ("0", "off", "no", "false"),
        )


_said: set[object] = set()


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at each line: a program may redirect it for a while, close it, or have none.

    A line that cannot be written is lost. Nothing of ours is raised out of a load for it, nor printed in its place, as
    logging's own handlers do.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            if sys.stderr is not None:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def configure_logging() -> None:
    """Lines of ours go to stderr at the level of BALLAST_LOG, unless the program has given our logger a handler."""
    if log.handlers:
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("ballast: %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    level = os.environ.get("BALLAST_LOG", "INFO").strip().upper()
    log.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") else "INFO")


def say_once(level: int, line: str, about: object = None) -> None:
    """One line per decision (`about`): a checkpoint of two hundred shards must not say the same two hundred times."""
    about = line if about is None else about
    if about not in _said:
        _said.add(about)
        configure_logging()
        log.log(level, line)


class Lease:
    """This process's attachment to one generation, shared by all its maps; given up when the last of them is gone.

    Holders leave from finalizers, which run wherever the garbage collector or a fork happens to be; so leaving never waits
    for the lock: it leaves a mark, and whoever has or gets the lock counts it.
    """

    def __init__(self, token: attachment.Token) -> None:
        self._token = token
        self._count = 1  # whoever took the lease, until `leave`
        self._left: deque[None] = deque()
        self._lock = threading.Lock()
        weakref.finalize(self, token.release)  # at the latest when the interpreter ends

    def enter(self) -> bool:
        """One holder more; False if the lease is over, and another must be taken."""
        with self._lock:
            alive = self._count > 0
            self._count += alive
        self._settle()
        return alive

    @property
    def over(self) -> bool:
        return not self._count

    def leave(self) -> None:
        self._left.append(None)
        self._settle()

    def _settle(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    self._left.pop()
                    self._count -= 1
                if self._count == 0:
                    self._token.release()
            finally:
                self._lock.release()

    @property
    def held(self) -> bool:
        """Whether others still see it: not where this program has closed the record, as what it did not know."""
        return self._token.held

    def tell(self, note: str) -> None:
        """Puts a note into the attachment's record."""
        self._token.tell(note)

    def hold(self, thing: object) -> None:
        """Keeps the lease, which the caller holds, while `thing` lives as well."""
        self.enter()
        weakref.finalize(thing, self.leave).atexit = False


class Pool:
    """A process's view of one pool: its control page, the manifests read so far, the leases held."""

    def __init__(self, paths: PoolPaths) -> None:
        self.paths = paths
        self._control: Optional[ControlPage] = None
        self._manifests: dict[int, tuple[tuple[int, int, int], Manifest]] = {}
        self._leases: dict[tuple[int, str], Lease] = {}  # of a generation in a residency
        self._lock = threading.RLock()

    def control(self) -> ControlPage:
        """The pool's control page, opened anew if the pool was removed and made again. Raises NotFound and others."""
        with self._lock:
            if self._control is not None and not self._control.current:
                self.let_go()
            if self._control is None:
                self._control = ControlPage.open(self.paths)
                # Not `close`: another thread may be looking at it. It is closed with the last who does.
                page = self._control
                weakref.finalize(page, posix.close_kept, page.fd, page.inode).atexit = False
            return self._control

    def let_go(self) -> None:
        """Forgets the pool that was there; whoever has maps of it keeps their leases. The next question opens it again."""
        with self._lock:
            self._control = None
            self._manifests.clear()
            self._leases.clear()

    def catalog(self) -> Catalog:
        return self.control().read()

    def manifest(self, generation: Generation) -> Manifest:
        """The generation's manifest, read again only when it was replaced."""
        path = self.paths.manifest(generation.number)
        try:
            status = os.stat(path)
        except OSError:
            raise NotFound(f"generation {generation.number} of {generation.model!r} is gone") from None
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns)
        with self._lock:
            cached = self._manifests.get(generation.number)
            if cached and cached[0] == stamp:
                return cached[1]
            read = manifest.read(path)
            if (read.generation, read.model, read.kind) != (generation.number, generation.model, generation.kind):
                raise Damaged(f"{path} is the manifest of something else: restart the sidecar to have it loaded again")
            self._forget_gone()
            self._manifests[generation.number] = (stamp, read)
            return read

    def _forget_gone(self) -> None:
        """Lets go of the manifests of generations that the pool has not any more, and of leases that are over: a process that
        reloads at each update would keep one of each for good. Whoever uses such a manifest has it himself."""
        if self._control is None:
            return
        try:
            # Of the page as it is, not by `control`: whoever is here has seen this one, and must notice if there is another.
            listed = {generation.number for generation in self._control.read().generations}
        except (HandoffError, OSError):
            return
        self._manifests = {number: kept for number, kept in self._manifests.items() if number in listed}
        self._leases = {key: lease for key, lease in self._leases.items() if key[0] in listed or not lease.over}

    def attach(
        self, generation: Generation, contents: Manifest, wanted: Optional[Sequence[int]] = None, engine: str = ""
    ) -> Segments:
        """The segments of a generation, all or those `wanted`, mapped and leased for as long as they or their maps live.

        Raises NotFound if the generation is being retired. The order matters: first the record, then a second look at the
        catalog; the sidecar retires in the other order. Then the maps, and a look whether this still is the same pool: in
        one that was removed and made anew the same names lead to other bytes.
        """
        with self._lock:
            page = self.control()
            if self._manifests.get(generation.number, (None, None))[1] is not contents:
                raise NotFound(f"generation {generation.number} of {generation.model!r} was replaced just now")
            lease = self._lease(generation, engine)
            try:
                self._still_there(page, generation)
                segments = Segments(
                    lambda index: self.paths.segment(generation.number, index), contents.segments, on_map=lease.hold,
                    inodes=contents.inodes,
                )  # fmt: skip
                lease.hold(segments)
                for index in range(len(contents.segments)) if wanted is None else wanted:
                    segments[index]
                if not page.current:
                    raise NotFound(f"pool {self.paths.pool!r} was removed just now")
                return segments
            finally:
                lease.leave()

    def attach_copy(self, generation: Generation, contents: Manifest, where: device.Gpu, engine: str = "") -> device.Copy:
        """The generation as it lies in the memory of a GPU, leased and watched over. Raises NotFound where there is no copy, or
        it is being withdrawn; DeviceError where it cannot be opened.

        The order is that of `attach`: first the record, then a second look, at the catalog and at what the holder serves.
        """
        copy = device.copy_on(contents, where)
        if copy is None:
            raise NotFound(f"generation {generation.number} of {generation.model!r} has no copy on {where.uuid}")
        with self._lock:
            page = self.control()
            watch = holder.Watch(self.paths, copy.holder)
            try:
                lease = self._lease(generation, engine, holder.DEVICE + copy.gpu)
                try:
                    self._still_there(page, generation)
                    device.check_served(self.paths, contents, copy, watch)
                    opened = device.import_copy(copy, where, lease)
                    lease.hold(opened)
                    if not page.current or not watch.alive:
                        raise NotFound(f"pool {self.paths.pool!r}, or the holder of its device memory, went just now")
                finally:
                    lease.leave()
            except BaseException:
                watch.close()
                raise
        onboard.watch_over(watch, generation.model, opened)
        return opened

    def _lease(self, generation: Generation, engine: str, residency: str = "host") -> Lease:
        key = (generation.number, residency)
        lease = self._leases.get(key)
        if lease is None or not lease.held or not lease.enter():
            lease = Lease(
                attachment.Token.take(self.paths, generation.number, generation.model, engine, residency=residency)
            )
            self._leases[key] = lease
        return lease

    @staticmethod
    def _still_there(page: ControlPage, generation: Generation) -> None:
        now = page.read().get(generation.number)
        if now is None or now.state not in (catalog.READY, catalog.LOADING):
            raise NotFound(f"generation {generation.number} of {generation.model!r} was retired just now")

    def note(self, generation: int, note: str) -> None:
        """Says something about this process's attachment to a generation, for `ballast status`."""
        with self._lock:
            for (number, _), lease in self._leases.items():
                if number == generation:
                    lease.tell(note)

    def wait(self, look: Callable[[Catalog], Optional[T]], timeout: float) -> Optional[T]:
        """Calls `look` on each new catalog until it gives an answer. None after `timeout` seconds, or when no living
        sidecar is left to wait for. `look` raises to end the waiting; it returns None to say "not yet"."""
        deadline = time.monotonic() + timeout
        dead_since: Optional[float] = None
        bell: Optional[Bell] = None
        try:
            while True:
                page = self.control()
                answer = look(page.read())
                if answer is not None:
                    if bell:
                        bell.ring()
                    return answer
                now = time.monotonic()
                dead_since = None if page.sidecar_alive else dead_since or now
                if now >= deadline or (dead_since is not None and now - dead_since > min(RESTART_GRACE, timeout)):
                    return None
                bell = bell or Bell(self.paths)
                bell.wait(deadline - now)
        finally:
            if bell:
                bell.close()


_pools: dict[PoolPaths, Pool] = {}
_pools_lock = threading.Lock()


def pool(paths: Optional[PoolPaths] = None) -> Pool:
    """The process's one view of a pool (by default the one that the environment names)."""
    paths = paths or PoolPaths.from_environment()
    with _pools_lock:
        return _pools.setdefault(paths, Pool(paths))


def _forget_after_fork() -> None:
    """A child has its parent's maps but makes attachments of its own: the parent may end before it."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def newest(models: Catalog, model: str, kind: str = catalog.CHECKPOINT, key: Optional[str] = None) -> Optional[Generation]:
    """The newest ready generation; None while there is only one that is loading.

    Raises NotFound if the pool has no such model, NotReady if loading it has failed.
    """
    known = [g for g in models.of_model(model) if g.kind == kind and (key is None or g.key == key)]
    ready = [g for g in known if g.state == catalog.READY]
    if ready:
        return ready[0]
    if any(g.state == catalog.LOADING for g in known):
        return None
    failed = [g for g in known if g.state == catalog.FAILED]
    if failed:
        raise NotReady(f"the sidecar could not load {model!r}: {failed[0].reason}")
    held = ", ".join(sorted({g.model for g in models.generations if g.kind == kind})) or "no model"
    raise NotFound(f"the pool holds no {model!r} but {held}: name it in 'ballast serve', or set BALLAST_MODEL")


def residency(
    view: Pool, generation: Generation, contents: Manifest, where: Optional[device.Gpu] = None, engine: str = ""
) -> Residency:
    """A generation where it is wanted: in host memory, or on a GPU; there from the copy that lies on it, or else copied from
    host memory, with a line that says why. Raises NotFound if the generation is being retired."""
    if where is None:
        return view.attach(generation, contents, engine=engine)
    try:
        began = time.perf_counter()
        copy = view.attach_copy(generation, contents, where, engine)
        say_once(
            logging.INFO, f"{generation.model} lies in the memory of {where.uuid}: generation {generation.number} of pool "
            f"{view.paths.pool} ({gib(contents.nbytes)}), mapped in {1000 * (time.perf_counter() - began):.1f} ms",
            about=(generation, where.uuid),
        )  # fmt: skip
        return copy
    except HandoffError as error:
        say_once(
            logging.WARNING, f"{generation.model} is copied from host memory to {where.uuid}: {error}",
            about=(generation, where.uuid, type(error)),
        )  # fmt: skip
        return Uploaded(view.attach(generation, contents, engine=engine), device.torch_device(where.ordinal))


def fall_back(settings: Settings, what: str, reason: object) -> None:
    """The one place where something that did not fit becomes a line in the log, or with `require` the end."""
    line = f"{what}: {reason}"
    if settings.mode == "require":
        _stop(line)
    say_once(logging.WARNING, f"{line} (loading without Ballast)", about=(what, type(reason)))


def _stop(line: str) -> NoReturn:
    raise HandoffError(f"{line} (BALLAST_MODE=require: not loading without Ballast)")


class Progress:
    """Tells a person who waits how far the sidecar is, every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def tell(self, generation: Generation) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PROGRESS_EVERY
        configure_logging()
        share = f" ({100 * generation.done // generation.total} %)" if generation.total else ""
        log.info(
            "waiting for the sidecar, which has loaded %s of %s of %s%s",
            gib(generation.done), gib(generation.total), generation.model, share,
        )  # fmt: skip


def shard_for(path: str) -> Optional[Shard]:
    """The checkpoint file at `path` from memory, under a lease of its own map; None: read it as ever, and why was logged.

    Waits while a sidecar is loading just this file. Raises HandoffError only with BALLAST_MODE=require.
    """
    settings = Settings.read()
    if settings.mode == "off":
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None  # let the original say what is wrong with it
    opened = posix.inode(fd)
    try:
        began = time.perf_counter()
        return _Search(settings, fd, Path(os.fsdecode(path)), began).run()
    except HandoffError as error:
        fall_back(settings, f"{_place(path)} is not taken from memory", error)
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE):
            pool().let_go()  # of a descriptor that the engine may need now
    except Exception as error:  # a fault of ours must not take the engine down
        if settings.mode == "require":
            raise
        fall_back(settings, f"{_place(path)} is not taken from memory", f"{type(error).__name__}: {error}")
        log.debug("the whole story", exc_info=True)
    finally:
        posix.close_kept(fd, opened)  # it may have waited for minutes
    return None


def _place(path: str) -> str:
    """What a log line names: the directory, since its files share their fate."""
    return os.path.dirname(os.path.abspath(os.fsdecode(path)))


class _Search:
    """Looks for one file among the generations of a pool, newest first, ready ones before those being loaded."""

    def __init__(self, settings: Settings, fd: int, path: Path, began: float) -> None:
        self.settings = settings
        self.file = identity.File(fd, path)
        self.began = began
        self.pool = pool()
        self.reason: Optional[HandoffError] = None
        self.pending: Optional[Generation] = None
        self.progress = Progress()

    def run(self) -> Shard:
        found = self.pool.wait(self._look, self.settings.wait)
        if found is not None:
            return found
        if self.pending is not None:
            raise NotReady(
                f"the sidecar has not finished loading {self.pending.model!r} after BALLAST_WAIT={self.settings.wait:.0f} s"
                if self.pool.control().sidecar_alive
                else f"the sidecar died while loading {self.pending.model!r}; restart it with 'ballast serve'"
            )
        raise self._take_reason() or NotFound("the pool does not hold it")

    def _note(self, error: HandoffError) -> None:
        # Without its traceback, and out of here before it is raised again: in a ring of exception, frames and this object the
        # record and the descriptors of a failed attempt would live until the garbage collector comes by.
        self.reason = error.with_traceback(None)

    def _take_reason(self) -> Optional[HandoffError]:
        try:
            return self.reason
        finally:
            self.reason = None

    def _look(self, now: Catalog) -> Optional[Shard]:
        wanted = [g for g in now.generations if self.settings.model in (None, g.model) and g.kind == catalog.CHECKPOINT]
        wanted.sort(key=lambda g: (g.state != catalog.READY, -g.number))
        self.pending = None
        for generation in wanted:
            if generation.state not in (catalog.READY, catalog.LOADING):
                continue
            try:
                shard = self._try(generation)
            except NotFound as error:  # retired between two looks, or some of it is missing
                later = self.pool.catalog()
                if later.sequence != now.sequence:
                    return self._look(later)
                self._note(error)
                continue
            except HandoffError as error:
                self._note(error)
                continue
            if shard is not None:
                return shard
        if self.pending is not None:
            self.progress.tell(self.pending)
            return None
        failed = [g for g in wanted if g.state == catalog.FAILED]
        raise self._take_reason() or (
            NotReady(f"the sidecar could not load {failed[-1].model!r}: {failed[-1].reason}")
            if failed
            else NotFound(f"pool {self.pool.paths.pool!r} does not hold it (it holds {', '.join(now.models()) or 'nothing'})")
        )

    def _try(self, generation: Generation) -> Optional[Shard]:
        """The file out of this generation; None if it is not in it or not loaded yet. Raises if it is another's."""
        contents = self.pool.manifest(generation)
        alike = [shard for shard in contents.shards if shard.identity.size == self.file.stat.size]
        # The very file first, if it is there, then its namesake: what is wrong with that is what should be said.
        alike.sort(key=lambda s: (s.identity.stat != self.file.stat, os.path.basename(s.name) != self.file.path.name))
        for shard in alike:
            rows = sorted(contents.rows(shard), key=lambda row: row.start)
            sizes, starts = [row.nbytes for row in rows], [row.start for row in rows]
            sample = None
            # The manifest is complete a moment before the catalog says ready, and stays so if the sidecar dies between the two.
            if generation.state == catalog.LOADING or not contents.complete:
                if self.file.header[0] != shard.identity.header:
                    continue
                if not generation.shard_done(shard.segment):
                    self.pending = generation
                    continue
                sample = self._sample(generation, shard.segment, rows)
            try:
                self.file.check(shard.identity, sizes, starts, sample, contents.file(shard))
            except Mismatch as mismatch:
                if self.reason is None:
                    self._note(mismatch)
                continue
            served = Shard(contents, shard, self.pool.attach(generation, contents, [shard.segment]))
            self._tell(generation, contents)
            return served
        return None

    def _sample(self, generation: Generation, segment: int, rows: list[manifest.Tensor]) -> str:
        """The sample of a segment that is complete although its generation is not."""
        path = self.pool.paths.segment(generation.number, segment)
        fd = posix.open_existing(path)
        try:
            plan = identity.sample_plan([row.nbytes for row in rows])
            return identity.sample_digest(fd, [(rows[i].offset + offset, count) for i, offset, count in plan], path)
        finally:
            os.close(fd)

    def _tell(self, generation: Generation, contents: Manifest) -> None:
        label = f"{self.pool.paths.pool}/{generation.number}"
        if label in _said:
            return
        _said.add(label)
        configure_logging()
        log.info(
            "%s comes from memory: generation %d of pool %s (%s, %d tensors), attached in %.1f ms",
            generation.model, generation.number, self.pool.paths.pool, gib(contents.nbytes), len(contents.tensors),
            1000 * (time.perf_counter() - self.began),
        )  # fmt: skip
