"""Living on device memory that is not one's own: what if its holder dies, what if somebody writes, how much of it counts.

Bytes in host memory outlive everybody; bytes on a GPU live as long as the process that allocated them. So an engine that has
mapped some watches that process, and by default ends when it is lost, since what it then reads is not defined. And since all
engines share those bytes for writing, whatever writes weights first makes them private.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Container, Iterator, Optional, Sequence

from engine_shim.handoff import attachment, catalog, holder, manifest
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import HandoffError, Mismatch
from engine_shim.handoff.names import PoolPaths

if TYPE_CHECKING:
    import torch

    from engine_shim.device import Copy, Gpu, Import
    from engine_shim.modules import Captured

log = logging.getLogger("ballast")

LOST = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again": a restart attaches again, or loads from host memory
_LOOK_EVERY = 0.2  # seconds between two looks at a holder's lock: one system call each


# Whether the holder lives


@dataclass(frozen=True)
class _Watched:
    watch: holder.Watch
    model: str
    imports: list[weakref.ReferenceType[Import]]

    @property
    def in_use(self) -> bool:
        return any(one() is not None for one in self.imports)


_watched: list[_Watched] = []
_callbacks: list[Callable[[str], Any]] = []
_lock = threading.Lock()
_thread: Optional[threading.Thread] = None
_opened: weakref.WeakSet[Import] = weakref.WeakSet()


def on_loss(callback: Callable[[str], Any]) -> None:
    """Has `callback` called, with a sentence, in a thread of its own, when device memory in use here is lost. It is called
    before the process ends, if it is to end; it may end it in a better way."""
    _callbacks.append(callback)


def watch_over(watch: holder.Watch, model: str, copy: Copy) -> None:
    """Looks after a holder as long as this process uses something of the copy."""
    global _thread
    with _lock:
        _opened.update(copy.imports)
        _watched.append(_Watched(watch, model, [weakref.ref(one) for one in copy.imports]))
        if _thread is None:
            _thread = threading.Thread(target=_look, name="ballast-watch", daemon=True)
            _thread.start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY)
        with _lock:
            for one in [one for one in _watched if not one.in_use]:
                _watched.remove(one)
                one.watch.close()
            lost = [one for one in _watched if not one.watch.alive]
            for one in lost:
                _watched.remove(one)
                one.watch.close()
        for one in lost:
            _lost(one)


def _lost(one: _Watched) -> None:
    policy = os.environ.get("BALLAST_ON_SIDECAR_LOSS", "exit").strip().lower()
    ends = policy != "warn"
    line = (
        f"the process that held {one.model} in GPU memory is gone: what this engine reads there is not defined any more; "
        + ("it ends now, and a restart will attach again (BALLAST_ON_SIDECAR_LOSS=exit)" if ends else "restart this engine")
    )
    log.error("%s", line)
    for callback in _callbacks:
        try:
            callback(line)
        except Exception:
            log.warning("a callback of on_loss failed", exc_info=True)
    if ends:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(LOST)  # not by way of destructors: they would wait for a GPU whose memory is gone


# What is shared


def _shared_range(address: int) -> bool:
    return any(one.pointer <= address < one.pointer + one.size for one in list(_opened))


def shared_slots(module: torch.nn.Module) -> Iterator[Any]:
    """The slots of a module tree whose tensors lie in shared device memory."""
    from engine_shim import modules

    if not len(_opened):
        return
    for slot in modules.slots(modules.root(module)):
        try:
            address = slot.tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            continue  # no bytes of its own
        if _shared_range(address):
            yield slot


def refuse_writes(module: torch.nn.Module, what: str, remedy: str = "call make_private(module) first") -> None:
    """Raises Mismatch if something of a module is shared: `what` would write to other engines' weights."""
    for slot in shared_slots(module):
        raise Mismatch(f"{what} would write to {slot.label}, which other engines share: {remedy}")


def make_private(module: torch.nn.Module, wanted: Callable[[Any], bool] = lambda slot: True) -> int:
    """Copies what a module has in shared device memory into memory of its own, aliases and all; returns how many bytes. With
    `wanted` only of the slots that it says, which must not leave out one of two that look at the same bytes.

    To be called before anything that writes weights in place: waking from a sleep that has thrown them away, a weight update,
    training. Tensor objects stay the same; what remembers *addresses* (captured CUDA graphs) must be made anew.
    """
    import torch

    moved: dict[int, torch.UntypedStorage] = {}
    done: set[int] = set()
    for slot in list(filter(wanted, shared_slots(module))):
        tensor = slot.tensor
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        old = tensor.untyped_storage()
        if old.data_ptr() not in moved:
            moved[old.data_ptr()] = old.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(moved[old.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
    return sum(storage.nbytes() for storage in moved.values())


def home(captured: Captured) -> dict[str, str]:
    """For a publication: which GPU its tensors were on, so that the copy is made there and nowhere else."""
    from engine_shim import device

    indices = {one.storage.device.index for one in captured.storages if one.storage.device.type == "cuda"}
    return {"gpu": device.gpu(indices.pop()).uuid} if len(indices) == 1 else {}


# How much of it counts


def mapped(where: Gpu) -> int:
    """Bytes on a GPU that this process has open in a holder's memory, each allocation once, as `external_weight_memory`."""
    return sum(one.size for one in list(_opened) if one.ordinal == where.ordinal)


_claims: dict[tuple[PoolPaths, str, int], attachment.Token] = {}


def _forget_after_fork() -> None:
    """A child has no part in its parent's driver: what it maps it maps, and watches, itself."""
    global _lock, _thread
    _lock = threading.Lock()
    _thread = None
    _watched.clear()
    _opened.clear()
    _claims.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def external_weight_memory(
    keys: Sequence[str], where: Gpu, engine: str = "", paths: Optional[PoolPaths] = None, wait: float = 30.0
) -> int:
    """Bytes of the states with these keys that lie on a GPU in a holder's memory: an engine which attaches to them has them
    without allocating them, so its own budget is that much smaller. 0 where there are none, and it will hold its own.

    Also *claims* the GPU for the life of this process: the holder frees every copy there that nobody uses, and then leaves
    that GPU alone for some minutes, so that free memory stays what it is while the engine measures it. Waits up to `wait`
    seconds for that, and for a copy that is just being made. Raises HandoffError without a pool.
    """
    paths = paths or PoolPaths.from_environment()
    page = ControlPage.open(paths)
    try:
        now = page.read()
    finally:
        page.close()
    wanted = [
        max(ready, key=lambda g: g.number)
        for key in keys
        if (ready := [g for g in now.generations if (g.kind, g.state, g.key) == (catalog.ENGINE, catalog.READY, key)])
    ]
    for generation in wanted:
        _claim(paths, where, generation.number, generation.model, engine)
    if not wanted:
        _claim(paths, where, 0, "-", engine)
    _settle(paths, where, {g.number for g in wanted}, wait)
    return sum(_lying(paths, generation.number, where) for generation in wanted)


def give_up(number: int, where: Gpu, engine: str = "", paths: Optional[PoolPaths] = None, wait: float = 30.0) -> int:
    """This process will hold the weights of a generation itself after all: the copy on the GPU that it has claimed may go, and
    is waited for. Returns how many bytes are free now that were not when it was claimed.

    Nothing of the copy must be open in this process any more.
    """
    paths = paths or PoolPaths.from_environment()
    claim = _claims.pop((paths, where.uuid, number), None)
    if claim is None:
        return 0
    lay = _lying(paths, number, where)
    claim.release()
    _claim(paths, where, 0, "-", engine)  # what was asked for stays: room for this engine
    _settle(paths, where, {kept for pool, gpu, kept in _claims if (pool, gpu) == (paths, where.uuid) and kept}, wait)
    return 0 if _lying(paths, number, where) else lay


def _settle(paths: PoolPaths, where: Gpu, keep: Container[int], wait: float) -> None:
    deadline = time.monotonic() + wait
    while (busy := _unsettled(paths, where, keep)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if busy:
        log.warning("%s is not as this engine wants it after %.0f s: %s", where.uuid, wait, "; ".join(busy))


def _lying(paths: PoolPaths, number: int, where: Gpu) -> int:
    """Bytes of a generation's copy on a GPU that an engine would find if it attached now."""
    copy = _served(paths, number, where)
    return 0 if copy is None else sum({window.handle: window.size for window in copy.segments}.values())


def _claim(paths: PoolPaths, where: Gpu, keep: int, model: str, engine: str) -> None:
    place = (paths, where.uuid, keep)
    if place not in _claims:
        _claims[place] = attachment.Token.take(paths, keep, model, engine, residency=holder.CLAIM + where.uuid)


def _unsettled(paths: PoolPaths, where: Gpu, keep: Container[int]) -> list[str]:
    """What the holders of a GPU still have to do for an engine with a claim."""
    # What another engine uses, or has asked to be kept for it, stays.
    attached = {(r.generation, r.residency.replace(holder.CLAIM, holder.DEVICE)) for r in attachment.alive(paths)}
    found = []
    for number, page in holder.pages(paths):
        for gpu in filter(where.is_called, page.held):
            whole = gpu in page.gpus
            if number in keep and not whole:
                found.append(f"generation {number} is still being copied there")
            elif number not in keep and (number, holder.DEVICE + gpu) not in attached:
                found.append(f"generation {number}, which nobody uses, has not been freed there")
    return found


def _served(paths: PoolPaths, number: int, where: Gpu) -> Optional[manifest.DeviceCopy]:
    """The copy that an engine would find if it attached now."""
    from engine_shim import device

    try:
        contents = manifest.read(paths.manifest(number))
        copy = device.copy_on(contents, where)
        if copy is None:
            return None
        watch = holder.Watch(paths, copy.holder)
        try:
            device.check_served(paths, contents, copy, watch)
        finally:
            watch.close()
        return copy
    except HandoffError:
        return None
