"""Requests: how a command asks something of a running sidecar, without a socket.

The command writes `do.<id>`, a small JSON object with a kernel lock on it, and waits. The sidecar looks a few times a
second, does what it can, and writes `did.<id>`. Only the request of a living process is carried out: one whose command was
killed is swept, and never met by a later sidecar. A request is believed like anything else in the pool: it has to be the
sidecar's own user's, or root's.

    text = ask(paths, "rollback", "llama")        # the command's side
    for request in pending(paths):                # the sidecar's side
        answer(paths, request, True, "llama serves generation 3 now")
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_shim.handoff import posix
from engine_shim.handoff.catalog import READY, Catalog, ControlPage
from engine_shim.handoff.errors import Damaged, HandoffError, NotFound, NotReady
from engine_shim.handoff.names import PoolPaths, check_model, new_id, temporary

ROLLBACK = "rollback"  # serve what the model's previous generation holds
LOAD = "load"  # load a model that was evicted, or put off, to keep the pool within its budget
VERBS = (ROLLBACK, LOAD)

_LIMIT = 1 << 16  # bytes; a request has some 100
_LOCK_BYTE = 0
_LOOK_EVERY = 0.02  # seconds between two looks for the answer


class Refused(HandoffError):
    """The sidecar has understood what it was asked and says no. The sentence is the sidecar's."""


@dataclass(frozen=True)
class Request:
    """One thing that somebody asks for."""

    verb: str
    model: str
    identifier: str


def ask(paths: PoolPaths, verb: str, model: str, timeout: float = 30.0) -> str:
    """Asks, and returns the sidecar's sentence. Raises Refused with it, NotFound without a living sidecar, or NotReady.

    A rollback whose answer is lost, since the sidecar was killed before it came, say, is found in the catalog: who takes it
    for not done and asks again goes forward.
    """
    page = ControlPage.open(paths)
    try:
        if not page.sidecar_alive:
            raise NotFound(f"pool {paths.pool!r} has no living sidecar to ask: start it with 'ballast serve'")
        identifier = new_id()
        following = _catalog(page).next  # what is made for this request has this number or a later one
        fd = _write(paths, identifier, {"verb": verb, "model": check_model(model)})
        try:
            return _await(paths, page, identifier, timeout)
        except (NotFound, NotReady):
            made = [g for g in _catalog(page).of_model(model, READY) if g.over and g.number >= following]
            if verb != ROLLBACK or not made:
                raise
            return (
                f"{model} serves generation {made[0].number}, gone back to from generation {made[0].over}, but the sidecar has "
                "not answered (see its log); the same again goes forward"
            )
        finally:
            posix.remove(paths.request(identifier))
            posix.remove(paths.answer(identifier))
            os.close(fd)
    finally:
        page.close()


def _catalog(page: ControlPage) -> Catalog:
    try:
        return page.read()
    except NotFound:  # its sidecar is just starting
        return Catalog(boot="")


def _write(paths: PoolPaths, identifier: str, document: Any) -> int:
    """The request, named and locked. As with attachments, nobody ever sees one of a living process unlocked."""
    path = paths.request(identifier)
    while True:
        new = temporary(path)
        fd = posix.create(new)
        try:
            if posix.try_lock_byte(fd, _LOCK_BYTE):
                posix.write_exactly(fd, json.dumps(document).encode(), 0, new)
                posix.rename(new, path)
                return fd
        except NotFound:
            pass  # swept between creating and locking
        except BaseException:
            os.close(fd)
            posix.remove(new)
            raise
        os.close(fd)


def _await(paths: PoolPaths, page: ControlPage, identifier: str, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while True:
        alive = page.sidecar_alive  # asked before the look: one who has answered and ended since is not missed
        try:
            done, text = _decode_answer(posix.read_all(paths.answer(identifier), _LIMIT))
        except NotFound:
            if not alive:
                raise NotFound(f"the sidecar of pool {paths.pool!r} ended before it answered: start it again") from None
            if time.monotonic() > deadline:
                raise NotReady(f"the sidecar of pool {paths.pool!r} has not answered in {timeout:g} s: see its log") from None
            time.sleep(_LOOK_EVERY)
            continue
        if not done:
            raise Refused(text)
        return text


def _decode_answer(data: bytes) -> tuple[bool, str]:
    try:
        raw = json.loads(data)
        done, text = raw["done"], raw["text"]
        if type(done) is not bool or not isinstance(text, str):
            raise ValueError("fields")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"the sidecar's answer does not make sense ({error}): use one version for all") from None
    return done, text


def pending(paths: PoolPaths) -> list[Request]:
    """What living processes ask for and has not been answered. What does not make sense, or is a stranger's, is left out."""
    found = []
    for name in paths.objects():
        if name.kind != "request" or name.tmp:
            continue
        identifier = name.file.rpartition(".")[2]
        if paths.answer(identifier).exists():
            continue
        try:
            fd = posix.open_existing(paths.dir / name.file)
        except HandoffError:
            continue
        try:
            if posix.byte_is_locked(fd, _LOCK_BYTE):
                size = min(os.fstat(fd).st_size, _LIMIT)
                found.append(_decode(posix.read_exactly(fd, size, 0, paths.dir / name.file), identifier))
        except Damaged:
            continue
        finally:
            os.close(fd)
    return found


def _decode(data: bytes, identifier: str) -> Request:
    try:
        raw = json.loads(data)
        verb, model = raw["verb"], raw["model"]
        if not isinstance(verb, str) or not isinstance(model, str):
            raise ValueError("fields")
        return Request(verb[:80], check_model(model), identifier)
    except (ValueError, KeyError, TypeError, RecursionError, HandoffError) as error:
        raise Damaged(f"request {identifier} does not make sense ({error})") from None


def answer(paths: PoolPaths, request: Request, done: bool, text: str) -> None:
    """Answers a request, in one step. Raises NoRoom."""
    path = paths.answer(request.identifier)
    new = temporary(path)
    fd = posix.create(new)
    try:
        posix.write_exactly(fd, json.dumps({"done": done, "text": text}).encode(), 0, new)
        posix.rename(new, path)
    finally:
        os.close(fd)
        posix.remove(new)


def abandoned(paths: PoolPaths, path: Path) -> bool:
    """Whether a request, or an answer, belongs to nobody any more. Of another user's it says no."""
    name = paths.parse(path.name)
    if name is not None and name.kind == "answer":
        identifier = name.file.split(".")[2]
        return not paths.request(identifier).exists()
    try:
        fd = posix.open_existing(path)
    except HandoffError:
        return False
    try:
        return not posix.byte_is_locked(fd, _LOCK_BYTE)
    finally:
        os.close(fd)
