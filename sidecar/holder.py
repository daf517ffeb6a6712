"""The holder: a small process that owns device memory and nothing else, so that the sidecar may crash or be replaced.

What a process has allocated on a GPU goes with it, whoever has it mapped. So none of it belongs to the sidecar. The holder
follows the pool as an engine does, by reading: a generation that is ready, or the complete segments of one that is being
loaded, it copies to its GPUs; what is not in service any more, and nobody has open, it frees. What it has it writes on its
pages (`engine_shim.handoff.holder`); the sidecar puts that into the manifests. Nobody sends it commands.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from types import FrameType

from engine_shim.handoff import attachment, catalog, holder, manifest, posix
from engine_shim.handoff.attachment import Record
from engine_shim.handoff.catalog import Catalog, ControlPage, Generation
from engine_shim.handoff.errors import Busy, DeviceError, HandoffError, NotFound
from engine_shim.handoff.manifest import DeviceCopy, Manifest, Window
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.room import gib
from sidecar import cuda

log = logging.getLogger("ballast")

_TURN = 0.1  # seconds between two looks at the pool
SETTLE = 300.0  # seconds in which an engine that starts on a GPU finds that nobody changes what is free there
_DECIDED = 5.0  # seconds until one that started at the same time has settled or given up, or it is taken for settled
_AGAIN = 5.0  # seconds until a copy that failed is tried again


@dataclass
class Held:
    """One generation's memory on one GPU."""

    gpu: cuda.Gpu
    generation: int
    model: str
    sizes: tuple[int, ...]
    pointers: list[int] = field(default_factory=list)
    uploaded: int = 0  # segments
    copy: DeviceCopy | None = None  # once it is whole
    withdrawn: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Holder:
    """Holds copies of one pool's generations on some GPUs, until the pool is gone or it is told to stop."""

    def __init__(self, paths: PoolPaths, gpus: list[cuda.Gpu], way: str = cuda.STAGED, wait: bool = True) -> None:
        self.paths = paths
        self.gpus = gpus
        self._way = way
        self._wait = wait  # for a pool that is not there yet
        self._held: dict[tuple[int, str], Held] = {}
        self._lacking: dict[tuple[int, str], str] = {}
        self._retry: dict[tuple[int, str], float] = {}
        self._manifests: dict[int, tuple[object, Manifest]] = {}
        self._written: dict[int, holder.Page] = {}
        self._engines: dict[str, tuple[int, Record]] = {}  # attachments to our memory, each by a descriptor of our own
        self._signals = 0  # so many have come; all that their handler does is count
        self._page: ControlPage | None = None
        self._token = holder.Token(paths, [gpu.uuid for gpu in gpus])
        try:
            self._settle()
        except BaseException:
            self._token.release()
            raise

    @property
    def identifier(self) -> str:
        return self._token.identifier

    def _settle(self) -> None:
        """Makes sure of being alone on these GPUs. Raises Busy.

        Who starts has his record there before he looks, so that of two at least one sees the other. One that has settled
        stays. Of two that have not, the one with the larger identifier gives up; the other waits until it has: it may have
        looked too soon, and settle.
        """
        ours = {gpu.uuid for gpu in self.gpus}
        deadline = time.monotonic() + _DECIDED
        while others := [o for o in holder.alive(self.paths) if o.identifier != self.identifier and ours & set(o.gpus)]:
            for other in others:
                if other.settled or other.identifier < self.identifier or time.monotonic() > deadline:
                    raise Busy(
                        f"another holder of pool {self.paths.pool!r} (pid {other.pid}) has "
                        f"{', '.join(sorted(ours & set(other.gpus)))} already: stop that one, or give this one other GPUs"
                    )
            time.sleep(0.01)
        self._token.settle()

    def run(self) -> int:
        """Holds until the pool is gone, or a signal comes and nobody uses the memory any more."""
        previous = [signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            log.info("holding device memory for pool %s on %s", self.paths.pool, ", ".join(g.uuid for g in self.gpus))
            while not self._told() and self._turn():
                time.sleep(_TURN)
            self._wait_for_engines()
            return 0
        finally:
            for held in list(self._held.values()):
                with contextlib.suppress(DeviceError):
                    self._free(held)
            for gpu in self.gpus:
                with contextlib.suppress(DeviceError):
                    gpu.close()
            self._token.release()
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
                signal.signal(number, handler)
            log.info("holds no device memory any more")

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1

    def _told(self) -> bool:
        return self._signals > 0

    def _wait_for_engines(self) -> None:
        """Whoever still has our memory open would read what is not defined: so we stay until he is gone."""
        for held in self._held.values():
            held.withdrawn = True
        if self._page is not None and self._page.current:
            self._write_pages()
        self._attachments()
        told = False
        while self._engines:
            self._attachments()
            if self._engines and not told:
                log.info("waiting for %d engines that use device memory", len(self._engines))
                told = True
            if self._signals > 1:  # whoever asks a third time means it, engines or not
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
            time.sleep(_TURN)

    # One turn

    def _turn(self) -> bool:
        """Brings the copies up to date with the pool. False once the pool is gone."""
        if self._page is None:
            try:
                self._page = ControlPage.open(self.paths)
            except NotFound:
                return self._wait  # its sidecar has not started yet; or, if that started us, is gone with the pool
            except HandoffError as error:
                log.warning("%s", error)
                return True
        if not self._page.current:
            log.info("pool %s was removed", self.paths.pool)
            return False
        try:
            now = self._page.read()
        except HandoffError:
            return True
        records = self._attachments()
        wanted = self._wanted(now)
        for place, held in list(self._held.items()):
            unwanted = held.withdrawn or place not in wanted
            if (unwanted and not self._settling(held.gpu, records)) or self._gives_way(held, records):
                self._withdraw(held, records)
        for place in [place for place in self._lacking if place not in wanted]:
            del self._lacking[place]
        for (_, uuid), generation in wanted.items():
            if self._told():
                break
            self._bring(generation, next(gpu for gpu in self.gpus if gpu.uuid == uuid))
        self._write_pages()
        for number in [number for number in self._manifests if now.get(number) is None]:
            del self._manifests[number]
        return True

    def _attachments(self) -> list[Record]:
        """Those of all living engines, and of those that have our memory open although somebody has removed their records."""
        records = list(attachment.alive(self.paths))
        self._look_at_engines(records)
        there = {record.identifier for record in records}
        return [*records, *(record for _, record in self._engines.values() if record.identifier not in there)]

    def _look_at_engines(self, records: list[Record]) -> None:
        """Keeps a descriptor of the record of each engine that has our memory open: it tells of his life however the pool's
        files fare."""
        ours = {holder.DEVICE + gpu.uuid for gpu in self.gpus}
        for record in records:
            if record.residency in ours and record.identifier not in self._engines:
                with contextlib.suppress(HandoffError):
                    self._engines[record.identifier] = posix.open_existing(self.paths.attachment(record.identifier)), record
        for identifier, (fd, record) in list(self._engines.items()):
            if not posix.byte_is_locked(fd, 0):
                os.close(fd)
                del self._engines[identifier]
                with contextlib.suppress(HandoffError):  # he may only have put a new record in its place
                    again = posix.open_existing(self.paths.attachment(identifier))
                    if posix.byte_is_locked(again, 0):
                        self._engines[identifier] = again, record
                    else:
                        os.close(again)

    def _wanted(self, now: Catalog) -> dict[tuple[int, str], Generation]:
        """Which generation is to be on which GPU: of each model and key the newest, an engine's state on the GPU that it comes
        from, and a checkpoint only where no engine's state of it is. In the order in which they are to get room."""
        newest: dict[tuple[str, str, str], Generation] = {}
        for generation in sorted(now.generations, key=lambda g: g.number):
            if generation.state == catalog.READY:
                newest[generation.model, generation.kind, generation.key] = generation
        places: dict[tuple[int, str], Generation] = {}
        taken: set[tuple[str, str]] = set()
        recent = sorted(newest.values(), key=lambda g: -g.number)
        for generation in recent:
            if generation.kind != catalog.ENGINE:
                continue
            contents = self._manifest(generation)
            if contents is None:
                continue
            home = contents.state.get("gpu")
            for gpu in self.gpus:
                if home is None or home == gpu.uuid:
                    places[generation.number, gpu.uuid] = generation
                    taken.add((generation.model, gpu.uuid))
        loading = [g for g in now.generations if g.state == catalog.LOADING]
        for generation in [*recent, *loading]:
            if generation.kind == catalog.CHECKPOINT:
                for gpu in self.gpus:
                    if (generation.model, gpu.uuid) not in taken:
                        places[generation.number, gpu.uuid] = generation
        return places

    def _manifest(self, generation: Generation) -> Manifest | None:
        path = self.paths.manifest(generation.number)
        try:
            status = os.stat(path)
            stamp = (status.st_ino, status.st_mtime_ns, generation.state)
            cached = self._manifests.get(generation.number)
            if cached is None or cached[0] != stamp:
                cached = self._manifests[generation.number] = (stamp, manifest.read(path))
            return cached[1]
        except (OSError, HandoffError):
            return None  # gone meanwhile; the catalog will say so

    # Room

    def _claims(self, gpu: cuda.Gpu, records: list[Record]) -> list[Record]:
        place = holder.CLAIM + gpu.uuid
        return [record for record in records if record.residency == place]

    def _settling(self, gpu: cuda.Gpu, records: list[Record]) -> bool:
        """Whether an engine has just begun to use this GPU, and measures what is free there."""
        return any(abs(time.time() - record.since) < SETTLE for record in self._claims(gpu, records))

    def _gives_way(self, held: Held, records: list[Record]) -> bool:
        """Whether an engine that has just started on this GPU needs the room more than a copy which nobody uses."""
        claims = self._claims(held.gpu, records)
        kept = any(record.generation == held.generation for record in claims)
        return self._settling(held.gpu, records) and not kept and not self._used(held, records)

    @staticmethod
    def _used(held: Held, records: list[Record]) -> bool:
        """Whether a living engine has this copy open, or may have: a record that cannot be read counts for all."""
        place = (held.generation, holder.DEVICE + held.gpu.uuid)
        return any(record.generation == -1 or (record.generation, record.residency) == place for record in records)

    # Copies

    def _bring(self, generation: Generation, gpu: cuda.Gpu) -> None:
        """Goes on with one copy, as far as there is something to go on with."""
        place = (generation.number, gpu.uuid)
        held = self._held.get(place)
        if held is not None and (held.withdrawn or held.copy is not None):
            return
        if held is None and time.monotonic() < self._retry.get(place, 0.0):
            return
        contents = self._manifest(generation)
        if contents is None:
            return
        try:
            if held is None:
                held = self._begin(contents, gpu)
                if held is None:
                    return
            self._fill(held, generation)
        except (DeviceError, OSError, HandoffError) as error:
            self._retry[place] = time.monotonic() + _AGAIN
            if held is not None:
                self._give_up(held)
            self._say_lacking(place, generation.model, str(error))

    def _begin(self, contents: Manifest, gpu: cuda.Gpu) -> Held | None:
        place = (contents.generation, gpu.uuid)
        needed, free = sum(contents.segments), gpu.free()
        for old in [h for h in self._held.values() if h.gpu is gpu and h.model == contents.model]:
            if needed > free and old.generation < contents.generation:
                self._withdraw(old, self._attachments())  # of another key, say, which nobody uses any more
                free = gpu.free()
        if needed > free:
            self._say_lacking(place, contents.model, f"it needs {gib(needed)} and {gib(free)} are free; it is tried again")
            return None
        held = self._held[place] = Held(gpu, contents.generation, contents.model, contents.segments)
        self._lacking[place] = "it is being copied"
        # First the page, then a look for claims; an engine claims first, and then looks at the page. One sees the other.
        self._write_pages()
        if self._settling(gpu, self._attachments()):
            del self._held[place]
            self._say_lacking(place, contents.model, "an engine is starting on that GPU; it is tried again later")
            return None
        try:
            for size in contents.segments:
                held.pointers.append(gpu.allocate(size))
        except DeviceError:
            self._give_up(held)
            raise
        return held

    def _fill(self, held: Held, generation: Generation) -> None:
        began, first = time.monotonic(), held.uploaded
        while held.uploaded < len(held.sizes):
            index = held.uploaded
            if generation.state == catalog.LOADING and not generation.shard_done(index):
                return  # the rest when it is there
            fd = posix.open_existing(self.paths.segment(generation.number, index))
            try:
                held.gpu.upload(held.pointers[index], fd, held.sizes[index], self._way, self._told)
            finally:
                os.close(fd)
            if self._told():
                return
            held.uploaded += 1
        if generation.state != catalog.READY:
            return
        windows = []
        for pointer in held.pointers:
            windows.append(Window(*held.gpu.export(pointer)))
        held.copy = DeviceCopy(held.gpu.uuid, self.identifier, tuple(windows))
        self._lacking.pop((held.generation, held.gpu.uuid), None)
        took, done = time.monotonic() - began, sum(held.sizes[first:])
        log.info(
            "%s, generation %d, is in the memory of %s: %s, %.2f s, %s/s",
            held.model, held.generation, held.gpu.uuid, gib(done), took, gib(int(done / (took or 1))),
        )  # fmt: skip

    def _say_lacking(self, place: tuple[int, str], model: str, reason: str) -> None:
        before = self._lacking.get(place, "")
        self._lacking[place] = reason
        if before[:12] != reason[:12]:  # numbers in it change from turn to turn
            log.warning("%s has no copy on %s and is served from host memory: %s", model, place[1], reason)

    def _withdraw(self, held: Held, records: list[Record]) -> None:
        """Takes a copy out of service, and frees it unless somebody has it open. Page first, then a look: see the protocol."""
        if not held.withdrawn:
            held.withdrawn = True
            self._write_pages()
            records = self._attachments()
        if self._used(held, records):
            return
        size = held.nbytes
        self._give_up(held)
        self._write_pages()
        log.info("freed generation %d of %s on %s (%s)", held.generation, held.model, held.gpu.uuid, gib(size))

    def _give_up(self, held: Held) -> None:
        self._free(held)
        self._held.pop((held.generation, held.gpu.uuid), None)

    @staticmethod
    def _free(held: Held) -> None:
        held.copy = None
        while held.pointers:
            held.gpu.release(held.pointers.pop())

    # What others read

    def _write_pages(self) -> None:
        numbers = {number for number, _ in (*self._held, *self._lacking)}
        for number in numbers | set(self._written):
            mine = [held for (n, _), held in self._held.items() if n == number]
            page = holder.Page(
                number,
                tuple(held.copy for held in mine if held.copy is not None and not held.withdrawn),
                {uuid: reason for (n, uuid), reason in self._lacking.items() if n == number},
                tuple(held.gpu.uuid for held in mine),
            )
            if self._written.get(number) == page:
                continue
            try:
                self._token.write(page)
            except HandoffError as error:
                log.warning("%s", error)
                continue
            if page.held or page.lacking:
                self._written[number] = page
            else:
                self._written.pop(number, None)


def run(paths: PoolPaths, spec: str, wait: bool = True) -> int:
    """Holds copies on the GPUs that `spec` names until the pool is gone; with `wait`, the pool may come later.

    Raises DeviceError or Busy.
    """
    way = os.environ.get("BALLAST_UPLOAD", cuda.STAGED).strip().lower()
    if way not in cuda.WAYS:
        log.warning("BALLAST_UPLOAD=%s is none of %s; taken as %s", way, ", ".join(cuda.WAYS), cuda.STAGED)
        way = cuda.STAGED
    return Holder(paths, cuda.gpus(spec), way, wait).run()
