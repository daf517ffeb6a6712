"""Capture and restore of a module tree: every tensor an `nn.Module` holds, with its aliases, as storages and slots.

A *storage* is a run of bytes, kept once however many tensors look at it. A *slot* is a place in the tree that holds a tensor:
a parameter, a buffer or a plain attribute, and how that tensor looks at its storage. Ties, views and buffers shared by many
modules are slots on one storage and come back as such. A *wrapper* is a tensor made of other tensors, such as a quantised
weight: its parts are slots, and what it makes of them is compared, never stored: whoever attaches builds it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Iterator, Mapping, Optional

import torch

from engine_shim.handoff.dtypes import BITS
from engine_shim.handoff.errors import Damaged, Mismatch
from engine_shim.handoff.manifest import Manifest
from engine_shim.mapping import DTYPES, NAMES, Residency, upload

_PIECE = 64 << 20  # bytes copied from a device at a time

PARAMETER = "parameter"
BUFFER = "buffer"
ATTRIBUTE = "attribute"
PART = "part"  # a tensor within a wrapper; its name is the wrapper's with its own after a colon


def module_key(module: torch.nn.Module, key: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """What a module's state depends on: its class, its torch, and whatever the caller adds. Must be JSON."""
    return {"module": qualified(type(root(module))), "torch": torch.__version__, "key": dict(key or {})}


def key_digest(key: Mapping[str, Any]) -> str:
    """A digest of the whole key: unknown is not equal, and neither is missing."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class TensorStorage:
    """The bytes behind one or more tensors, on any device. Keeps them alive."""

    storage: torch.UntypedStorage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    def pieces(self) -> Iterator[memoryview]:
        """The bytes in order; from a device in pieces, so that no second copy of the whole is ever in host memory."""
        if self.storage.device.type == "cpu":
            if self.nbytes:
                yield memoryview((ctypes.c_char * self.nbytes).from_address(self.storage.data_ptr())).cast("B")
            return
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        for start in range(0, self.nbytes, _PIECE):
            piece = whole[start : start + _PIECE].cpu()
            yield memoryview((ctypes.c_char * piece.numel()).from_address(piece.data_ptr())).cast("B")


@dataclass(frozen=True)
class Captured:
    """A module tree's storages, and the JSON that says how its slots look at them."""

    storages: list[TensorStorage]
    state: dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the tree, and the tensor."""

    owner: torch.nn.Module
    path: str  # of the owner in the tree, '' for the root
    name: str
    kind: str
    persistent: bool
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def slots(module: torch.nn.Module) -> Iterator[Slot]:
    """Every slot of the tree, under every name: a module reached by two paths appears twice, as its state dict has it."""
    for slot in _held(module):
        yield from _spread(slot)


def _held(module: torch.nn.Module) -> Iterator[Slot]:
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield Slot(owner, path, name, PARAMETER, True, parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield Slot(owner, path, name, BUFFER, name not in owner._non_persistent_buffers_set, buffer)
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield Slot(owner, path, name, ATTRIBUTE, False, value)


def _spread(slot: Slot) -> Iterator[Slot]:
    """The slot; where a wrapper is in it, the slots of what that is made of."""
    parts = _parts(slot)
    for part in parts:
        yield from _spread(part)
    if not parts:
        yield slot


def _parts(slot: Slot) -> list[Slot]:
    """By torch's protocol of traceable wrapper subclasses: `__tensor_flatten__` names the tensors inside."""
    flatten = getattr(slot.tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten is not None else ()
    return [Slot(slot.owner, slot.path, f"{slot.name}:{n}", PART, False, getattr(slot.tensor, n)) for n in names]


def wrappers(module: torch.nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> list[list[Any]]:
    """One row for each wrapper at any depth: path, name, kind, whether persistent, class, whether it requires a gradient,
    element type, shape, strides, context as text, and path and name of the first slot that holds the same object.

    Raises Mismatch if a wrapper's context is more than values.
    """
    rows: list[list[Any]] = []
    first: dict[int, list[str]] = {}

    def tell(slot: Slot) -> None:
        parts = _parts(slot)
        if not parts:
            return
        tensor = slot.tensor
        context = repr(tensor.__tensor_flatten__()[1])  # type: ignore[attr-defined]
        if " at 0x" in context:
            raise Mismatch(f"{slot.label} is a {qualified(type(tensor))} of more than values, which cannot be published")
        rows.append(
            [
                slot.path, slot.name, slot.kind, slot.persistent, qualified(type(tensor)), tensor.requires_grad,
                str(tensor.dtype), list(tensor.shape), list(tensor.stride()), context,
                first.setdefault(id(tensor), [slot.path, slot.name]),
            ]
        )  # fmt: skip
        for part in parts:
            tell(part)

    for slot in _held(root(module)):
        if wanted(slot.path):
            tell(slot)
    return sorted(rows)


def root(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself where `torch.compile` has put its own around it, so that names are the same with and without."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


def told(value: Any) -> Any:
    """An attribute's value as JSON can tell it: itself if it is a simple value, else the name of its type."""
    simple = value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0)
    return value if simple else {"type": qualified(type(value))}


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What an engine has hung on a tensor, such as `weight_loader` or `output_dim`."""
    return {name: told(value) for name, value in sorted(vars(tensor).items())}


def module_attributes(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """(path, name) -> value of every attribute of every module that is neither a tensor nor a module."""
    found: dict[tuple[str, str], Any] = {}
    for path, owner in root(module).named_modules(remove_duplicate=False):
        for name, value in vars(owner).items():
            if name not in _MODULES_OWN and not isinstance(value, (torch.Tensor, torch.nn.Module)):
                found[path, name] = value
    return found


# What torch keeps in a module's dictionary: none of it is the engine's.
_MODULES_OWN = frozenset(vars(torch.nn.Module()))


def capture(module: torch.nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> Captured:
    """The whole tree, or the modules at those paths that are `wanted`.

    Raises Mismatch for what cannot be captured: tensors on `meta`, sparse ones, those quantised by torch itself, and
    subclasses that do not say what they are made of.
    """
    storages: list[TensorStorage] = []
    index_of: dict[tuple[str, int], int] = {}
    objects: dict[int, int] = {}
    rows: list[list[Any]] = []
    for slot in slots(root(module)):
        if not wanted(slot.path):
            continue
        plain = _plain(slot)
        untyped = plain.untyped_storage()
        place = (str(untyped.device), untyped.data_ptr() if untyped.nbytes() else -id(slot.tensor))
        if place not in index_of:
            index_of[place] = len(storages)
            storages.append(TensorStorage(untyped))
        rows.append(
            [
                slot.path, slot.name, slot.kind, slot.persistent, qualified(type(slot.tensor)), slot.tensor.requires_grad,
                index_of[place], NAMES[plain.dtype], plain.storage_offset(), list(plain.shape), list(plain.stride()),
                objects.setdefault(id(slot.tensor), len(rows)), tensor_attributes(slot.tensor),
            ]
        )  # fmt: skip
    state: dict[str, Any] = {"slots": rows}
    wrapped = wrappers(module, wanted)
    if wrapped:
        state["wrappers"] = wrapped
    return Captured(storages, state)


def _plain(slot: Slot) -> torch.Tensor:
    """The tensor without its Parameter class. Raises Mismatch if it is more than bytes in one storage."""
    plain = slot.tensor.detach().data if slot.kind == PARAMETER else slot.tensor.detach()
    if plain.device.type == "meta":
        raise Mismatch(f"{slot.label} is on the meta device: load the module before publishing it")
    if type(plain) is not torch.Tensor and not isinstance(slot.tensor, torch.nn.Parameter):
        raise Mismatch(f"{slot.label} is a {qualified(type(plain))}, which cannot be published")
    if plain.layout != torch.strided or plain.is_quantized or plain.dtype not in NAMES:
        raise Mismatch(f"{slot.label} is {plain.layout} of {plain.dtype}, which cannot be published")
    if plain.is_conj() or plain.is_neg():  # its bytes are not its values
        raise Mismatch(f"{slot.label} is another tensor's conjugate or negative without bytes of its own")
    try:
        plain.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        raise Mismatch(f"{slot.label} is a {qualified(type(slot.tensor))} without bytes of its own") from None
    return plain


def describe(module: torch.nn.Module) -> list[list[Any]]:
    """The tree's shape without its bytes, whatever it holds: one row for each slot, equal for equal trees.

    Label, kind, class, element type, shape, strides, offset, number of the storage in order of appearance.
    """
    storages: dict[object, int] = {}
    rows: list[list[Any]] = []
    for slot in slots(root(module)):
        tensor = slot.tensor
        try:
            untyped = tensor.untyped_storage()
            place: object = untyped.data_ptr() if untyped.nbytes() else ("empty", id(tensor))
        except (RuntimeError, NotImplementedError):
            place = ("none", id(tensor))
        strided = tensor.layout == torch.strided
        rows.append(
            [
                slot.label, slot.kind, qualified(type(tensor)), str(tensor.dtype), list(tensor.shape),
                list(tensor.stride()) if strided else None, tensor.storage_offset() if strided else None,
                storages.setdefault(place, len(storages)),
            ]
        )  # fmt: skip
    return rows


@dataclass(frozen=True)
class SlotRow:
    """A slot as a manifest tells of it, checked. `offset` and `strides` count elements; `same` is the first slot that
    holds the very same tensor object; `attributes` is what hangs on it."""

    path: str
    name: str
    kind: str
    persistent: bool
    cls: str
    requires_grad: bool
    storage: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same: int
    attributes: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def slot_rows(contents: Manifest) -> list[SlotRow]:
    """The slots of an engine's state. Raises Damaged unless each lies within its storage."""
    found: list[SlotRow] = []
    try:
        for raw in contents.state["slots"]:
            path, name, kind, persistent, cls, grad, storage, dtype, offset, shape, strides, same, attributes = raw
            row = SlotRow(
                path, name, kind, persistent, cls, grad, storage, dtype, offset, tuple(shape), tuple(strides), same,
                attributes,
            )  # fmt: skip
            numbers = (row.storage, row.offset, row.same, *row.shape, *row.strides)
            if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
                raise ValueError(f"a number of {row.name!r}")
            if not all(isinstance(text, str) for text in (row.path, row.name, row.kind, row.cls, row.dtype)):
                raise ValueError("a name")
            if not all(type(flag) is bool for flag in (row.persistent, row.requires_grad)):
                raise ValueError(f"a flag of {row.name!r}")
            if len(row.shape) != len(row.strides) or row.same > len(found) or not isinstance(attributes, dict):
                raise ValueError(f"the shape or identity of {row.name!r}")
            last = sum((extent - 1) * stride for extent, stride in zip(row.shape, row.strides))
            end = row.offset + last + 1 if 0 not in row.shape else 0
            if end * BITS[row.dtype] // 8 > contents.tensors[row.storage].nbytes:
                raise ValueError(f"the place of {row.name!r}")
            found.append(row)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"the state of {contents.model!r} does not make sense ({error}): publish it again") from None
    return found


# Storages of up to a page are copied instead of mapped: engines write to counters, scales and caches, and the first write
# would copy the page anyway.
TINY = 4096


def views(
    contents: Manifest,
    segments: Residency,
    rows: list[SlotRow],
    device: Optional[torch.device] = None,
    own: Optional[Mapping[int, torch.UntypedStorage]] = None,
) -> list[torch.Tensor]:
    """One tensor for each slot; those on one storage share it, those that were one object are one object.

    With a `device` other than the CPU each storage is copied there, unless it is there; into the one that `own` names for it,
    so that the device need not have room for both.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[torch.Tensor] = []
    for index, row in enumerate(rows):
        if row.same < index:
            made.append(made[row.same])
            continue
        if row.storage not in storages:
            place = contents.tensors[row.storage]
            flat = segments.flat(place)
            if device is not None and device.type != "cpu" and flat.device != device:
                flat = upload(flat, device, (own or {}).get(row.storage))
            elif place.nbytes <= TINY:
                flat = flat.clone()
            storages[row.storage] = flat.untyped_storage()
        empty = torch.empty(0, dtype=DTYPES[row.dtype], device=storages[row.storage].device)
        made.append(empty.set_(storages[row.storage], row.offset, row.shape, row.strides))
    return made


def own_storages(
    contents: Manifest, rows: list[SlotRow], here: Mapping[tuple[str, str], Slot]
) -> dict[int, torch.UntypedStorage]:
    """Storage of the state -> the module's own for it, where that is of the same size and the same slots look at it in the same
    way. Of parameters only: a buffer's bytes are not read anew where binding fails."""
    wanted: dict[int, list[tuple[SlotRow, Optional[Slot]]]] = {}
    looked_at: dict[int, set[int]] = {}
    for row in rows:
        slot = here.get((row.path, row.name))
        wanted.setdefault(row.storage, []).append((row, slot))
        if slot is not None and slot.tensor.device.type != "meta":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around other tensors
                looked_at.setdefault(slot.tensor.untyped_storage().data_ptr(), set()).add(row.storage)
    found = {}
    for index, pairs in wanted.items():
        tensors = [slot.tensor for _, slot in pairs if slot is not None and slot.kind == PARAMETER]
        if len(tensors) < len(pairs) or any(t.device.type == "meta" or t.layout != torch.strided for t in tensors):
            continue
        storage = tensors[0].untyped_storage()
        same = all(
            tensor.untyped_storage().data_ptr() == storage.data_ptr()
            and (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) == (row.offset, row.shape, row.strides)
            for (row, _), tensor in zip(pairs, tensors)
        )
        if same and storage.nbytes() == contents.tensors[index].nbytes and looked_at[storage.data_ptr()] == {index}:
            found[index] = storage
    return found


def restore(
    module: torch.nn.Module,
    contents: Manifest,
    segments: Residency,
    processed: AbstractSet[str] = frozenset(),
    overwrite: bool = False,
) -> None:
    """Binds a published state into `module`, in place, so that whoever holds its tensors holds the new bytes.

    Checks everything first: raises Mismatch and touches nothing if the tree is not the one that was captured. Afterwards
    compares the result with what was captured. The tensors of modules at the paths `processed` may have changed their class
    and shape between the building of the module and the capture. With `overwrite` the parameters of a module on a device hold
    nothing worth keeping: they are copied into where they lie, instead of beside them.
    """
    module = root(module)
    rows = slot_rows(contents)
    here = {(slot.path, slot.name): slot for slot in slots(module)}
    owners = dict(module.named_modules(remove_duplicate=False))
    _check(contents, rows, here, owners, processed)
    _check_wrappers(contents, module)
    devices = {slot.tensor.device for slot in here.values() if slot.tensor.device.type != "meta"}
    if len(devices) > 1:
        raise Mismatch(f"the module is spread over {len(devices)} devices; load it in the ordinary way")
    device = devices.pop() if devices else None
    own = own_storages(contents, rows, here) if overwrite and device is not None and device.type != "cpu" else None
    made = views(contents, segments, rows, device, own)
    bound: dict[int, torch.Tensor] = {}
    for index, (row, tensor) in enumerate(zip(rows, made)):
        slot = here.get((row.path, row.name))
        if row.same < index:
            value: torch.Tensor = bound[row.same]
        else:
            value = _bound(slot.tensor if slot else None, tensor, row, owners[row.path])
            if row.path in processed:  # post-processing drops what only loading needs
                for name in set(vars(value)) - set(row.attributes):
                    del vars(value)[name]
            for name, attribute in row.attributes.items():
                if not isinstance(attribute, dict) and vars(value).get(name, _MISSING) != attribute:
                    vars(value)[name] = attribute
        bound[index] = value
        if row.kind != PART:
            _put(owners[row.path], row.name, row.kind, row.persistent, value)
    parts = {(row.path, row.name): value for row, value in zip(rows, bound.values()) if row.kind == PART}
    if parts:
        _rewrap(module, parts)
    _compare(module, rows)
    _check_wrappers(contents, module)


_MISSING = object()
_PLAIN_PARAMETER = "torch.nn.parameter.Parameter"


def _check(
    contents: Manifest,
    rows: list[SlotRow],
    here: Mapping[tuple[str, str], Slot],
    owners: Mapping[str, torch.nn.Module],
    processed: AbstractSet[str],
) -> None:
    for row in rows:
        slot = here.get((row.path, row.name))
        if row.path not in owners:
            raise Mismatch(f"the module has no {row.path}, which {contents.model!r} was published with")
        if slot is None and (row.kind == ATTRIBUTE or _vacant(owners[row.path], row)):
            continue
        if slot is None or slot.kind != row.kind:
            raise Mismatch(f"the module has no {row.kind} {row.label}, which {contents.model!r} was published with")
        cls = qualified(type(slot.tensor))
        if row.path in processed and row.cls in (cls, _PLAIN_PARAMETER):
            continue
        if cls != row.cls or tuple(slot.tensor.shape) != row.shape or NAMES.get(slot.tensor.dtype) != row.dtype:
            raise Mismatch(
                f"{slot.label} is a {cls} of {slot.tensor.dtype} {tuple(slot.tensor.shape)} and was published as "
                f"{row.cls} of {row.dtype} {row.shape}"
            )
        lacks = [n for n, a in row.attributes.items() if isinstance(a, dict) and n not in vars(slot.tensor)]
        if lacks:
            raise Mismatch(f"{slot.label} has no {lacks[0]}, which it was published with")
    extra = set(here) - {(row.path, row.name) for row in rows}
    if extra:
        raise Mismatch(f"{contents.model!r} was published without {'.'.join(min(extra))}, which the module has")


def _vacant(owner: torch.nn.Module, row: SlotRow) -> bool:
    """Whether the module has a place for a parameter that comes into being only while weights are loaded, such as a bias that
    only some checkpoints have. What hangs on it must be values, or methods of the module itself."""
    methods = [name for name, value in row.attributes.items() if isinstance(value, dict)]
    empty = owner._parameters.get(row.name, _MISSING) is None
    plain = row.kind == PARAMETER and row.cls == _PLAIN_PARAMETER
    return empty and plain and all(callable(getattr(owner, name, None)) for name in methods)


def _check_wrappers(contents: Manifest, module: torch.nn.Module) -> None:
    """Raises Mismatch unless the module wraps as the published one did: only then do the parts mean the same."""
    wanted, found = contents.state.get("wrappers", []), wrappers(module)
    if wanted == found:
        return
    unlike: list[Any] = next((list(pair) for pair in zip(found, wanted) if pair[0] != pair[1]), [None, None])
    raise Mismatch(
        f"the module's tensors are not made of others as in {contents.model!r} ({unlike[0]!r:.300} instead of "
        f"{unlike[1]!r:.300}): quantise it in the same way before attaching"
    )


def _rewrap(module: torch.nn.Module, parts: Mapping[tuple[str, str], torch.Tensor]) -> None:
    """Makes wrappers anew where a part could not be exchanged in place, as on `meta`."""
    made: dict[int, torch.Tensor] = {}

    def renewed(slot: Slot) -> torch.Tensor:
        inner = _parts(slot)
        if not inner:
            return parts.get((slot.path, slot.name), slot.tensor)
        old = slot.tensor
        if id(old) not in made:
            new = {part.name.rpartition(":")[2]: renewed(part) for part in inner}
            if all(new[part.name.rpartition(":")[2]] is part.tensor for part in inner):
                made[id(old)] = old
            else:
                context = old.__tensor_flatten__()[1]  # type: ignore[attr-defined]
                made[id(old)] = type(old).__tensor_unflatten__(new, context, old.shape, old.stride())  # type: ignore[attr-defined]
                if slot.kind == PARAMETER:
                    made[id(old)] = torch.nn.Parameter(made[id(old)], requires_grad=old.requires_grad)
        return made[id(old)]

    for slot in list(_held(module)):
        if _parts(slot):
            _put(slot.owner, slot.name, slot.kind, slot.persistent, renewed(slot))


def _bound(old: Optional[torch.Tensor], data: torch.Tensor, row: SlotRow, owner: torch.nn.Module) -> torch.Tensor:
    """`data` in the dress of `old`: the same object where its bytes can be exchanged, so that attributes such as an
    engine's `weight_loader` stay; a new parameter with those attributes where it was on `meta`."""
    if old is None and row.kind == PARAMETER:
        new = torch.nn.Parameter(data, requires_grad=row.requires_grad)
        vars(new).update({name: getattr(owner, name) for name, value in row.attributes.items() if isinstance(value, dict)})
        return new
    if old is None:
        return data
    if row.kind == PARAMETER and qualified(type(old)) != row.cls:  # post-processing had made a new one: so do we
        new = torch.nn.Parameter(data, requires_grad=row.requires_grad)
        loader = getattr(old, "weight_loader", None)
        if "weight_loader" in row.attributes and loader is not None:
            new.weight_loader = loader  # type: ignore[attr-defined]
        return new
    return _dressed(old, data, row.kind, row.requires_grad)


def _dressed(old: torch.Tensor, data: torch.Tensor, kind: str, requires_grad: bool) -> torch.Tensor:
    if old.device == data.device and old.dtype == data.dtype and not old.is_inference():
        old.data = data
        if kind == PARAMETER:
            old.requires_grad_(requires_grad)
        return old
    if kind != PARAMETER:
        return data
    new = torch.nn.Parameter(data, requires_grad=requires_grad)
    new.__class__ = type(old)  # type: ignore[assignment]
    new.__dict__.update(vars(old))
    return new


def _put(owner: torch.nn.Module, name: str, kind: str, persistent: bool, value: torch.Tensor) -> None:
    if kind == PARAMETER:
        owner._parameters[name] = value  # type: ignore[assignment]
    elif kind == BUFFER:
        owner._buffers[name] = value
        (owner._non_persistent_buffers_set.discard if persistent else owner._non_persistent_buffers_set.add)(name)
    else:
        owner.__dict__[name] = value


def _compare(module: torch.nn.Module, rows: list[SlotRow]) -> None:
    """Raises Mismatch unless the tree now is what was captured: names, classes, shapes, strides, types and aliases."""
    again = capture(module).state["slots"]
    wanted = {(row.path, row.name): row for row in rows}
    seen: dict[int, int] = {}  # storages may be numbered otherwise; which slots share one may not differ
    for path, name, kind, persistent, cls, grad, storage, dtype, offset, shape, strides, _, attributes in again:
        row = wanted.get((path, name))
        if row is None:
            raise Mismatch(f"{path}.{name} came up while the module was bound; load it in the ordinary way")
        found = (kind, persistent, cls, grad, dtype, offset, tuple(shape), tuple(strides), attributes)
        there = (
            row.kind, row.persistent, row.cls, row.requires_grad, row.dtype, row.offset, row.shape, row.strides,
            row.attributes,
        )  # fmt: skip
        if found != there or seen.setdefault(storage, row.storage) != row.storage:
            unlike = [f"{a!r} instead of {b!r}" for a, b in zip(found, there) if a != b] or ["another alias"]
            raise Mismatch(f"{row.label} is not as it was published ({unlike[0]}); load the module in the ordinary way")
    if len(again) != len(rows):
        raise Mismatch("the module lost a tensor while being bound; load it in the ordinary way")


def bind(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], model: str) -> None:
    """Binds checkpoint tensors by name, zero-copy. Raises Mismatch, before anything is touched, unless every parameter and
    persistent buffer has exactly one tensor of its shape and type, ties counted once, and no tensor is left over."""
    places: dict[int, list[Slot]] = {}
    for slot in slots(root(module)):
        if slot.persistent:
            places.setdefault(id(slot.tensor), []).append(slot)
        elif slot.tensor.device.type == "meta":
            raise Mismatch(
                f"{slot.label} is not part of a checkpoint and has no value on the meta device: build the module normally"
            )
    plan: list[tuple[list[Slot], torch.Tensor]] = []
    used = set()
    for group in places.values():
        names = [slot.label for slot in group if slot.label in tensors]
        if not names:
            raise Mismatch(f"{model!r} has no tensor {group[0].label}, which the module needs")
        data, old = tensors[names[0]], group[0].tensor
        if data.shape != old.shape or data.dtype != old.dtype:
            raise Mismatch(
                f"{names[0]} is {data.dtype} {tuple(data.shape)} in {model!r} and {old.dtype} {tuple(old.shape)} in the "
                "module: build the module with the checkpoint's dtype and configuration"
            )
        for name in names[1:]:
            if not _same_bits(tensors[name], data):
                raise Mismatch(
                    f"{names[0]} and {name} are tied in the module and differ in {model!r}: build the module without the tie"
                )
        used.update(names)
        plan.append((group, data))
    left = [name for name in tensors if name not in used]
    if left:
        raise Mismatch(f"the module has no place for {left[0]} of {model!r} ({len(left)} tensors are left over)")
    for group, data in plan:
        slot = group[0]
        value = _dressed(slot.tensor, data, slot.kind, slot.tensor.requires_grad)
        for slot in group:
            _put(slot.owner, slot.name, slot.kind, slot.persistent, value)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


