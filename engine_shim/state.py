"""An engine's state, kept and found: what stands between a module tree and the pool, for every engine.

`Keeper` takes a module's state into shared memory while the engine loads it, without a second copy: the parameters are moved
into the publication before the weights are read, so that the engine loads straight into it. `find` looks for a published
state by its key, and `Found.bind` puts it into a module.

A state is kept at two levels, module by module. *loaded*: as the engine sharded and fused the checkpoint, before
post-processing, which runs again on every attach. *processed*: as post-processing left it, ready to run.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import AbstractSet, Any, Iterable, Iterator, Mapping, Optional

import torch

from engine_shim import device, ladder, modules
from engine_shim.handoff import catalog, maps
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import Damaged, HandoffError, Mismatch, NotFound, NotReady
from engine_shim.handoff.manifest import Manifest
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Place, Publication
from engine_shim.mapping import Residency
from engine_shim.modules import Slot, TensorStorage
from engine_shim.surroundings import changed, surroundings

log = logging.getLogger("ballast")

LOADED = "loaded"
PROCESSED = "processed"

# Smaller storages are copied when they are captured: moving one into shared memory costs more than its bytes.
MOVED = 64 << 10

# Tables of addresses are small, and of these types.
_INTEGERS = frozenset(getattr(torch, name) for name in ("int64", "uint64") if hasattr(torch, name))
_TABLE = 1 << 16


@dataclass(frozen=True)
class Found:
    """A published state that fits a key, leased as long as it or any tensor of it lives."""

    generation: Generation
    contents: Manifest
    segments: Residency

    @property
    def processed(self) -> AbstractSet[str]:
        """The paths of the modules that were captured after post-processing."""
        paths = self.contents.state.get("processed", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise Damaged(f"the state of {self.contents.model!r} does not make sense: publish it again")
        return frozenset(paths)

    @property
    def level(self) -> str:
        every = {row[0] for row in self.contents.state["slots"]}
        processed = self.processed
        return PROCESSED if every <= processed else f"{LOADED} and {PROCESSED}" if processed else LOADED

    def bind(self, module: torch.nn.Module) -> None:
        """Puts the state into `module`, which was built and not loaded. Raises Mismatch or Damaged with nothing touched."""
        attributes = self.contents.state.get("attributes", [])
        owners = dict(modules.root(module).named_modules(remove_duplicate=False))
        try:
            plan = [(owners[path], name, value) for path, name, value in attributes]
        except (KeyError, ValueError, TypeError):
            raise Mismatch(f"the module lacks something that {self.contents.model!r} was published with") from None
        modules.restore(module, self.contents, self.segments, self.processed, overwrite=True)
        for owner, name, value in plan:
            owner.__dict__[name] = value

    def check_final(self, module: torch.nn.Module, variant: str) -> None:
        """Raises Mismatch unless the tree after post-processing is what it was in the engine that published."""
        wanted = self.contents.state.get("final", {}).get(variant)
        if wanted is None:
            return
        now = modules.describe(module)
        for there, here in zip(wanted, now):
            if there != here:
                raise Mismatch(f"{here[0]} is {here[1:]} after post-processing and was {there[1:]} when it was published")
        if len(wanted) != len(now):
            raise Mismatch(f"the module has {len(now)} tensors after post-processing and had {len(wanted)} when published")


def find(
    key: str, engine: str = "", paths: Optional[PoolPaths] = None, where: Optional[device.Gpu] = None, content: str = ""
) -> Optional[Found]:
    """The newest ready state with this key, or None. Raises HandoffError if there is one that cannot be used.

    With `content`, what the engine's weight files hold, a state that belongs to another is none: samples, which the key rests
    on, may be alike. With `where`, on that GPU: mapped where a copy lies there, else copied there.
    """
    view = ladder.pool(paths)
    fitting = [g for g in view.catalog().generations if _fits(g, key, content)]
    for generation in sorted(fitting, key=lambda g: -g.number):
        try:
            contents = view.manifest(generation)
            if contents.kind != catalog.ENGINE or contents.engine.get("key") != key:
                raise Damaged(f"generation {generation.number} has another key than the catalog says: restart the sidecar")
            return Found(generation, contents, ladder.residency(view, generation, contents, where, engine))
        except NotFound:
            continue  # retired between two looks
    return None


def _ready(generation: Generation) -> bool:
    return generation.kind == catalog.ENGINE and generation.state == catalog.READY


def _fits(generation: Generation, key: str, content: str) -> bool:
    unlike = content and generation.content and content != generation.content
    return _ready(generation) and generation.key == key and not unlike


def exists(key: str, paths: Optional[PoolPaths] = None, content: str = "") -> bool:
    """Whether the pool has a ready state with this key, of this content if both are known."""
    return any(_fits(g, key, content) for g in ladder.pool(paths).catalog().generations)


def lies_on(where: device.Gpu, paths: Optional[PoolPaths] = None) -> bool:
    """Whether any engine's state has a copy on a GPU. Raises HandoffError without a pool."""
    view = ladder.pool(paths)
    for generation in filter(_ready, view.catalog().generations):
        with contextlib.suppress(HandoffError):
            if device.copy_on(view.manifest(generation), where) is not None:
                return True
    return False


def newest_with(parts: Mapping[str, Any], paths: Optional[PoolPaths] = None) -> Optional[str]:
    """The key of the newest ready state whose configuration has these parts, whatever else it has."""
    view = ladder.pool(paths)
    for generation in sorted(filter(_ready, view.catalog().generations), key=lambda g: -g.number):
        with contextlib.suppress(HandoffError):
            other = view.manifest(generation).engine
            if all(name in other and other[name] == value for name, value in parts.items()):
                return generation.key
    return None


def differences(key: Mapping[str, Any], paths: Optional[PoolPaths] = None) -> Optional[str]:
    """Why no published state fits: in what the nearest one differs. None if there is no state at all."""
    view = ladder.pool(paths)
    nearest: Optional[list[str]] = None
    for generation in view.catalog().generations:
        if not _ready(generation):
            continue
        try:
            other = view.manifest(generation).engine
        except HandoffError:
            continue
        names = sorted(name for name in {*key, *other} - {"key"} if key.get(name) != other.get(name))
        if nearest is None or len(names) < len(nearest):
            nearest = names
    return ", ".join(nearest) if nearest else None


@dataclass
class Keeper:
    """Takes the state of one module into shared memory. The steps, in order: `move` before the weights are read, `loaded`
    after, `process` for each module that is captured after its post-processing, `finish`, `commit`; `close` in any case."""

    model: str
    paths: PoolPaths
    levels: Mapping[str, str]  # path of module -> level; those not named are captured at level loaded
    _publication: Publication = field(init=False)
    _moved: dict[int, int] = field(default_factory=dict)  # address of a moved storage -> its row, until `loaded`
    _before: dict[tuple[str, str], Any] = field(default_factory=dict)
    _surroundings: dict[str, Any] = field(default_factory=dict)
    _slots: list[list[Any]] = field(default_factory=list)
    _attributes: list[list[Any]] = field(default_factory=list)
    _wrappers: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._publication = Publication(self.paths, self.model)

    @property
    def identifier(self) -> str:
        return self._publication.identifier

    @property
    def nbytes(self) -> int:
        return self._publication.nbytes

    def _wanted(self, path: str) -> bool:
        return self.levels.get(path, LOADED) == LOADED

    def move(self, module: torch.nn.Module) -> None:
        """Moves the module's larger tensors into the publication, with what they hold. Raises NoRoom, or Mismatch for a module
        that knows where they are, with nothing moved.

        A tensor on another device stays there. One that somebody outside the tree looks at stays where it is as well, and so
        does one in a file's map or in shared memory, where another process may look at it.
        """
        self._before = modules.module_attributes(module)
        self._surroundings = surroundings(module)
        memory = maps.own_memory()
        movable = (slot for slot in _slots(module) if self._wanted(slot.path) and _movable(slot.tensor, memory))
        chosen = [group for group in _by_storage(movable) if _follows(_looking(group))]
        _check_addresses(module, chosen)
        sizes = [_storage(group).nbytes() for group in chosen]
        for moving, place in zip(chosen, self._publication.reserve(sizes)):
            self._move(moving, place)

    def _move(self, group: list[Slot], place: Place) -> None:
        old = _storage(group)
        flat = torch.frombuffer(place.buffer, dtype=torch.uint8)
        new = flat.untyped_storage()
        copy_touched(old.data_ptr(), new.data_ptr(), old.nbytes())
        for tensor in _looking(group):
            _set(tensor, new)
        self._moved[new.data_ptr()] = place.row

    def loaded(self, module: torch.nn.Module) -> None:
        """Captures what has been loaded, and ends the engine's way of writing into it: later writes stay its own.

        Raises Mismatch if loading has made more than tensors of the tree and simple attributes.
        """
        self._compare(module)
        moved, self._moved = self._moved, {}
        self._keep(modules.capture(module, self._wanted), moved)
        groups = [group for group in _by_storage(_slots(module)) if _storage(group).data_ptr() in moved]
        _check_addresses(module, groups)
        for group in groups:
            # What cannot be, or is looked at from outside the tree as well, stays where it is until `seal`.
            if _follows(_looking(group)):
                with contextlib.suppress(HandoffError):  # no address space for another map
                    self._move_on(group, moved[_storage(group).data_ptr()])
        self._publication.seal()

    def _compare(self, module: torch.nn.Module) -> None:
        """Keeps the attributes that loading has set. Raises Mismatch for what it has changed and cannot be kept."""
        now = modules.module_attributes(module)
        for place, value in now.items():
            if place not in self._before or self._before[place] is not value:
                self._changed(place, value)
        owners = dict(modules.root(module).named_modules(remove_duplicate=False))
        # One that has become a tensor is captured as such.
        gone = next((p for p in self._before if p not in now and (p[0] not in owners or not hasattr(owners[p[0]], p[1]))), None)
        other = ".".join(filter(None, gone)) if gone else changed(self._surroundings, surroundings(module))
        if other is not None:
            raise Mismatch(f"loading has changed {other}, which is no tensor of the model and cannot be kept")
        self._before.clear()
        self._surroundings.clear()

    def _changed(self, place: tuple[str, str], value: Any) -> None:
        """An attribute that loading has set. Numbers and texts are kept; objects cannot be."""
        simple = modules.told(value)
        if isinstance(simple, dict):
            raise Mismatch(f"loading has made {'.'.join(filter(None, place))}, a {simple['type']}, which cannot be kept")
        if place in self._before and self._before[place] == value and type(self._before[place]) is type(value):
            return
        self._attributes.append([*place, simple])

    def process(self, module: torch.nn.Module, paths: Iterable[str]) -> None:
        """Captures the modules at these paths, whose post-processing is done, and moves their larger tensors: the engine has no
        memory for both. Raises NoRoom, or Mismatch for what cannot be captured."""
        wanted = set(paths)
        memory = maps.own_memory()
        groups = [group for group in _by_storage(_slots(module)) if any(slot.path in wanted for slot in group)]
        chosen = [group for group in groups if _movable(group[0].tensor, memory) and _follows(_looking(group))]
        _check_addresses(module, chosen)
        places = self._publication.reserve([_storage(group).nbytes() for group in chosen])
        moved = {}
        for group, place in zip(chosen, places):
            old = _storage(group)
            ctypes.memmove(place.buffer, old.data_ptr(), old.nbytes())
            del old
            self._move_on(group, place.row)
            moved[_storage(group).data_ptr()] = place.row
        self._keep(modules.capture(module, wanted.__contains__), moved)

    def _keep(self, captured: modules.Captured, moved: Mapping[int, int]) -> None:
        """Captures; what has not been moved, as address -> row, is copied."""
        self._wrappers = sorted([*self._wrappers, *captured.state.get("wrappers", [])])
        first = len(self._slots)
        rows = []
        for storage in captured.storages:
            row = moved.get(storage.storage.data_ptr()) if storage.nbytes else None
            rows.append(self._publication.add(TensorStorage(storage.storage)) if row is None else row)
        for slot in captured.state["slots"]:
            self._slots.append([*slot[:6], rows[slot[6]], *slot[7:11], slot[11] + first, *slot[12:]])

    def _move_on(self, group: list[Slot], row: int) -> None:
        """Has a group look at a private map of the bytes that a row has. Raises HandoffError."""
        nbytes = _storage(group).nbytes()
        buffer, offset = self._publication.view(row)
        new = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()
        for tensor in _looking(group):
            _set(tensor, new)

    def finish(self, module: torch.nn.Module, variant: str) -> dict[str, Any]:
        """Ends the capture. Returns the state's description."""
        self._publication.finish()
        return {
            "slots": self._slots,
            "processed": sorted(path for path, level in self.levels.items() if level == PROCESSED),
            "attributes": self._attributes,
            "wrappers": self._wrappers,
            "final": {variant: modules.describe(module)},
        }

    def commit(self, state: Mapping[str, Any], key: Mapping[str, Any], digest: str) -> None:
        """Hands the state over. Raises NoRoom or Busy."""
        self._publication.commit(state, key, digest)

    def close(self) -> None:
        """Removes what was not committed. The module keeps its bytes."""
        self._publication.close()


def adopted(keeper: Keeper, key: str, timeout: float) -> Generation:
    """Waits until the sidecar has made a generation of what was committed. Raises NotReady if it refused it, or took longer."""
    view = ladder.pool(keeper.paths)
    place = view.paths.publication(keeper.identifier)

    def look(now: catalog.Catalog) -> Optional[Generation]:
        ready = [g for g in now.generations if _ready(g) and g.key == key]
        if ready and not place.exists():
            return max(ready, key=lambda g: g.number)
        failed = [g for g in now.of_model(keeper.model, catalog.FAILED) if g.kind == catalog.ENGINE]
        if failed and not ready and not place.exists() and not any(g.state == catalog.LOADING for g in now.generations):
            raise NotReady(f"the sidecar refused the publication: {failed[0].reason}")
        return None

    found = view.wait(look, timeout)
    if found is None:
        raise NotReady("the sidecar has not adopted the publication: see 'ballast status'")
    return found


def check_seen_nowhere_else(module: torch.nn.Module) -> None:
    """Raises Mismatch if something outside the module tree looks at bytes of it: it would not follow where they go.

    Such as a view that a module keeps in a list.
    """
    for group in _by_storage(_slots(module)):
        if _seen_elsewhere(_looking(group)):
            raise Mismatch(f"{group[0].label} is looked at from outside the module tree")


def _slots(module: torch.nn.Module) -> Iterator[Slot]:
    return modules.slots(modules.root(module))


def _by_storage(slots: Iterable[Slot]) -> list[list[Slot]]:
    """The tensors that have bytes, each once, those that look at the same bytes together."""
    groups: dict[int, dict[int, Slot]] = {}
    for slot in slots:
        if slot.tensor.layout == torch.strided and slot.tensor.device.type != "meta":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around other tensors
                place = slot.tensor.untyped_storage().data_ptr()
                if place:
                    groups.setdefault(place, {}).setdefault(id(slot.tensor), slot)
    return [list(group.values()) for group in groups.values()]


def _storage(group: list[Slot]) -> torch.UntypedStorage:
    return group[0].tensor.untyped_storage()


def own_bytes(paths: PoolPaths, generation: int) -> int:
    """How much of a generation's segments this process has written to, and so has copies of its own: proc_pid_smaps(5)."""
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            first = line.split(None, 1)[0]
            if not first.endswith(":"):
                inside = line.rstrip().startswith(str(paths.segment(generation, 0))[:-1], line.find("/"))
            elif inside and first == "Anonymous:":
                total += int(line.split()[1]) << 10
    return total


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Has a tensor look at the same place of another storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    tensor.data = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _ordinary(tensor: torch.Tensor) -> bool:
    """Whether `_set` can be done to it."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_inference() or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():  # `_set` would lose that
        return False
    return type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)


def _movable(tensor: torch.Tensor, memory: list[tuple[int, int]]) -> bool:
    """Whether it is large enough to be moved, and lies in `memory`: see `maps.own_memory`."""
    if not _ordinary(tensor):
        return False
    try:
        storage = tensor.untyped_storage()
        if storage.nbytes() < MOVED or not storage.data_ptr() or tensor.is_pinned():
            return False
        if not storage.resizable():  # somebody else's memory
            return False
    except (RuntimeError, NotImplementedError):
        return False  # a wrapper around other tensors
    return modules.within(storage, memory)


def _looking(group: list[Slot]) -> list[torch.Tensor]:
    """The tensors of a group, each once, and what views among them were made of: that lives as long as the view."""
    found = {id(slot.tensor): slot.tensor for slot in group}
    for tensor in list(found.values()):
        if tensor._base is not None:
            found[id(tensor._base)] = tensor._base
    return list(found.values())


def _seen_elsewhere(looking: list[torch.Tensor]) -> bool:
    """Whether something else than these looks at their storage: it would go on looking at the old one."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:  # a torch that does not tell
        return True
    storage = looking[0].untyped_storage()
    if sys.getrefcount(storage) > _not_held():
        return True
    return bool(count(storage._cdata) > len(looking) + 1)  # these and `storage` itself


@functools.cache
def _not_held() -> int:
    """References to a storage's object that only its asker holds: torch may make one for each who asks, or one for all."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def _follows(looking: list[torch.Tensor]) -> bool:
    """Whether all that looks at the storage of these can be had to look at another, by `_set` of each."""
    if not all(map(_ordinary, looking)) or _seen_elsewhere(looking):
        return False
    # Who holds a tensor itself, in C++, has its address, as by DLPack: that does not follow. Its views hold it as well.
    held = {id(tensor): 1 for tensor in looking}
    for tensor in looking:
        if tensor._base is not None:
            held[id(tensor._base)] += 1
    count: Any = getattr(torch.Tensor, "_use_count", None)
    return count is not None and all(count(tensor) <= held[id(tensor)] for tensor in looking)


def _check_addresses(module: torch.nn.Module, groups: list[list[Slot]]) -> None:
    """Raises Mismatch if the module keeps the address of bytes that are about to be moved, as a table for a kernel does."""
    spans = {}
    for group in groups:
        storage = _storage(group)
        spans[storage.data_ptr()] = (storage.data_ptr() + storage.nbytes(), group[0].label)
    starts = sorted(spans)
    for label, number in _numbers(module):
        before = bisect.bisect_right(starts, number) - 1
        if before >= 0 and number < spans[starts[before]][0]:
            raise Mismatch(f"{label} keeps the address of {spans[starts[before]][1]}, which cannot be moved then")


def _numbers(module: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers of a tree that may be addresses, and where they are."""
    for slot in _slots(module):
        tensor = slot.tensor
        if tensor.dtype in _INTEGERS and tensor.device.type == "cpu" and tensor.numel() <= _TABLE:
            yield from ((slot.label, number) for number in tensor.detach().reshape(-1).tolist())
        yield from ((f"{slot.label}.{name}", value) for name, value in vars(tensor).items() if type(value) is int)
    for place, value in modules.module_attributes(module).items():
        if type(value) is int:
            yield ".".join(filter(None, place)), value


_PAGE = os.sysconf("SC_PAGE_SIZE")
_HAS_BYTES = 0xC0  # of a pagemap entry's last byte: present in memory, or swapped out
_MARK = bytes(1 if value & _HAS_BYTES else 0 for value in range(256))


def copy_touched(source: int, target: int, nbytes: int) -> None:
    """Copies memory to memory, without the pages of the source that nobody has ever written to: those are zeros, and so is
    the target. A model that was just built consists of such pages, since `torch.empty` does not write. The source must lie in
    `maps.own_memory`: a file's page that is not in memory is in the file.

    Asks /proc/self/pagemap (see proc_pid_pagemap(5)); where that is not to be had everything is copied.
    """
    first = -(-source // _PAGE) * _PAGE
    count = (source + nbytes - first) // _PAGE
    marks = _touched(first, count) if count > 0 else None
    if marks is None:
        ctypes.memmove(target, source, nbytes)
        return
    head = first - source
    ctypes.memmove(target, source, head)
    tail = head + count * _PAGE
    ctypes.memmove(target + tail, source + tail, nbytes - tail)
    end = 0
    while (begin := marks.find(1, end)) >= 0:
        end = marks.find(0, begin)
        end = count if end < 0 else end
        ctypes.memmove(target + head + begin * _PAGE, first + begin * _PAGE, (end - begin) * _PAGE)


def _touched(address: int, pages: int) -> Optional[bytes]:
    """One byte for each page: 1 if it holds something. None if the kernel does not tell."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // _PAGE * 8)
            data = bytearray()
            while len(data) < pages * 8:
                part = file.read(pages * 8 - len(data))
                if not part:
                    return None
                data += part
    except OSError:
        return None
    return bytes(data[7::8]).translate(_MARK)
