"""Why an engine does not attach, asked in its own container: `python -m engine_shim doctor` (or `ballast doctor`).

Looks at what no log line of the engine can know: whether the shim is switched on in this Python at all, whose /dev/shm this
is, whether the sidecar lives. Needs the standard library only, changes nothing, and says for each thing that is wrong what to
do about it. What other processes do is read from /proc, as far as they are visible from here.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping, Optional, Sequence

from engine_shim import __version__
from engine_shim.handoff import attachment, catalog, posix, room
from engine_shim.handoff.catalog import Catalog, ControlPage
from engine_shim.handoff.errors import Foreign, HandoffError, NameRefused, NotFound
from engine_shim.handoff.names import DEFAULT_DIR, PREFIX, PoolPaths, pools
from engine_shim.handoff.semaphores import LIFE_BYTE

OK, NOTE, FAULT = "ok", "note", "fault"
OLDEST = (3, 9)  # Python that the shim runs in

_CONTAINER_DEFAULT = 64 << 20  # bytes of /dev/shm that docker and podman give a container that asks for nothing
_RECORD_ROOM = 1 << 20  # an engine that cannot write its record cannot attach
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_NOBODY = 65534  # how an owner outside this user namespace looks
_LETTERS_WITH_VALUE = "WXcm"
_PYTHON = re.compile(r"(python|pypy)[0-9.]*\Z")

SHARE_IT = (
    'share it: compose ipc: "service:NAME" of the service that owns it; docker --ipc container:NAME; podman --pod; '
    "Kubernetes: mount the memory emptyDir at /dev/shm in this container as well"
)
SEPARATE_OWNER = (
    "let a service that never restarts own the IPC namespace and both others join it (compose.yaml: shm), then start the "
    "engine anew"
)
OWN_DIRECTORY = "give the pool a memory file system of its own with --dir and BALLAST_DIR, and restart the sidecar"
ONE_USER = (
    "run sidecar and engine as one user (docker and podman: --user; compose: user; Kubernetes: runAsUser of the pod), or share "
    "the pool with a group (docs/threat-model.md)"
)


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is ("ok", "note": worth knowing, "fault": to be mended), and what to do."""

    check: str
    verdict: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What is examined: a pool, and the environment and processes around it. `engine`: this is where an engine is started."""

    paths: PoolPaths
    environ: Mapping[str, str]
    engine: bool = True
    proc: Path = Path("/proc")


def findings(paths: PoolPaths, environ: Mapping[str, str] = os.environ, engine: bool = True) -> list[Finding]:
    """Everything that was found, in the order in which it is best read. Never raises."""
    here = Surroundings(paths, environ, engine)
    checks: tuple[Callable[[Surroundings], Iterator[Finding]], ...] = (
        _versions, _switch, _processes, _user, _directory, _pool, _room, _root, _gpu,
    )  # fmt: skip
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check(here))
        except Exception as error:  # one check that cannot be made hides none of the others
            name = check.__name__.lstrip("_")
            found.append(Finding(name, NOTE, f"could not be looked at: {type(error).__name__}: {error}"))
    return found


def report(found: Sequence[Finding]) -> str:
    """For people: a line for each finding, a second one with the remedy."""
    lines = []
    for one in found:
        lines.append(f"{one.verdict:5}  {one.check}: {_printable(one.text)}")
        if one.remedy and one.verdict != OK:
            lines.append(f"       -> {_printable(one.remedy)}")
    return "\n".join(lines)


def run(paths: PoolPaths, as_json: bool = False, engine: bool = True) -> int:
    """Prints what was found. 0 if nothing has to be mended, else 1."""
    found = findings(paths, engine=engine)
    faults = [one for one in found if one.verdict == FAULT]
    if as_json:
        document = {
            "ballast": __version__,
            "pool": paths.pool,
            "directory": str(paths.dir),
            "faults": len(faults),
            "findings": [asdict(one) for one in found],
        }
        print(json.dumps(document, indent=2))
    else:
        print(report(found))
    return 1 if faults else 0


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


# The Python of the engine ---------------------------------------------------------------------------------------------


def isolation(command: Sequence[str]) -> str:
    """The option, of a Python's command line, that keeps the shim out of it: "-S", "-I", "-E", or "" if there is none.

    With -S nothing runs at start-up. With -I or -E PYTHONPATH is not looked at, so that only an installed shim is found.
    """
    if not command or not _PYTHON.match(os.path.basename(command[0])):
        return ""
    found = set()
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for position, letter in enumerate(word[1:], 1):
            if letter in "SIE":
                found.add(letter)
            if letter in _LETTERS_WITH_VALUE:
                if letter in "cm":
                    return _worst(found)
                if position == len(word) - 1:
                    next(words, None)
                break
    return _worst(found)


def _worst(letters: set[str]) -> str:
    return next((f"-{letter}" for letter in "SIE" if letter in letters), "")


def _versions(here: Surroundings) -> Iterator[Finding]:
    from importlib import metadata

    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        text = f"this is Python {version}, and the shim needs 3.9 or later: it stays off, and engines load without Ballast"
        yield Finding("python", FAULT, text, "use an engine on Python 3.9 or later")
    parts = [f"Ballast {__version__} on Python {version}"]
    for name in ("torch", "safetensors", "posix-ipc"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    yield Finding("versions", OK, ", ".join(parts))


def _switch(here: Surroundings) -> Iterator[Finding]:
    """Whether what is started from this Python, in this environment, has the shim on."""
    environ = here.environ
    if not here.engine:
        return
    if not environ.get("BALLAST_POOL"):
        yield Finding("switch", FAULT, "BALLAST_POOL is not set, so the shim is off", "set BALLAST_POOL=main for the engine")
        return
    if environ.get("BALLAST_MODE", "").strip().lower() == "off":
        yield Finding("switch", FAULT, "BALLAST_MODE=off switches the shim off", "remove BALLAST_MODE, or set it to auto")
        return
    from engine_shim.hooks.bootstrap import HookingFinder

    if any(isinstance(finder, HookingFinder) for finder in sys.meta_path):
        yield Finding("switch", OK, f"the shim is on in this Python (BALLAST_POOL={environ['BALLAST_POOL']})")
        return
    flags = sys.flags
    site = sys.modules.get("sitecustomize")
    folder = Path(__file__).parent / "hooks" / "site"
    if flags.no_site:
        why, remedy = "it was started with -S, with which nothing runs at start-up", "start the engine without -S"
    elif flags.ignore_environment:
        why = "it was started with -I or -E, with which PYTHONPATH is not looked at"
        remedy = "start the engine without it, or install ballast-sidecar in its Python"
    elif site is not None:
        why = f"another sitecustomize, {getattr(site, '__file__', '?')}, comes before Ballast's and does not hand on"
        remedy = "put the shim's folder first in PYTHONPATH"
    else:
        why = "neither Ballast's sitecustomize nor its .pth file was loaded at start-up"
        remedy = f"set PYTHONPATH to the folder of 'ballast inject' (or to {folder}), or install ballast-sidecar"
    yield Finding("switch", FAULT, f"the shim is not on in this Python: {why}", remedy)


def _processes(here: Surroundings) -> Iterator[Finding]:
    """Engines that run already, asked for Ballast by their environment, and cannot have it."""
    wanted = f"BALLAST_POOL={here.paths.pool}"
    for pid, command in _commands(here.proc):
        option = isolation(command)
        if pid == os.getpid() or not option:
            continue
        try:
            variables = (here.proc / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if wanted in variables:
            text = f"process {pid} ({' '.join(command)[:80]}) has {wanted} but was started with {option}: no shim in it"
            yield Finding("processes", FAULT, text, f"start it without {option}")


def _commands(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir(proc):
        if name.isdigit():
            try:
                line = (proc / name / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            yield int(name), line.rstrip("\0").split("\0")


# Shared memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: proc_pid_mountinfo(5)."""

    point: str
    kind: str
    read_only: bool


def mount_of(path: Path, proc: Path = Path("/proc")) -> Optional[Mount]:
    """The mount that holds `path`."""
    best: Optional[Mount] = None
    target = os.path.realpath(path)
    with open(proc / "self" / "mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            left, _, right = line.rstrip("\n").partition(" - ")
            fields, tail = left.split(" "), right.split(" ")
            point = fields[4].replace("\\040", " ")
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and (best is None or len(point) >= len(best.point)):  # of two on one place the later is on top
                options = [*fields[5].split(","), *(tail[2].split(",") if len(tail) > 2 else [])]
                best = Mount(point, tail[0], "ro" in options)
    return best


def _user(here: Surroundings) -> Iterator[Finding]:
    mapped = _user_map(here.proc)
    note = "" if mapped is None else f", in a user namespace of its own ({mapped})"
    yield Finding("user", OK, f"user {os.geteuid()}, group {os.getegid()}{note}")


def _user_map(proc: Path) -> Optional[str]:
    """What this user namespace maps, unless it is the machine's own."""
    rows = [line.split() for line in (proc / "self" / "uid_map").read_text().splitlines()]
    if rows == [["0", "0", "4294967295"]]:
        return None
    return ", ".join(f"{inside} is {outside} outside, {count} in all" for inside, outside, count in rows)


def _directory(here: Surroundings) -> Iterator[Finding]:
    directory = here.paths.dir
    if not directory.is_dir():
        yield Finding("shared memory", FAULT, f"{directory} is not there", "mount a tmpfs there, or check BALLAST_DIR")
        return
    mount = mount_of(directory, here.proc)
    usage = os.statvfs(directory)
    size = usage.f_blocks * usage.f_frsize
    status = os.stat(directory)
    mode = f"mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}"
    kind = mount.kind if mount is not None else "unknown"
    if mount is not None and mount.read_only:
        text = f"{directory} is mounted read-only, and an engine that attaches has to write its record there"
        yield Finding("shared memory", FAULT, text, "mount it without ro (compose: read_only; Kubernetes: readOnly)")
    elif not os.access(directory, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write in {directory} ({mode}), and an engine that attaches has to"
        yield Finding("shared memory", FAULT, text, ONE_USER)
    if kind not in _MEMORY:
        text = f"{directory} is on {kind}, no memory file system: everything works, at the speed of a disk"
        yield Finding("shared memory", NOTE, text, "mount a tmpfs there")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        text = f"everybody may remove anything in {directory} ({mode})"
        yield Finding("shared memory", NOTE, text, "fine where one user has it alone, as in a pod; else set the sticky bit")
    if size == _CONTAINER_DEFAULT and kind in _MEMORY:
        text = f"{directory} has {room.gib(size)}, what a container gets that asks for nothing; hardly any model fits"
        remedy = "docker and compose: shm_size or --shm-size; podman: --shm-size; Kubernetes: sizeLimit of the memory emptyDir"
        fits = any(row.state == catalog.READY for row in _rows(here.paths))
        yield Finding("shared memory", NOTE if fits else FAULT, text, remedy)
    else:
        yield Finding("shared memory", OK, f"{directory} is {kind}, {room.gib(size)}, {mode}")


def _rows(paths: PoolPaths) -> Sequence[catalog.Generation]:
    try:
        page = ControlPage.open(paths)
    except HandoffError:
        return ()
    try:
        return page.read().generations
    except HandoffError:
        return ()
    finally:
        page.close()


def _room(here: Surroundings) -> Iterator[Finding]:
    left = room.room(here.paths.dir)
    limits = (
        ("in the file system", left.file_system),
        ("under the memory limit", left.cgroup),
        ("in the machine", left.machine),
    )
    text = ", ".join(f"{room.gib(count)} {where}" for where, count in limits if count is not None)
    remedy = "make it larger, or serve less in it; 'ballast status' shows what is there"
    if left.file_system < _RECORD_ROOM:
        text = f"{here.paths.dir} is full, and an engine that attaches has to write its record there"
        yield Finding("room", FAULT, text, remedy)
    elif left.file_system < room.spare(here.paths.dir):
        text = f"free: {text}; engines may want more for their own processes' channels (vLLM: 160 MiB, or it does not start)"
        yield Finding("room", NOTE, text, remedy)
    else:
        yield Finding("room", OK, f"free: {text}")


# The pool -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A process that has the control page of the pool open: its sidecar, or an engine."""

    pid: int
    device: int
    removed: bool  # the name that it was opened by leads nowhere any more
    served: bool  # a sidecar lives that holds this very page


def holders(paths: PoolPaths, proc: Path = Path("/proc")) -> list[Holder]:
    """The processes that can be seen from here and have a pool of this name, in whatever /dev/shm; sidecars first."""
    found = []
    for pid, _ in _commands(proc):
        if pid == os.getpid():
            continue
        try:
            for fd in (proc / str(pid) / "fd").iterdir():
                target = os.readlink(fd)
                name, removed = (target[: -len(" (deleted)")], True) if target.endswith(" (deleted)") else (target, False)
                if name == str(paths.control):
                    found.append(Holder(pid, os.stat(fd).st_dev, removed, _is_served(fd)))
                    break
        except OSError:
            continue  # another user's, or gone
    return sorted(found, key=lambda holder: not holder.served)


def _is_served(page: Path) -> bool:
    fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return posix.byte_is_locked(fd, LIFE_BYTE)
    finally:
        os.close(fd)


def _pool(here: Surroundings) -> Iterator[Finding]:
    paths = here.paths
    if not paths.dir.is_dir():
        return
    try:
        page = ControlPage.open(paths)
    except NotFound:
        yield _no_pool(here)
        return
    except Foreign as error:
        yield _foreign(here, error)
        return
    except HandoffError as error:
        text, _, remedy = str(error).partition(": ")
        yield Finding("pool", FAULT, text, remedy)
        return
    try:
        yield _life(here, page)
        try:
            now = page.read()
        except HandoffError as error:
            text, _, remedy = str(error).partition(": ")
            yield Finding("pool", NOTE, text, remedy or "wait for it: 'ballast wait'")
            return
        yield from _models(here, now)
    finally:
        page.close()


def _no_pool(here: Surroundings) -> Finding:
    """There is no control page where there should be one: why?"""
    paths = here.paths
    missing = f"there is no pool {paths.pool!r} in {paths.dir}"
    device = os.stat(paths.dir).st_dev
    for holder in holders(paths, here.proc):
        if holder.device != device and holder.served:
            text = f"{missing}: it is in another {paths.dir} than this one (private IPC), as process {holder.pid} has it"
            return Finding("pool", FAULT, text, SHARE_IT)
        if holder.device == device and holder.removed:
            text = (
                f"{missing} any more: it was wiped under process {holder.pid}, which has it open (start scripts of some "
                "engines run rm -rf /dev/shm/*)"
            )
            return Finding("pool", FAULT, text, OWN_DIRECTORY)
    if any(name.startswith(f"sem.{PREFIX}{paths.pool}.") for name in os.listdir(DEFAULT_DIR)):
        text = f"{missing}, although its semaphores are in {DEFAULT_DIR}: another directory, or somebody removed its files"
        return Finding("pool", FAULT, text, f"set BALLAST_DIR as the sidecar's --dir; else {OWN_DIRECTORY}")
    others = [name for name in pools(paths.dir) if name != paths.pool]
    if others:
        text = f"{missing}, which holds {', '.join(others)}"
        return Finding("pool", FAULT, text, "set BALLAST_POOL to one of them, or start 'ballast serve' with this --pool")
    if _in_container(here.environ):
        text = (
            f"{missing}, nor anything else of Ballast: this container has a {paths.dir} of its own (private IPC), or it was "
            "wiped, or no sidecar has been started"
        )
        return Finding("pool", FAULT, text, f"{SHARE_IT}; if it is shared, see the sidecar's log")
    return Finding("pool", FAULT, missing, "start 'ballast serve', or check BALLAST_POOL and BALLAST_DIR")


def _in_container(environ: Mapping[str, str]) -> bool:
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return any(map(os.path.exists, marks)) or "KUBERNETES_SERVICE_HOST" in environ or "container" in environ


def _foreign(here: Surroundings, error: Foreign) -> Finding:
    path = here.paths.control
    try:
        owner = os.stat(path, follow_symlinks=False).st_uid
    except OSError:
        owner = os.geteuid()
    if owner == os.geteuid():
        text, _, remedy = str(error).partition(": ")
        return Finding("owner", FAULT, text, remedy)
    text = f"pool {here.paths.pool!r} belongs to user {owner} and this is user {os.geteuid()}"
    mapped = _user_map(here.proc)
    if owner == _NOBODY and mapped is not None:
        text += f" in a user namespace of its own ({mapped}), in which the owner has no number"
        remedy = "run both containers in one user namespace (docker: the same --userns; podman: one pod)"
        return Finding("owner", FAULT, text, remedy)
    return Finding("owner", FAULT, text, ONE_USER)


def _life(here: Surroundings, page: ControlPage) -> Finding:
    """Whether the sidecar of this pool lives. One that lives elsewhere while the pool here has none: split brain."""
    paths = here.paths
    try:
        alive = page.sidecar_alive
    except OSError as error:
        text = f"this kernel does not tell who holds a lock ({error.strerror}): Ballast cannot work here"
        return Finding("sidecar", FAULT, text, "use a container runtime with Linux's own kernel (not gVisor)")
    if alive:
        return Finding("sidecar", OK, f"the sidecar of pool {paths.pool!r} lives")
    device = os.fstat(page.fd).st_dev
    elsewhere = [holder for holder in holders(paths, here.proc) if holder.device != device and holder.served]
    if elsewhere:
        text = (
            f"split brain: pool {paths.pool!r} in this {paths.dir} is that of a sidecar that is gone, while process "
            f"{elsewhere[0].pid} serves pool {paths.pool!r} from a new one that this container does not see"
        )
        return Finding("sidecar", FAULT, text, SEPARATE_OWNER)
    text = (
        f"no sidecar of pool {paths.pool!r} lives: engines attach to what is ready, but nobody loads, watches the files or "
        "sweeps"
    )
    remedy = "start 'ballast serve' again"
    if _in_container(here.environ):
        text += (
            ". If a sidecar does run in its container, this is a split brain: it owned the IPC namespace, was restarted, has a "
            f"new {paths.dir}, and this container kept the old one"
        )
        remedy = f"restart the sidecar; if it runs, {SEPARATE_OWNER}"
    return Finding("sidecar", FAULT, text, remedy)


def _models(here: Surroundings, now: Catalog) -> Iterator[Finding]:
    held = list(attachment.alive(here.paths))
    for model in now.models():
        rows = now.of_model(model)
        ready = next((row for row in rows if row.state == catalog.READY), None)
        other = next((row for row in rows if row.state in (catalog.LOADING, catalog.FAILED)), None)
        if ready is not None:
            count = sum(record.generation == ready.number for record in held)
            text = f"{model} is ready: generation {ready.number}, {room.gib(ready.total)}, {count} attached"
            yield Finding("model", OK, text)
        elif other is not None and other.state == catalog.LOADING:
            text = f"{model} is being loaded: {room.gib(other.done)} of {room.gib(other.total)}"
            yield Finding("model", NOTE, text, "engines wait for it; 'ballast wait'")
        elif other is not None:
            text = f"{model} could not be loaded: {other.reason}"
            yield Finding("model", FAULT, text, "mend that; it is tried again by itself")
    if not now.generations:
        yield Finding("model", NOTE, f"pool {here.paths.pool!r} holds no model yet", "see the sidecar's log")
    wanted = here.environ.get("BALLAST_MODEL")
    if here.engine and wanted and wanted not in now.models():
        names = ", ".join(now.models()) or "none"
        text = f"BALLAST_MODEL={wanted} names no model of pool {here.paths.pool!r} (it holds {names})"
        yield Finding("model", FAULT, text, "name one of them, or start 'ballast serve' with this --name")


# The rest -------------------------------------------------------------------------------------------------------------


def _root(here: Surroundings) -> Iterator[Finding]:
    root = mount_of(Path("/"), here.proc)
    text = "the root file system is writable"
    if root is not None and root.read_only:
        text = "the root file system is read-only, which Ballast does not mind"
    places = [here.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    if here.engine and not any(place and os.access(place, os.W_OK) for place in places):
        text = "no directory for temporary files can be written, which torch and transformers need"
        yield Finding("root", NOTE, text, "mount a tmpfs at /tmp (compose: tmpfs; Kubernetes: an emptyDir)")
    else:
        yield Finding("root", OK, text)


def _gpu(here: Surroundings) -> Iterator[Finding]:
    """What the GPU's part of the shim has to say."""
    from engine_shim import device

    for row in device.findings(here.paths):
        yield Finding(*row)


def main(arguments: Sequence[str]) -> int:
    """`python -m engine_shim doctor [--json]`: the pool is that of BALLAST_POOL and BALLAST_DIR."""
    unknown = [word for word in arguments if word != "--json"]
    if unknown:
        sys.stderr.write(f"ballast: doctor knows --json and not {unknown[0]}\n")
        return 2
    try:
        paths = PoolPaths.from_environment()
    except NameRefused as error:
        sys.stderr.write(f"ballast: {error}: check BALLAST_POOL\n")
        return 2
    return run(paths, as_json="--json" in arguments)
