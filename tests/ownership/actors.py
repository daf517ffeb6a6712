"""What people do in these tests, each as a user of his own: the one who serves, one of his group, one who is neither."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_shim.handoff import attachment, request
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.semaphores import Bell, Guard
from tests.generations import states
from tests.never_wrong.forked import KEPT
from tests.never_wrong.loading import Loading, loading

OWNER, MEMBER, OTHER_MEMBER, STRANGER = 64001, 64002, 64003, 64004
GROUP = 64100


def become(user: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)


# The one who serves


def serve(pool: str, directory: str, checkpoint: str, group: int | None) -> int:
    """Loads a checkpoint as model `m`; keeps the pool open. Returns the generation's number."""
    if "pool" not in KEPT:
        KEPT["context"] = loading(PoolPaths(pool, Path(directory), group), remove=False)
        KEPT["pool"] = KEPT["context"].__enter__()
    return writer().load(Path(checkpoint)).number


def adopt(pool: str, directory: str, checkpoint: str, group: int | None) -> bool:
    """A sidecar that starts where another has ended; says whether it took its generation over."""
    KEPT["context"] = loading(PoolPaths(pool, Path(directory), group), remove=False)
    KEPT["pool"] = KEPT["context"].__enter__()
    return writer().adopt(Path(checkpoint))


def stop() -> None:
    KEPT.pop("pool")
    KEPT.pop("context").__exit__(None, None, None)


def writer() -> Loading:
    found: Loading = KEPT["pool"]
    return found


def held() -> list[int]:
    return sorted(writer().pool.held())


def sweep() -> int:
    return writer().pool.sweep()


def retire(number: int) -> int:
    writer().pool.retire(number)
    return writer().pool.collect()


def collect() -> int:
    return writer().pool.collect()


def asked() -> list[str]:
    return [one.verb for one in request.pending(writer().paths)]


def publications() -> list[bool]:
    return [writer().pool.adopt_publication(identifier) for identifier in writer().pool.publications()]


# Engines


def hold(pool: str, directory: str) -> int:
    """Attaches without torch, and stays so."""
    [generation] = _ready(PoolPaths(pool, Path(directory)))
    KEPT["token"] = attachment.Token.take(PoolPaths(pool, Path(directory)), generation, "m")
    return generation


def _ready(paths: PoolPaths) -> list[int]:
    page = ControlPage.open(paths)
    try:
        return [g.number for g in page.read().of_model("m", "ready")][:1]
    finally:
        page.close()


def publish(pool: str, directory: str) -> Any:
    return states.publish(PoolPaths(pool, Path(directory)), "m", "k", 5000)


def ask(pool: str, directory: str) -> str:
    return request.ask(PoolPaths(pool, Path(directory)), request.ROLLBACK, "m", timeout=2)


def look_at(pool: str) -> None:
    os.environ["BALLAST_POOL"] = pool


# The one who means harm: each of these is tried, and what came of it returned


def harm(directory: str, pool: str) -> dict[str, str]:
    """Tries everything that a user can do to files, and names what he succeeded in."""
    done: dict[str, str] = {}
    paths = PoolPaths(pool, Path(directory))
    mine = Path(directory) / f"mine-{os.geteuid()}"

    def attempt(what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            done.setdefault("refused", "")
            done["refused"] += f"{what}: {error.strerror}; "
        else:
            done[what] = "done"

    for path in (paths.control, paths.manifest(1), paths.segment(1, 0)):
        name = path.name.split(".", 1)[1]
        attempt(f"read {name}", lambda path=path: path.read_bytes())
        attempt(f"write {name}", lambda path=path: os.open(path, os.O_WRONLY))
        attempt(f"truncate {name}", lambda path=path: os.truncate(path, 0))
        attempt(f"chmod {name}", lambda path=path: os.chmod(path, 0o666))
        attempt(f"unlink {name}", lambda path=path: os.unlink(path))
        attempt(f"rename {name}", lambda path=path: os.rename(path, mine))

        def replace(path: Path = path) -> None:
            fake = Path(directory) / f"fake-{os.geteuid()}"
            fake.write_bytes(b"fake")
            try:
                os.rename(fake, path)
            finally:
                fake.unlink(missing_ok=True)

        attempt(f"replace {name}", replace)
        attempt(f"link over {name}", lambda path=path: os.symlink("/etc/passwd", path))
    return done


def plant(path: str, kind: str) -> None:
    """Puts something under a name of the pool before anybody else does."""
    target = Path(path)
    if kind == "file":
        target.write_bytes(b"x" * 100)
        os.chmod(target, 0o666)
    elif kind == "symlink":
        target.symlink_to("/etc/passwd")
    elif kind == "dangling":
        target.symlink_to(target.with_name("made-by-the-victim"))
    elif kind == "fifo":
        os.mkfifo(target, 0o666)
    else:
        target.mkdir()


def move(source: str, target: str) -> str:
    """A rename, or a hard link where the target is not there; says what the system said."""
    try:
        os.rename(source, target)
    except OSError as error:
        return str(error.strerror)
    return "done"


def hard_link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError as error:
        return str(error.strerror)
    return "done"


def modes(directory: str) -> dict[str, tuple[int, int, int]]:
    """Mode, user and group of everything that is there."""
    found = {}
    for entry in os.scandir(directory):
        status = entry.stat(follow_symlinks=False)
        found[entry.name.split(".", 1)[-1]] = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    return found



def plant_semaphore(name: str) -> None:
    """A named semaphore that everybody may use, made before the sidecar's."""
    import posix_ipc

    os.umask(0)
    posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o666, initial_value=1).close()


def cut_semaphore(name: str) -> None:
    """Takes the memory away that everybody who has opened it has mapped."""
    os.truncate(f"/dev/shm/sem.{name[1:]}", 0)


def wait_and_ring(pool: str, directory: str) -> str:
    """What an engine does that waits, and a sidecar that writes."""
    paths = PoolPaths(pool, Path(directory))
    page = ControlPage.create_or_open(paths)
    bell, guard = Bell(paths, create=True), Guard(paths, page.fd, create=True)
    KEPT["semaphores"] = bell, guard
    return use_semaphores()


def use_semaphores() -> str:
    bell, guard = KEPT["semaphores"]
    bell.ring()
    bell.wait(0.05)
    with guard.hold(5):
        return "done"
