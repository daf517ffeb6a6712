"""`ballast inject DIR`: puts the shim into a volume that an engine's container shares, so that its image need not be rebuilt.

What lies in DIR afterwards is a whole copy under a name of its own, and two links that lead to it:

    DIR/ballast-0.1.0-<digest>/engine_shim/…      never changed once it has this name
    DIR/engine_shim        → ballast-0.1.0-<digest>/engine_shim
    DIR/sitecustomize.py   → engine_shim/hooks/site/sitecustomize.py

With PYTHONPATH=DIR Python finds both. A newer shim is another copy, and the one link moves over in a single rename: an engine
that starts meanwhile gets the old or the new one, whole, and one that runs keeps the copy it began with (`engine_shim`
resolves the link once). The copy is plain Python of the standard library, whatever version either side has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import engine_shim
from engine_shim import __version__
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import new_id

SHIM = Path(engine_shim.__file__).resolve().parent
PACKAGE = "engine_shim"
HOOK = "sitecustomize.py"
HOOK_TARGET = f"{PACKAGE}/hooks/site/{HOOK}"

_COPY = "ballast-"
_BUILDING = ".ballast-"  # and .tmp: of an injection that has not ended, or was killed
_SUFFIXES = (".py", ".pth")
_TURN_WITHIN = 60.0  # seconds; another injection takes one


class InjectionRefused(HandoffError):
    """The shim cannot be put there. One sentence with the remedy."""


@dataclass(frozen=True)
class Injected:
    """Where the shim is now. `changed` is False where this very copy was in use already."""

    directory: Path
    copy: str
    changed: bool


def inject(directory: Path, source: Path = SHIM) -> Injected:
    """Makes `directory` a folder for PYTHONPATH. Idempotent; safe to run twice at once, or to kill and run again.

    Raises InjectionRefused, before anything is changed, where something of somebody else is in the way.
    """
    if not directory.is_dir():
        raise InjectionRefused(f"{directory} is not a directory: mount there the volume that the engine's container shares")
    files = _files(source)
    copy = f"{_COPY}{__version__}-{_digest(files)[:16]}"
    with _errors_of(directory), _alone(directory):
        _refuse_strangers(directory)
        for stale in directory.glob(f"{_BUILDING}*.tmp"):
            _remove(stale)
        changed = False
        if not _is_whole(directory / copy / PACKAGE, files):
            _put(directory, copy, files)
            changed = True
        for name, target in ((PACKAGE, f"{copy}/{PACKAGE}"), (HOOK, HOOK_TARGET)):
            changed = _link(directory, name, target) or changed
    return Injected(directory, copy, changed)


def _files(source: Path) -> dict[str, bytes]:
    """The shim's own files by their names relative to the package."""
    return {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file()
    }


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _is_whole(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether a copy holds just these files. What Python has cached beside them does not count."""
    return folder.is_dir() and _files(folder) == files


def _put(directory: Path, copy: str, files: dict[str, bytes]) -> None:
    building = directory / f"{_BUILDING}{new_id()}.tmp"
    try:
        for name, data in files.items():
            path = building / PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o644)  # whatever the umask: it is another container that reads it
        for folder in (building, *(path for path in building.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        if (directory / copy).exists():  # not as it was made: somebody has changed it
            os.rename(directory / copy, directory / f"{_BUILDING}{new_id()}.tmp")
        os.rename(building, directory / copy)
    finally:
        for left in directory.glob(f"{_BUILDING}*.tmp"):
            _remove(left)


def _link(directory: Path, name: str, target: str) -> bool:
    """Makes `name` lead to `target`, in one step; says whether it did not before."""
    path = directory / name
    if path.is_symlink() and os.readlink(path) == target:
        return False
    new = directory / f"{_BUILDING}{new_id()}.tmp"
    try:
        os.symlink(target, new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return True


def _refuse_strangers(directory: Path) -> None:
    for name in (PACKAGE, HOOK):
        path = directory / name
        ours = path.is_symlink() and (os.readlink(path) == HOOK_TARGET or os.readlink(path).startswith(_COPY))
        if os.path.lexists(path) and not ours:
            raise InjectionRefused(f"{path} is not of 'ballast inject': give the shim a folder of its own")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two that inject into one folder at once do so one after the other."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_WITHIN
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InjectionRefused(
                        f"another 'ballast inject' has been at work in {directory} for {_TURN_WITHIN:.0f} s: end it, or wait "
                        "for it, and try again"
                    ) from None
                time.sleep(0.05)
            except OSError:
                # Not every volume knows locks. Without one, two at once may remove each other's unfinished copy, and one fails.
                break
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors_of(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno or 0)
        remedy = "check the volume"
        if error.errno == errno.EROFS:
            remedy = "mount it writable in the container that injects (the engine's mount may be read-only)"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make the volume larger; the shim takes less than 1 MiB"
        elif error.errno in (errno.EACCES, errno.EPERM):
            remedy = (
                f"let user {os.geteuid()} write there (compose: a volume of that user; Kubernetes: fsGroup); a volume that "
                "cannot hold symbolic links will not do"
            )
        raise InjectionRefused(f"{directory} cannot take the shim ({why}): {remedy}") from error
