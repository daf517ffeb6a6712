"""The writer's side of the handoff: generations come, are adopted, are retired and go; the catalog tells of each step.

Every step is written so that a kill after it leaves something that the next sidecar can name: what the catalog does not
list is swept, what it lists as ready is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine_shim.handoff import attachment, catalog, holder, manifest, posix, publication, request, semaphores
from engine_shim.handoff.catalog import Catalog, ControlPage, Generation
from engine_shim.handoff.errors import Busy, Damaged, Foreign, HandoffError, NotFound
from engine_shim.handoff.identity import DIGEST_BYTES
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.room import gib
from engine_shim.handoff.semaphores import LIFE_BYTE, Bell, Guard
from sidecar import loader

log = logging.getLogger("ballast")

_REACHABLE = 10**12  # generations; one every second for thirty thousand years
SCRUBBER = "ballast scrub"  # what the scrubber's attachments say they are of
KEPT = 2  # ready generations of a model: the one served, and the one before, for those who want to go back
GUARD_TIMEOUT = 5.0
_NICE = 10  # of who digests a publication: a tenth of a processor that others want, all of one that nobody does
_LOOK_WITHIN = 1.0  # seconds; a holder looks ten times as often
_PROGRESS_EVERY = 0.1  # seconds between two writes of progress to the catalog


@dataclass(frozen=True)
class Adopted:
    """What a restarted sidecar found intact."""

    generation: Generation
    contents: Manifest


class PoolWriter:
    """The one sidecar of a pool. Holds the control page's locks for its whole life; safe to use from several threads."""

    def __init__(self, paths: PoolPaths) -> None:
        """Takes the pool. Raises Busy if another sidecar has it, HandoffError if its directory cannot be used."""
        self.paths = paths
        self.lock = threading.RLock()  # for whoever looks at the catalog and then acts on it
        if not paths.dir.is_dir():
            raise NotFound(f"{paths.dir} is not a directory: mount a memory file system there, or change --dir")
        self.page = _take(paths)
        try:
            _share(self.page.fd, posix.PRIVATE, paths.group)
            taken = self._highest()
        except HandoffError:
            self.page.close()
            raise
        _warn_of(paths.dir)
        self.guard = Guard(paths, self.page.fd, create=True)
        self.guard.reset()
        self.bell = Bell(paths, create=True)
        try:
            previous = self.page.read()
        except (NotFound, Damaged) as error:
            if isinstance(error, Damaged):
                log.warning("%s; starting with an empty pool", error)
            previous = Catalog(boot="")
        self.admit: Callable[[Manifest], None] = lambda contents: None  # raises what forbids a publication to come in
        # Hears of a publication's bytes as they are digested, and raises what ends that.
        self.pace: Callable[[int], None] = lambda count: None
        self._next_progress = 0.0
        self._foreign: set[Path] = set()
        self.unfinished: list[int] = []
        self.copied: set[int] = set()  # generations found with device copies in their manifests
        self.catalog = dataclasses.replace(
            previous, boot=secrets.token_hex(16), next=max(previous.next, taken + 1), pool=paths.pool
        )

    # Reading

    def _highest(self) -> int:
        """Numbers are not used twice, whatever happened to the catalog, nor where somebody has put a file of that name; one
        that nobody could have reached is a stranger's, too."""
        numbers = (name.generation for name in self.paths.objects() if name.generation)
        return max((number for number in numbers if number < _REACHABLE), default=0)

    def ready(self, model: str, kind: str = catalog.CHECKPOINT) -> list[Generation]:
        """A model's ready generations, newest first."""
        return [g for g in self.catalog.of_model(model, catalog.READY) if g.kind == kind]

    # Starting and adopting

    def adopt(self) -> list[Adopted]:
        """Takes over what the previous sidecar left: keeps what is whole, forgets the rest, then sweeps.

        Checks each manifest's digest and every segment's presence, owner, mode and size; reads no tensor and no disk. What
        cannot be looked at, for want of descriptors, say, is no reason to drop it: HandoffError.
        What was being loaded is `unfinished`: it stays announced, without its bytes, for the engines that wait for it.
        The caller drops it once he has announced what comes in its place.
        """
        adopted = []
        kept = self.catalog
        for generation in self.catalog.generations:
            if generation.state == catalog.RETIRED:
                continue
            if generation.state == catalog.READY:
                try:
                    adopted.append(Adopted(generation, self._check(generation)))
                    continue
                except (NotFound, Foreign, Damaged) as error:
                    log.warning("generation %d of %s is dropped: %s", generation.number, generation.model, error)
            if generation.state == catalog.LOADING and generation.kind == catalog.CHECKPOINT:
                self.unfinished.append(generation.number)
                continue
            kept = kept.without(generation.number)
        self._write(_without_what_it_led(self.catalog, kept))
        for number in self.unfinished:
            self.reset(number)
        self.sweep()
        return adopted

    def _check(self, generation: Generation) -> Manifest:
        path = self.paths.manifest(generation.number)
        contents = manifest.read(path)
        fd = posix.open_existing(path)
        try:
            _share(fd, posix.PUBLISHED, self.paths.group)
        finally:
            os.close(fd)
        if (contents.generation, contents.model, contents.complete) != (generation.number, generation.model, True):
            raise Damaged(f"{path} is the manifest of something else")
        for index, size in enumerate(contents.segments):
            inode = contents.inodes[index] if contents.inodes else None
            self._check_segment(self.paths.segment(generation.number, index), size, inode)
        if contents.devices:
            self.copied.add(generation.number)
        return contents

    def _check_segment(self, path: Path, size: int, inode: int | None = None) -> None:
        fd = manifest.open_segment(path, size, inode)
        try:
            status = os.fstat(fd)
            if status.st_size != size or status.st_mode & 0o222:
                raise Damaged(f"{path} has another size or mode than it was published with")
            _share(fd, posix.PUBLISHED, self.paths.group)
        finally:
            os.close(fd)

    def sweep(self) -> int:
        """Removes what belongs to nobody: objects that the catalog does not list, records of dead engines, publications
        of dead publishers. Says how many."""
        with self.lock, self.guard.hold(GUARD_TIMEOUT):
            count = attachment.sweep(self.paths) + holder.sweep(self.paths)
            listed = {g.number for g in self.catalog.generations if g.state != catalog.FAILED}
            building = {g.number for g in self.catalog.generations if g.state == catalog.LOADING}
            objects = self.paths.objects()
            whole = {name.file for name in objects if name.kind == "publication" and not name.tmp}
            for name in objects:
                path = self.paths.dir / name.file
                if name.generation is not None:
                    gone = name.generation not in listed or (name.tmp and name.generation not in building)
                elif name.kind == "ctl":
                    gone = name.tmp
                elif name.kind in ("request", "answer"):
                    gone = request.abandoned(self.paths, path)
                elif name.kind == "publication":
                    base = ".".join(name.file.split(".")[:3])  # ballast-<pool>.in.<id>
                    gone = (name.tmp or base not in whole) and publication.alive(path) is False
                else:
                    gone = False
                if gone:
                    count += self._remove(path)
        if count:
            log.info("swept %d objects that belonged to nobody", count)
        return count

    def _remove(self, path: Path) -> bool:
        """Removes an object of ours. What another user has put among them is none, and his to remove."""
        try:
            return posix.remove(path)
        except Foreign as error:
            if path not in self._foreign:
                self._foreign.add(path)
                log.warning("left alone: %s", error)
            return False

    # Generations

    def begin(self, contents: Manifest) -> Manifest:
        """Announces a generation that is about to be loaded, and gives it its number."""
        with self.lock:
            self.catalog = dataclasses.replace(self.catalog, next=max(self.catalog.next, self._highest() + 1))
            contents = dataclasses.replace(contents, generation=self.catalog.next, complete=False)
            generation = Generation(
                contents.generation, contents.model, contents.kind, catalog.LOADING, contents.nbytes,
                since=time.time(), key=str(contents.engine.get("key", "")),
            )  # fmt: skip
            # The number is used up first: if we die between the two, the next sidecar does not meet it again.
            self._write(dataclasses.replace(self.catalog, next=contents.generation + 1))
            manifest.write(contents, self.paths.manifest(contents.generation), self.paths.group)
            self._write(self.catalog.with_generation(generation))
            return contents

    def progress(self, number: int, done: int, segment_done: int | None = None) -> None:
        """Tells waiting engines how far loading is; a complete segment at once, bytes ten times a second."""
        with self.lock:
            now = time.monotonic()
            generation = self.catalog.get(number)
            if generation is None or (segment_done is None and now < self._next_progress):
                return
            self._next_progress = now + _PROGRESS_EVERY
            shards = generation.shards
            if segment_done is not None:
                shards = f"{int(shards or '0', 16) | 1 << segment_done:x}"
            self._write(self.catalog.with_generation(dataclasses.replace(generation, done=done, shards=shards)))

    def publish(self, contents: Manifest) -> None:
        """Makes a loaded generation ready: its manifest first, then the catalog. Retires what is too old."""
        with self.lock:
            generation = self.catalog.get(contents.generation)
            if generation is None:
                raise NotFound(f"generation {contents.generation} was dropped while it was being loaded")
            whole = dataclasses.replace(contents, complete=True, inodes=self._inodes(contents))
            manifest.write(whole, self.paths.manifest(contents.generation), self.paths.group)
            if generation.kind == catalog.CHECKPOINT:
                content = whole.content
            else:  # once that is not kept any more, the state goes with it
                newest = self.ready(generation.model)
                content = _told_content(whole) or (newest[0].content if newest else "")
            made = dataclasses.replace(
                generation, state=catalog.READY, done=generation.total, shards="", since=time.time(), content=content
            )
            now = self._with_newest(made)
            for failed in now.of_model(made.model, catalog.FAILED):
                if made.kind in (catalog.CHECKPOINT, failed.kind):
                    now = now.without(failed.number)
            self._write(now)

    def _with_newest(self, made: Generation) -> Catalog:
        """The catalog with a generation that becomes ready, in which what that ends has ended: one write, since a kill between
        two would leave a generation more in memory than anybody counts on, until the next one comes."""
        now = self.catalog.with_generation(made)
        checkpoint = made.kind == catalog.CHECKPOINT
        same = [g for g in now.of_model(made.model, catalog.READY) if (g.kind, g.key) == (made.kind, made.key)]
        # Of an engine's state the key says the content: two with one key are one too many.
        for old in same[KEPT if checkpoint else 1 :]:
            now = now.with_generation(_retired(old))
        return _without_outlived(now, made.model) if checkpoint else now

    def _inodes(self, contents: Manifest) -> tuple[int, ...]:
        paths = [self.paths.segment(contents.generation, index) for index in range(len(contents.segments))]
        return tuple(posix.status(path).st_ino for path in paths)

    def again(self, number: int, over: int = 0, files: Mapping[str, Any] = MappingProxyType({})) -> Generation:
        """Publishes once more, as the newest, what a ready generation holds: its segments under new names, not copied.

        `over` is the generation that is rolled back from, `files` what is on disk meanwhile: see sidecar.history. Raises
        NotFound and others if the old one is not whole.
        """
        with self.lock:
            old = self.catalog.get(number)
            if old is None or old.state != catalog.READY:
                raise NotFound(f"generation {number} is not there any more: see 'ballast status'")
            contents = self._check(old)
            new = self.catalog.next
            self._write(dataclasses.replace(self.catalog, next=new + 1))
            # Until the catalog lists them, these are swept if we die.
            for index in range(len(contents.segments)):
                if not posix.link_new(self.paths.segment(number, index), self.paths.segment(new, index)):
                    raise Damaged(f"{self.paths.segment(new, index)} is in the way: remove it")
            again = dataclasses.replace(contents, generation=new, over=files)
            manifest.write(again, self.paths.manifest(new), self.paths.group)
            made = dataclasses.replace(old, number=new, since=time.time(), over=over)
            self._write(self._with_newest(made))
            return made

    def amend(self, number: int, change: Callable[[Manifest], Manifest]) -> os.stat_result:
        """Replaces a ready generation's manifest by what `change` makes of it, which differs in what is not its table of
        tensors. Says what is there now. Raises NotFound if the generation is not ready.

        In one go, since several threads amend, each another part: whoever has read it before would undo the others' changes.
        """
        path = self.paths.manifest(number)
        with self.lock:
            generation = self.catalog.get(number)
            if generation is None or generation.state != catalog.READY:
                raise NotFound(f"generation {number} is not there any more: see 'ballast status'")
            contents = change(manifest.read(path))
            manifest.write(contents, path, self.paths.group)
            over = generation.over if contents.over else 0
            self._write(self.catalog.with_generation(dataclasses.replace(generation, over=over)))
            return posix.status(path)

    def fail(
        self, model: str, reason: str, number: int | None = None, kind: str = catalog.CHECKPOINT, evicted: bool = False
    ) -> None:
        """Writes down why a model could not be had, in place of its generation where it had one already."""
        with self.lock:
            kept = self.catalog
            for old in kept.of_model(model, catalog.FAILED):
                if old.kind == kind:
                    kept = kept.without(old.number)
            number = self.catalog.next if number is None else number
            failed = Generation(number, model, kind, catalog.FAILED, reason=reason[:2000], since=time.time(), evicted=evicted)
            self._write(kept.with_generation(failed))
            self._remove_objects(number)

    def forget_failures(self, model: str) -> None:
        with self.lock:
            for old in self.catalog.of_model(model, catalog.FAILED):
                self._write(self.catalog.without(old.number))

    def reset(self, number: int) -> None:
        """Takes back what has been loaded of a generation, which stays announced: a successor may load it again."""
        with self.lock:
            generation = self.catalog.get(number)
            if generation is not None and generation.state == catalog.LOADING:
                self._write(self.catalog.with_generation(dataclasses.replace(generation, done=0, shards="")))
                self._remove_objects(number, "segment")

    def drop(self, number: int) -> None:
        """Forgets a generation and removes its objects. Whoever has them mapped keeps his bits."""
        with self.lock:
            self._write(self.catalog.without(number))
            self._remove_objects(number)

    def retire(self, *numbers: int, reason: str = "") -> None:
        """Takes generations out of service, at once. Each is freed by `collect` once no attachment to it is alive. States whose
        weights are not kept any more go with them, unless the newest has gone, which is loaded again."""
        with self.lock:
            now = self.catalog
            for generation in filter(None, map(now.get, numbers)):
                if generation.state != catalog.RETIRED:
                    now = now.with_generation(_retired(generation, reason))
            if now is not self.catalog:
                self._write(_without_what_it_led(self.catalog, now))

    def withdraw(self, model: str) -> None:
        """Takes a checkpoint out of service that is not asked for any more, and the engines' states that belong to it."""
        with self.lock:
            now = self.catalog
            for generation in self.ready(model):
                now = now.with_generation(_retired(generation))
            self._write(_without_outlived(now, model))

    def held(self) -> set[int]:
        """The generations that a living engine is attached to; all of them while there is a record that cannot be read."""
        return self._of(attachment.alive(self.paths))

    def used(self) -> set[int]:
        """As `held`, without the scrubber's record: it reads whatever there is, and lets go of what is retired."""
        return self._of(record for record in attachment.alive(self.paths) if record.engine != SCRUBBER)

    def _of(self, records: Iterable[attachment.Record]) -> set[int]:
        found = {record.generation for record in records}
        return {g.number for g in self.catalog.generations} if -1 in found else found

    def collect(self) -> int:
        """Frees retired generations that nobody holds; says how many bytes. Looks for attachments only after the catalog
        says retired: an engine looks at the catalog only after its record is written."""
        retired = [g for g in self.catalog.generations if g.state == catalog.RETIRED]
        if not retired:
            return 0
        held = self.held()
        freed = 0
        for generation in retired:
            if generation.number not in held:
                self.drop(generation.number)
                freed += generation.total
                log.info("freed generation %d of %s (%s)", generation.number, generation.model, gib(generation.total))
        return freed

    def publications(self) -> list[str]:
        """What engines have published and nobody has adopted yet."""
        names = [name.file for name in self.paths.objects() if name.kind == "publication" and not name.tmp]
        last = [file.rsplit(".", 1)[-1] for file in names]
        return [identifier for identifier in last if not identifier.startswith("w")]

    def adopt_publication(self, identifier: str) -> bool:
        """Makes a generation of what an engine has published, after checking every number; or refuses it, and says so."""
        path = self.paths.publication(identifier)
        began = time.monotonic()
        number = None
        model = ""
        try:
            contents = manifest.read(path)
            model = contents.model
            key = contents.engine.get("key")
            if contents.kind != catalog.ENGINE or contents.complete or not isinstance(key, str):
                raise Damaged(f"{path.name} is not a publication of an engine's state")
            for index, size in enumerate(contents.segments):
                self._check_segment(self.paths.publication_segment(identifier, index), size)
            self.admit(contents)
            contents = self.begin(contents)
            number = contents.generation
            for index in range(len(contents.segments)):
                posix.rename(self.paths.publication_segment(identifier, index), self.paths.segment(number, index))
            self.publish(dataclasses.replace(contents, tensors=self._digested(contents)))
        except Exception as error:  # whatever it is: the thread that loads everything else goes on
            log.warning("a publication is refused: %s", error)
            log.debug("the whole story", exc_info=True)
            try:
                # One without its segments is what a killed sidecar left in the middle of adopting it; nobody waits for that.
                if isinstance(error, NotFound):
                    if number is not None:
                        self.drop(number)
                elif model:
                    self.fail(model, str(error), number, catalog.ENGINE)
            finally:
                self._remove_publication(identifier)
            return False
        self._remove_publication(identifier)
        log.info(
            "adopted the state of %s that an engine published: generation %d, %s, %.1f s",
            model, number, gib(contents.nbytes), time.monotonic() - began,
        )  # fmt: skip
        return True

    def _digested(self, contents: Manifest) -> list[manifest.Tensor]:
        # Just now the engine is on its way to its first answer, on the same processors.
        with ThreadPoolExecutor(1, "ballast-digest", initializer=_step_back) as executor:
            done = executor.submit(recompute, self.paths, contents, self.pace)
        digests = done.result()
        return [row._replace(digest=digests[index]) for index, row in enumerate(contents.tensors)]

    def _remove_publication(self, identifier: str) -> None:
        prefix = self.paths.publication(identifier).name
        for name in self.paths.objects():
            if name.file == prefix or name.file.startswith(prefix + "."):
                self._remove(self.paths.dir / name.file)

    def _remove_objects(self, number: int, kind: str | None = None) -> None:
        for name in self.paths.objects():
            if name.generation == number and kind in (None, name.kind):
                self._remove(self.paths.dir / name.file)

    def _write(self, new: Catalog) -> None:
        with self.lock:
            self.catalog = self.page.write(new)
        self.bell.ring()

    # The end

    def close(self, remove: bool) -> None:
        """Gives the pool up, to a successor or, with `remove`, altogether."""
        if remove:
            self.remove()
        self.guard.close()
        self.bell.close()
        self.page.close()

    def remove(self) -> None:
        """Removes every object and the semaphores."""
        if self.page.current:  # otherwise what bears the pool's name is a successor's
            with contextlib.suppress(HandoffError):  # somebody may have damaged the page; it goes in any case
                self._write(dataclasses.replace(self.catalog, generations=()))
                _let_holders_look(self.paths)
            remove_objects(self.paths)


def _told_content(publication: Manifest) -> str:
    """What the engine says that its weight files held; it may not know."""
    told = publication.state.get("content")
    return told if isinstance(told, str) and len(told) == 2 * DIGEST_BYTES else ""


def _retired(generation: Generation, reason: str = "") -> Generation:
    return dataclasses.replace(generation, state=catalog.RETIRED, since=time.time(), reason=reason[:2000])


def _without_what_it_led(before: Catalog, now: Catalog) -> Catalog:
    """The catalog in which states went with the checkpoints that have, of those models whose newest has stayed."""
    for model in before.models():
        old, new = ([g for g in c.of_model(model, catalog.READY) if g.kind == catalog.CHECKPOINT] for c in (before, now))
        if new and len(new) < len(old) and new[0].number == old[0].number:
            now = _without_outlived(now, model)
    return now


def _without_outlived(now: Catalog, model: str) -> Catalog:
    """The catalog in which engines' states are retired that belong to a content of the model's files that is not kept."""
    ready = now.of_model(model, catalog.READY)
    kept = {generation.content for generation in ready if generation.kind == catalog.CHECKPOINT}
    for state in ready:
        if state.kind == catalog.ENGINE and state.content and state.content not in kept:
            what = "the state of %s, generation %d, belongs to weights that were replaced, and is retired"
            log.info(what, model, state.number)
            now = now.with_generation(_retired(state))
    return now


def _step_back() -> None:
    """Gives this thread, alone, a low priority: it comes forward only when others leave it a processor."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _share(fd: int, mode: int, group: int | None) -> None:
    """Brings mode and group of an object up to what this sidecar was started with; root's objects are root's to change."""
    status = os.fstat(fd)
    wanted = mode | (posix.GROUP_READS if group is not None else 0)
    if status.st_uid == os.geteuid() or os.geteuid() == 0:
        if status.st_mode & 0o777 != wanted or group not in (None, status.st_gid):
            posix.share(fd, mode, group)


def _warn_of(directory: Path) -> None:
    """Says so if others may rename and remove what is in the pool's directory. Trust does not rest on that, serving does."""
    status = os.stat(directory)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        log.warning(
            "%s is writable by others and has no sticky bit: another user could remove the pool's files, though not replace "
            "them unnoticed; give it mode 1777, or the pool a directory of its own (docs/threat-model.md)", directory,
        )  # fmt: skip
    elif status.st_uid not in (0, os.geteuid()):
        log.warning("%s belongs to user %d, who could remove the pool's files: use another --dir", directory, status.st_uid)


def _take(paths: PoolPaths) -> ControlPage:
    """The control page, locked. One that a purge took away between opening and locking is not the pool's any more."""
    while True:
        page = _open_or_replace(paths)
        if not posix.try_flock(page.fd):
            page.close()
            raise Busy(
                f"another sidecar already serves pool {paths.pool!r}: use that one, stop it, or choose another --pool"
            )
        if page.current and posix.try_lock_byte(page.fd, LIFE_BYTE):
            return page
        page.close()


def _open_or_replace(paths: PoolPaths) -> ControlPage:
    """Opens or makes the control page; replaces one that is damaged if no sidecar holds it."""
    try:
        return ControlPage.create_or_open(paths)
    except Damaged as error:
        fd = posix.open_existing(paths.control, write=True)
        try:
            if posix.try_flock(fd) and posix.same_file(fd, paths.control):
                log.warning("%s; it is replaced", error)
                posix.remove(paths.control)
                return ControlPage.create_or_open(paths)
        finally:
            os.close(fd)
        raise


def _let_holders_look(paths: PoolPaths) -> None:
    """Waits, for a moment at most, until the holders of device memory have seen that nothing is served any more: then they know
    who has theirs open. An engine that they have not seen yet has nothing but its record, which is about to go."""
    deadline = time.monotonic() + _LOOK_WITHIN
    while any(page.gpus for _, page in holder.pages(paths)) and time.monotonic() < deadline:
        time.sleep(0.02)


def remove_objects(paths: PoolPaths) -> int:
    """Removes every object of a pool, the control page last, and its semaphores. Says how many. The caller holds the lock."""
    count = 0
    names = sorted(paths.objects(), key=lambda name: name.kind == "ctl")
    for name in names:
        try:
            count += posix.remove(paths.dir / name.file)
        except Foreign as error:  # another user's, and no reason to leave the rest
            log.warning("left alone: %s", error)
    semaphores.unlink(paths)
    return count


def purge(paths: PoolPaths, force: bool = False) -> int:
    """Removes a pool that has no sidecar. Raises Busy if it has one, or if engines are attached and not `force`; Foreign if it
    is another user's, unless we are root and told to `force`."""
    try:
        fd = posix.open_existing(paths.control, write=True)
    except NotFound:
        return remove_objects(paths)
    except Foreign as error:
        if os.geteuid() != 0:
            raise
        if not force:
            raise Foreign(f"{error}; or, as root, use --force") from None
        page = _another_users(paths)
        if page is None:
            return remove_objects(paths)
        fd = page
    try:
        if not posix.try_flock(fd):
            raise Busy(f"the sidecar of pool {paths.pool!r} is running: stop it first (it removes the pool on SIGINT)")
        held = list(attachment.alive(paths))
        if held and not force:
            who = ", ".join(f"{record.command or record.engine or 'an engine'} (pid {record.pid})" for record in held)
            raise Busy(f"{len(held)} engines are attached to pool {paths.pool!r}: {who}; stop them, or use --force")
        with Guard(paths, fd).hold(GUARD_TIMEOUT):
            return remove_objects(paths)
    finally:
        os.close(fd)


def _another_users(paths: PoolPaths) -> int | None:
    """Another user's control page, for root, who wants to know whether its sidecar lives; None if it is nobody's."""
    try:
        return posix.open_existing(paths.control, write=True, group=os.lstat(paths.control).st_gid)
    except (OSError, HandoffError):
        return None


def recompute(
    paths: PoolPaths, contents: Manifest, pace: Callable[[int], None] = lambda count: None
) -> dict[int, str]:
    """The digest of every tensor of a generation as it is in shared memory now: row → digest. `pace` hears of bytes read."""
    found: dict[int, str] = {}
    buffers = threading.local()
    for segment, rows in _by_segment(contents).items():
        with _segment(paths, contents, segment) as (fd, path):
            runs = [(contents.tensors[index].offset, contents.tensors[index].nbytes) for index in rows]
            for index, digest in zip(rows, loader.segment_digests(fd, runs, path, buffers, pace), strict=True):
                found[index] = digest
    return found


def _by_segment(contents: Manifest) -> dict[int, list[int]]:
    """The rows of each segment. Every segment has some, if only none."""
    rows: dict[int, list[int]] = {index: [] for index in range(len(contents.segments))}
    for index, row in enumerate(contents.tensors):
        rows[row.segment].append(index)
    return rows


@contextlib.contextmanager
def _segment(paths: PoolPaths, contents: Manifest, index: int) -> Iterator[tuple[int, Path]]:
    path = paths.segment(contents.generation, index)
    fd = manifest.open_segment(path, contents.segments[index], contents.inodes[index] if contents.inodes else None)
    try:
        yield fd, path
    finally:
        os.close(fd)


def damaged(
    paths: PoolPaths, contents: Manifest, pace: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[str, int]]:
    """What is not as it was published, down to the last bit, and in which segment: tensors, and the bytes between them."""
    digests: Mapping[int, Any] = recompute(paths, contents, pace)
    for index, row in enumerate(contents.tensors):
        if digests[index] != row.digest:
            yield row.name, row.segment
    for segment, rows in _by_segment(contents).items():
        end = 0
        with _segment(paths, contents, segment) as (fd, path):
            places = sorted((contents.tensors[index].offset, contents.tensors[index].nbytes) for index in rows)
            for offset, nbytes in [*places, (contents.segments[segment], 0)]:
                if offset > end and loader.first_set(fd, end, offset - end, path) is not None:
                    yield f"a byte from {end} to {offset} of segment {segment}, where no tensor lies,", segment
                end = max(end, offset + nbytes)
