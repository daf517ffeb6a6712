"""A storm: sidecars, engines and publishers on one pool, each killed at a random moment and replaced, for as long as you like.

    make storm                          # ten minutes
    make storm SECONDS=3600
    python -m tests.storm.storm --seconds 60 --seed 7 --namespaces

The processes are forked from this one and run the code of the product, each in its own way: a sidecar serves a checkpoint
whose files are replaced now and then, engines open it again and again and compare every bit, publishers hand over a module's
state. With `--namespaces` the pool belongs to an unprivileged user, most processes live in PID and user namespaces of their
own, and engines of another user try to get in. What must hold throughout:

- an engine gets one of the versions, bit for bit, or a HandoffError; another user's engine gets nothing at all;
- no `open` takes longer than the time that it was given to wait, and BOUND;
- in every calm (all killed, one sidecar left alone) the pool comes back to what its catalog lists: objects, memory,
  semaphores; and the version to be served is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import posix_ipc

from engine_shim.handoff import attachment, catalog, manifest
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from sidecar import serve
from sidecar.pool import purge
from tests.crash import dying
from tests.crash.sequences import MODEL, PUBLISHED, VERSIONS, Place, hurry, in_order, publish_in_place, write_versions
from tests.processes import die_with_parent
from tests.storm.namespaces import Identity, fork_as

BOUND = 10.0  # seconds; far beyond what anything takes, even on a machine that is busy with other things
OWNER, STRANGER = 54321, 54322  # user numbers that nobody has
CALM_EVERY = 20.0

SIDECAR, ENGINE, PUBLISHER, FOREIGNER = "sidecar", "engine", "publisher", "foreigner"
# How many of each, and how long each lives on average, in seconds.
CAST = {SIDECAR: (2, 0.3), ENGINE: (3, 0.15), PUBLISHER: (1, 0.2)}
FOREIGN = {FOREIGNER: (1, 0.5)}


class Wrong(AssertionError):
    """An invariant does not hold."""


@dataclass
class Report:
    """What a storm was made of, and how long things took."""

    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    stopped: int = 0  # suspended for a while instead
    updates: int = 0
    calms: int = 0
    attached: int = 0
    states: int = 0
    published: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    calming: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        took = sorted(1000 * value for value in self.latencies) or [0.0]
        killed = ", ".join(f"{count} {kind}s" for kind, count in sorted(self.kills.items()))
        return [
            f"{self.seconds:.0f} s; killed: {sum(self.kills.values())} ({killed}); suspended: {self.stopped}; "
            f"updates: {self.updates}; calms: {self.calms}",
            f"attached: {self.attached}, every one bit-exact; engine states bound: {self.states}; published: {self.published}",
            f"refused: {dict(self.refused)}; strangers refused: {dict(self.foreign)}",
            f"attach: median {statistics.median(took):.1f} ms, p99 {took[int(len(took) * 0.99)]:.1f} ms, "
            f"max {took[-1]:.1f} ms",
            f"from the last kill to a pool in order: median {statistics.median(self.calming or [0]):.2f} s, "
            f"max {max(self.calming, default=0):.2f} s",
        ]


# What the processes do --------------------------------------------------------------------------------------------


def _say(fd: int, *what: Any) -> None:
    os.write(fd, (json.dumps(what) + "\n").encode())  # appended in one piece, or not at all


def _sidecar(place: Place, log: int) -> None:
    hurry()
    serve.Sidecar(place.paths, serve.name_models([place.model], [MODEL]), serve.KEEP).run()


def _engine(place: Place, log: int, versions: list[dict[str, str]], dice: random.Random) -> None:
    import engine_shim
    from tests.never_wrong import engine_side

    while True:
        wait = dice.choice((0.0, 0.0, 1.0))
        began = time.monotonic()
        try:
            model = engine_shim.open(MODEL, wait=wait)
        except HandoffError as error:
            _say(log, "refused", type(error).__name__, time.monotonic() - began - wait)
            time.sleep(0.02)
            continue
        took = time.monotonic() - began
        found = engine_side.fingerprints(model.tensors)
        _say(log, "attached" if found in versions else "WRONG", took, wait)
        if found not in versions:
            _say(log, "WRONG", str(found))
        if dice.random() < 0.3:
            _bind(log)
        time.sleep(dice.random() * 0.05)
        if engine_side.fingerprints(model.tensors) != found:
            _say(log, "WRONG", "the bits changed while they were held")
        model.close()
        del model


def _bind(log: int) -> None:
    import torch

    import engine_shim

    module, expected = dying.module(6), dying.module(5)
    try:
        engine_shim.attach(module, PUBLISHED, wait=0)
    except HandoffError as error:
        _say(log, "refused", type(error).__name__, 0.0)
        return
    same = torch.equal(module.weight, expected.weight) and torch.equal(module.bias, expected.bias)
    _say(log, "state" if same and torch.equal(module.cache, expected.cache) else "WRONG", "published")


def _publisher(place: Place, log: int, dice: random.Random) -> None:
    import engine_shim

    while True:
        try:
            if dice.random() < 0.5:
                engine_shim.publish(dying.module(5), PUBLISHED)
            else:
                publish_in_place(place)
            _say(log, "published")
        except HandoffError as error:
            _say(log, "refused", type(error).__name__, 0.0)
        time.sleep(dice.random() * 0.2)


def _foreigner(place: Place, log: int) -> None:
    import engine_shim

    while True:
        try:
            engine_shim.open(MODEL, wait=0)
            _say(log, "WRONG", "another user's engine was served")
        except HandoffError as error:
            _say(log, "foreign", type(error).__name__)
        time.sleep(0.05)


# The storm --------------------------------------------------------------------------------------------------------


class Actor:
    """One process, and when it is to die."""

    def __init__(self, kind: str, pid: int, dies: float) -> None:
        self.kind = kind
        self.pid = pid
        self.dies = dies
        self.stopped = False

    def ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Storm:
    """Call `run` once, in a process without threads. Raises Wrong."""

    def __init__(self, pool: str, folder: Path, seconds: float, seed: int, namespaces: bool = False) -> None:
        self.place = Place(PoolPaths(pool), folder)
        self.report = Report()
        self._seconds = seconds
        self._dice = random.Random(seed)
        self._namespaces = namespaces
        self._log = os.open(folder / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.fchmod(self._log, 0o666)
        self._read = 0
        self._actors: list[Actor] = []
        self._versions: list[dict[str, str]] = []

    # Processes

    def _identity(self, kind: str) -> Identity:
        if not self._namespaces:
            return Identity(os.geteuid())
        if kind == FOREIGNER:
            return Identity(STRANGER, self._dice.choice((None, 0, OWNER)), self._dice.random() < 0.5)
        return Identity(OWNER, self._dice.choice((None, 0, 1000, OWNER)), self._dice.random() < 0.8)

    def _start(self, kind: str, lives: float) -> Actor:
        dice = random.Random(self._dice.random())
        functions: dict[str, Callable[[], None]] = {
            SIDECAR: lambda: _sidecar(self.place, self._log),
            ENGINE: lambda: _engine(self.place, self._log, self._versions, dice),
            PUBLISHER: lambda: _publisher(self.place, self._log, dice),
            FOREIGNER: lambda: _foreigner(self.place, self._log),
        }

        def run() -> None:
            die_with_parent()
            try:
                functions[kind]()
                os._exit(0)
            except HandoffError:  # another sidecar has the pool
                os._exit(0)
            except BaseException as error:
                _say(self._log, "WRONG", f"{kind}: {type(error).__name__}: {error}")
                raise

        identity = self._identity(kind)
        if identity == Identity(os.geteuid()):
            pid = os.fork()
            if pid == 0:
                try:
                    run()
                finally:
                    os._exit(1)
        else:
            pid = fork_as(identity, run)
        return Actor(kind, pid, time.monotonic() + self._dice.expovariate(1 / lives))

    # What they say

    def _listen(self) -> None:
        data = os.pread(self._log, 1 << 24, self._read)
        end = data.rfind(b"\n") + 1
        self._read += end
        report = self.report
        for line in data[:end].splitlines():
            what, *more = json.loads(line)
            if what == "WRONG":
                raise Wrong(str(more))
            if what == "attached":
                report.attached += 1
                report.latencies.append(more[0])
                if more[0] > more[1] + BOUND:
                    raise Wrong(f"an attach took {more[0]:.1f} s")
            elif what == "refused":
                report.refused[more[0]] += 1
                if more[1] > BOUND:
                    raise Wrong(f"a refusal took {more[1]:.1f} s longer than it was to wait")
            elif what == "foreign":
                report.foreign[more[0]] += 1
            elif what == "state":
                report.states += 1
            elif what == "published":
                report.published += 1

    # Weather

    def run(self) -> Report:
        self._versions = [_truth(self.place, number) for number in range(VERSIONS)]
        self.place.lead_to(0)
        os.environ["BALLAST_POOL"] = self.place.paths.pool
        cast = {**CAST, **(FOREIGN if self._namespaces else {})}
        began = time.monotonic()
        next_calm = began + min(CALM_EVERY, self._seconds / 2)
        next_update = began
        try:
            while time.monotonic() < began + self._seconds:
                self._turn(cast)
                now = time.monotonic()
                if now > next_update:
                    next_update = now + self._dice.expovariate(1.0)
                    self.place.lead_to(self._dice.randrange(VERSIONS))
                    self.report.updates += 1
                if now > next_calm:
                    self._calm()
                    next_calm = time.monotonic() + CALM_EVERY
            self._calm()
        finally:
            for actor in self._actors:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    actor.kill()
            self.report.seconds = time.monotonic() - began
            self._look(self._purge)
        if self._left():
            raise Wrong(f"a purge left {self._left()}")
        return self.report

    def _turn(self, cast: dict[str, tuple[int, float]]) -> None:
        now = time.monotonic()
        for actor in self._actors[:]:
            if actor.ended():
                self._actors.remove(actor)
            elif now > actor.dies:
                if not actor.stopped and self._dice.random() < 0.05:  # suspended, and killed a while later
                    os.kill(actor.pid, signal.SIGSTOP)
                    actor.stopped = True
                    actor.dies = now + self._dice.random() * 0.5
                    self.report.stopped += 1
                    continue
                actor.kill()
                self.report.kills[actor.kind] += 1
                self._actors.remove(actor)
        for kind, (count, lives) in cast.items():
            for _ in range(count - sum(actor.kind == kind for actor in self._actors)):
                self._actors.append(self._start(kind, lives))
        self._listen()
        time.sleep(0.003)

    def _left(self) -> list[str]:
        prefixes = (f"ballast-{self.place.paths.pool}.", f"sem.ballast-{self.place.paths.pool}.")
        return sorted(name for name in os.listdir(self.place.paths.dir) if name.startswith(prefixes))

    def _calm(self) -> None:
        """Everybody is killed; one sidecar is left alone, and the pool must come back to what it should be."""
        for actor in self._actors:
            actor.kill()
            self.report.kills[actor.kind] += 1
        self._actors.clear()
        began = time.monotonic()
        sidecar = self._start(SIDECAR, 1e9)
        try:
            wanted = self._versions[self.place.serves]
            while (amiss := self._look(lambda: _amiss(self.place, wanted))) is not None:
                self._listen()
                if sidecar.ended():
                    raise Wrong(f"the sidecar ended; and {amiss}")
                if time.monotonic() - began > BOUND:
                    raise Wrong(f"not in order {BOUND:.0f} s after the last kill: {amiss}")
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                sidecar.kill()
        self.report.calms += 1
        self.report.calming.append(time.monotonic() - began)

    def _purge(self) -> None:
        purge(self.place.paths, force=True)

    def _look(self, look: Callable[[], str | None]) -> str | None:
        """What the pool's owner finds; nobody else may look."""
        if not self._namespaces:
            return look()
        reading, writing = os.pipe()

        def tell() -> None:
            os.write(writing, json.dumps(look()).encode())
            os._exit(0)

        pid = fork_as(Identity(OWNER), tell)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        if not answer:
            return "its owner cannot look at the pool"
        found: str | None = json.loads(answer)
        return found


def _truth(place: Place, version: int) -> dict[str, str]:
    from tests.never_wrong import engine_side

    found: dict[str, str] = {}
    for path in sorted(place.version(version).glob("*.safetensors")):
        found.update(engine_side.fingerprints(engine_side.by_safe_open(str(path))))
    return found


def _amiss(place: Place, wanted: dict[str, str]) -> str | None:
    """What is not as it should be in a pool at rest."""
    import engine_shim
    from engine_shim import ladder
    from tests.never_wrong import engine_side

    paths = place.paths
    try:
        page = ControlPage.open(paths)
        try:
            now, alive = page.read(), page.sidecar_alive
        finally:
            page.close()
        if not alive:
            return "the sidecar does not live yet"
        if amiss := in_order(paths, now):
            return f"objects: {amiss}"
        ready = [g for g in now.generations if g.state == catalog.READY]
        if not any(g.kind == catalog.CHECKPOINT for g in ready):
            return "no checkpoint is ready"
        bytes_of = sum(sum(manifest.read(paths.manifest(g.number)).segments) for g in ready)
        used = sum(os.stat(paths.dir / name.file).st_blocks * 512 for name in paths.objects())
        if used > bytes_of + catalog.FILE_SIZE + (64 << 10) * (1 + len(ready)):
            return f"{used} bytes are in use for {bytes_of}"
        for name in (paths.guard, paths.bell):
            semaphore = posix_ipc.Semaphore(name)
            value = semaphore.value
            semaphore.close()
            if value > 1:
                return f"{name} has the value {value}"
        with engine_shim.open(MODEL, wait=0) as model:
            found = engine_side.fingerprints(model.tensors)
        ladder._pools.clear()
        if found != wanted:
            return "another version than the one to be served"
        if list(attachment.alive(paths)):
            return "somebody is attached"
    except (HandoffError, posix_ipc.ExistentialError) as error:
        return str(error)
    return None


def storm(pool: str, seconds: float, seed: int, namespaces: bool = False) -> Report:
    """One storm, and nothing left of it."""
    os.environ["BALLAST_LOG"] = "CRITICAL"
    logging.getLogger("ballast").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="ballast-storm-"))
    try:
        os.chmod(folder, 0o755)
        write_versions(folder)
        time.sleep(0.2)
        return Storm(pool, folder, seconds, seed, namespaces).run()
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--pool", default=f"storm-{os.getpid():x}")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    import torch

    torch.set_num_threads(1)
    import engine_shim.api
    import tests.never_wrong.engine_side  # noqa: F401 - before the forks, not in each of them

    assert engine_shim.api
    try:
        report = storm(options.pool, options.seconds, seed, options.namespaces)
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
