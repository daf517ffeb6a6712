"""Runs sequences in processes that die at a step, and looks whether everything is well afterwards.

Meant to run in a process that a test forks and that has no threads (`tests.never_wrong.forked.Engine`): it forks in its
turn, and waits for what it forked, so that a hundred deaths are a matter of seconds. After each death

1. an engine that comes at once, with no sidecar there, gets one of the versions that were ever complete, or is refused;
2. a new sidecar starts, and an engine gets the version that is to be served, bit for bit;
3. the pool comes to rest with nothing in it but what the catalog lists;
4. what was published, if it was adopted, is bit for bit what was published;
5. the sidecar ends when asked to, and a purge leaves nothing, no semaphore either.

Each has BOUND seconds; whatever takes longer hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posix_ipc

from engine_shim.handoff import catalog
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from sidecar.pool import purge
from tests.crash import dying
from tests.crash.points import Death, Fuse, Recorder, Step, deaths, sites
from tests.crash.sequences import (
    MODEL,
    PUBLISHED,
    SEQUENCES,
    VERSIONS,
    Place,
    Turning,
    alive,
    hurry,
    in_order,
)
from tests.processes import die_with_parent

BOUND = 10.0  # seconds; a hundred times what any step takes


class Hangs(AssertionError):
    """Something took longer than BOUND."""


class Child:
    """A forked process that runs a function; what it returns comes back as JSON."""

    def __init__(self, function: Callable[[], Any], what: str = "") -> None:
        self._what = what
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            die_with_parent()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            try:
                os.close(self.reading)
                os.write(writing, json.dumps(function()).encode())
                code = 0
            except BaseException:
                os.write(writing, json.dumps(traceback.format_exc()).encode())
            finally:
                os._exit(code)
        os.close(writing)
        self._status: int | None = None

    def wait(self) -> int:
        """The exit code, negative for a signal. Raises Hangs."""
        if self._status is None:
            self._status = self._wait()
        return self._status

    def _wait(self) -> int:
        pidfd = os.pidfd_open(self.pid)
        try:
            deadline = time.monotonic() + BOUND
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                if time.monotonic() > deadline:
                    signal.pidfd_send_signal(pidfd, signal.SIGUSR1)  # where it stands goes to stderr
                    time.sleep(0.2)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    self._status = -signal.SIGKILL
                    raise Hangs(f"after {BOUND:.0f} s it still ran: {self._what}")
                time.sleep(0.002)
        finally:
            os.close(pidfd)

    def result(self) -> Any:
        """What the function returned. Raises AssertionError with its traceback if it failed."""
        code = self.wait()
        with open(self.reading, "rb") as pipe:
            answer = pipe.read()
        if code:
            raise AssertionError(f"ended with {code}: {json.loads(answer) if answer else ''}")
        return json.loads(answer)

    def end(self, number: int) -> int:
        if self._status is None:
            os.kill(self.pid, number)  # it may have ended: until `wait` its number is not another's
        return self.wait()


def run(function: Callable[[], Any], what: str) -> Any:
    return Child(function, what).result()


# Snapshots: a pool as it is before a sequence, to be had again in a millisecond. The objects are kept under a second name,
# so that they are the same files again, except for the control page, which is the one that is written to.


@dataclass(frozen=True)
class Snapshot:
    version: int
    guard: int  # the semaphore's value; -1 where there is none
    objects: tuple[str, ...]
    page: bytes


# Steps that one of two comes to, by the clock: what is retired by an adoption is freed by either thread, and an answer that was
# read is removed by whoever asked, or by a sweep.
SOMETIMES = {
    "adopting publications": "PoolWriter.collect > PoolWriter.drop",
    "rolling back": "Sidecar._turn_until_stopped > PoolWriter.sweep > PoolWriter._remove",
}


def sometimes(name: str, step: str) -> bool:
    """Whether a step comes about in one run of a sequence and not in the next."""
    return name in SOMETIMES and SOMETIMES[name] in step


def kept(paths: PoolPaths) -> PoolPaths:
    """Where the second names are: a pool that nobody looks at."""
    return PoolPaths(f"{paths.pool}-kept", paths.dir)


def take(place: Place) -> Snapshot:
    paths = place.paths
    names = tuple(name.file for name in paths.objects() if name.file != paths.control.name)
    clean(kept(paths))
    for name in names:
        os.link(paths.dir / name, _second(paths, name))
    guard = -1
    with contextlib.suppress(posix_ipc.Error):
        semaphore = posix_ipc.Semaphore(paths.guard)
        guard = semaphore.value
        semaphore.close()
    return Snapshot(place.serves, guard, names, paths.control.read_bytes() if paths.control.exists() else b"")


def restore(place: Place, snapshot: Snapshot) -> None:
    paths = place.paths
    clean(paths)
    place.lead_to(snapshot.version)
    for name in snapshot.objects:
        os.link(_second(paths, name), paths.dir / name)
    if snapshot.page:
        paths.control.write_bytes(snapshot.page)
        os.chmod(paths.control, 0o600)
    if snapshot.guard >= 0:
        posix_ipc.Semaphore(paths.guard, posix_ipc.O_CREAT, mode=0o600, initial_value=snapshot.guard).close()


def _second(paths: PoolPaths, name: str) -> Path:
    return paths.dir / name.replace(f"ballast-{paths.pool}.", f"ballast-{kept(paths).pool}.", 1)


def clean_all(paths: PoolPaths) -> None:
    clean(paths)
    clean(kept(paths))


def clean(paths: PoolPaths) -> None:
    for name in left(paths):
        (paths.dir / name).unlink(missing_ok=True)


def left(paths: PoolPaths) -> list[str]:
    """All that there is of a pool, semaphores too."""
    prefixes = (f"ballast-{paths.pool}.", f"sem.ballast-{paths.pool}.")
    return sorted(name for name in os.listdir(paths.dir) if name.startswith(prefixes))


# Recording


def prepare(place: Place, name: str) -> Snapshot:
    clean(place.paths)
    os.environ["BALLAST_POOL"] = place.paths.pool
    run(lambda: SEQUENCES[name].prepare(place), "preparing")
    return take(place)


def record(directory: str, pool: str, folder: str, name: str) -> tuple[Counter[Step], set[str]]:
    """The steps and the sites of a sequence that is not cut short."""
    sites()  # read the source now, not anew in every child
    place = Place(PoolPaths(pool, Path(directory)), Path(folder))
    restore(place, prepare(place, name))
    try:
        return _recorded(place, name)
    finally:
        clean_all(place.paths)


def _recorded(place: Place, name: str) -> tuple[Counter[Step], set[str]]:
    def recording() -> Any:
        recorder = Recorder()
        recorder.install()
        SEQUENCES[name].act(place)
        steps = [[step.way, step.call, step.kind, count] for step, count in recorder.steps.items()]
        return steps, sorted(recorder.sites)

    with alive(place) if SEQUENCES[name].busy else contextlib.nullcontext():
        steps, met = run(recording, "recording")
    return Counter({Step(*row[:3]): row[3] for row in steps}), set(met)


# Dying


def exercise(
    directory: str, pool: str, folder: str, name: str, turns: int, share: tuple[int, int], some: int = 0
) -> tuple[int, list[str], dict[str, float]]:
    """Every `share[1]`-th death of a sequence, from the `share[0]`-th on, or `some` that it always comes to: how many there
    were, what went wrong, and the longest times that things took."""
    place = Place(PoolPaths(pool, Path(directory)), Path(folder))
    sites()  # read the source now, not anew in every child
    snapshot = prepare(place, name)
    restore(place, snapshot)
    steps, _ = _recorded(place, name)
    versions = [run(lambda number=number: truth(place, number), "reading") for number in range(VERSIONS)]
    wrong: list[str] = []
    longest: dict[str, float] = {}
    chosen = list(deaths(steps, turns))[share[0] :: share[1]]
    if some:
        certain = [death for death in chosen if not sometimes(name, str(death.step))]
        chosen = random.sample(certain, min(some, len(certain)))
    died = 0
    for death in chosen:
        restore(place, snapshot)
        try:
            died += _die(place, name, death)
            _check(place, name, versions, longest)
        except (AssertionError, HandoffError) as error:
            wrong.append(f"{name}: dying {death}: {type(error).__name__}: {error}")
    clean_all(place.paths)
    return died, wrong, longest


def _die(place: Place, name: str, death: Death) -> bool:
    """Runs the sequence until it dies; False if it came through, as it may where a step depends on the clock."""

    def act() -> None:
        Fuse(death).install()
        SEQUENCES[name].act(place)
        if death.step is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with alive(place) if SEQUENCES[name].busy else contextlib.nullcontext():
        child = Child(act, "the sequence")
        code = child.wait()
    with open(child.reading, "rb") as pipe:
        said = pipe.read()
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"ended with {code} instead: {said.decode()}")
    if code == 0 and death.turn == 1 and not sometimes(name, str(death.step)):
        raise AssertionError("did not die")
    return code != 0


def truth(place: Place, version: int) -> dict[str, str]:
    """What is in the files."""
    from tests.never_wrong import engine_side

    os.environ.pop("BALLAST_POOL", None)
    found: dict[str, str] = {}
    for path in sorted(place.version(version).glob("*.safetensors")):
        found.update(engine_side.fingerprints(engine_side.by_safe_open(str(path))))
    return found


def _opened() -> dict[str, str] | str:
    """What an engine gets that does not wait, or why it is refused."""
    import engine_shim
    from tests.never_wrong import engine_side

    try:
        with engine_shim.open(MODEL, wait=0) as model:
            return engine_side.fingerprints(model.tensors)
    except HandoffError as error:
        return str(error)


def _an_engine(place: Place, wanted: Sequence[dict[str, str]], versions: Sequence[dict[str, str]]) -> None:
    """Opens the model until it is the version that is to be served; then binds what was published, if it is there."""
    began = time.monotonic()
    while True:
        found = _opened()
        if found in wanted:
            break
        assert isinstance(found, str) or found in versions, f"it got {found}"
        if time.monotonic() - began > BOUND:
            raise Hangs(f"the version to be served is not there after {BOUND:.0f} s: {found}")
        time.sleep(0.005)
    while _publications(place.paths):
        assert time.monotonic() - began < 2 * BOUND, "what was published is neither adopted nor refused"
        time.sleep(0.005)
    _published_is_right(place)


def _published_is_right(place: Place) -> None:
    """If there is a published state, it is what was published."""
    import torch

    import engine_shim

    page = ControlPage.open(place.paths)
    there = any(g.kind == catalog.ENGINE for g in page.read().of_model(PUBLISHED, catalog.READY))
    page.close()
    if not there:
        return
    module, expected = dying.module(6), dying.module(5)
    engine_shim.attach(module, PUBLISHED)
    for name, value in {**dict(expected.named_parameters()), **dict(expected.named_buffers())}.items():
        assert torch.equal(module.get_parameter(name) if name in dict(module.named_parameters()) else
                           module.get_buffer(name), value), name  # fmt: skip


def _serve(place: Place) -> None:
    hurry()
    Turning(place, lambda _: False).run()


def _check(place: Place, name: str, versions: Sequence[dict[str, str]], longest: dict[str, float]) -> None:
    def timed(what: str, began: float) -> None:
        longest[what] = max(longest.get(what, 0.0), time.monotonic() - began)

    began = time.monotonic()
    found = run(_opened, "an engine without a sidecar")
    timed("an engine without a sidecar", began)
    assert isinstance(found, str) or found in versions, f"an engine got {found}"
    wanted = [versions[place.serves % VERSIONS]]
    if SEQUENCES[name].rolls_back:
        wanted.append(versions[place.serves - 1])
    began = time.monotonic()
    sidecar = Child(lambda: _serve(place), "the new sidecar")
    try:
        run(lambda: _an_engine(place, wanted, versions), "an engine")
        timed("from the start of the new sidecar to an engine that has the right bits", began)
        _wait_for_rest(place)
        timed("from the start of the new sidecar to a pool in order", began)
        began = time.monotonic()
        code = sidecar.end(signal.SIGTERM)
        timed("the sidecar's end", began)
        assert code == 0, f"the sidecar ended with {code}"
        os.close(sidecar.reading)
    except BaseException as error:
        code = sidecar.end(signal.SIGKILL)
        with open(sidecar.reading, "rb") as pipe:
            raise AssertionError(f"{error} (the sidecar: {code} {pipe.read().decode()})") from error
    purge(place.paths)
    assert not left(place.paths), f"a purge left {left(place.paths)}"


def _wait_for_rest(place: Place) -> None:
    deadline = time.monotonic() + BOUND
    while True:
        page = ControlPage.open(place.paths)
        amiss = in_order(place.paths, page.read()) or "a publication" * bool(_publications(place.paths))
        page.close()
        if not amiss:
            return
        if time.monotonic() > deadline:
            raise Hangs(f"not in order: {amiss}")
        time.sleep(0.005)


def _publications(paths: PoolPaths) -> list[str]:
    return [name.file for name in paths.objects() if name.kind == "publication"]
