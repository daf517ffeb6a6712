"""Capture and restore of a module tree: every tensor an `nn.Module` holds, with its aliases, as storages and slots.

A *storage* is a run of bytes, kept once however many tensors look at it. A *slot* is a place in the tree that holds a tensor:
a parameter, a buffer or a plain attribute, and how that tensor looks at its storage. Ties, views and buffers shared by many
modules are slots on one storage and come back as such. A *wrapper* is a tensor made of other tensors, such as a quantised
weight: its parts are slots, and what it makes of them is compared, never stored: whoever attaches builds it as well.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import enum
import hashlib
import json
import numbers
import sys
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

import torch

from engine_shim.handoff import maps
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
    """What a module's state depends on: its class, its torch, and whatever the caller adds, which must be JSON: else raises
    Mismatch."""
    more = dict(key) if isinstance(key, Mapping) else key or {}
    _check_json(more)
    return {"module": qualified(type(root(module))), "torch": torch.__version__, "key": more}


def _check_json(value: Any, depth: int = 0) -> None:
    inner: list[Any] = []
    fits = value is None or isinstance(value, bool) or (isinstance(value, float) and value - value == 0)
    if isinstance(value, int):
        fits = -1 << 63 <= value < 1 << 63
    elif isinstance(value, str):
        fits = not any(0xD800 <= ord(letter) < 0xE000 for letter in value)
    elif isinstance(value, dict):
        fits, inner = all(isinstance(name, str) for name in value), [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple)):
        fits, inner = True, list(value)
    if not fits or depth > 100:
        raise Mismatch(
            f"the key has a {qualified(type(value))}, {value!r:.100}, that JSON cannot tell: make it of dictionaries with "
            "texts as their keys, lists, texts and numbers"
        )
    for item in inner:
        _check_json(item, depth + 1)


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
    """By torch's protocol of traceable wrapper subclasses: `__tensor_flatten__` names the tensors inside.

    Raises Mismatch if it names anything else.
    """
    flatten = getattr(slot.tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    parts = [Slot(slot.owner, slot.path, f"{slot.name}:{n}", PART, False, getattr(slot.tensor, n)) for n in flatten()[0]]
    for part in parts:
        if not isinstance(part.tensor, torch.Tensor):  # a DTensor's mesh of devices
            raise Mismatch(
                f"{slot.label} is a {qualified(type(slot.tensor))}, which is made of more than tensors: use a module that "
                "holds this process's own part of it, such as to_local() gives"
            )
    return parts


def wrappers(module: torch.nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> list[list[Any]]:
    """One row for each wrapper at any depth: path, name, kind, whether persistent, class, whether it requires a gradient,
    element type, shape, strides, context as text, and path and name of the first slot that holds the same object.

    Raises Mismatch if a wrapper's context is more than values that its text tells in full, or its shape is not of numbers.
    """
    rows: list[list[Any]] = []
    first: dict[int, list[str]] = {}

    def tell(slot: Slot) -> None:
        parts = _parts(slot)
        if not parts:
            return
        tensor = slot.tensor
        context = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]  # subclasses have it, as `_parts` has seen
        if tensor.is_nested or not _told_in_full(context):
            raise Mismatch(
                f"{slot.label} is a {qualified(type(tensor))} of more than tensors and plain values, which cannot be "
                "published: publish the module without it, and load it in the ordinary way"
            )
        rows.append(
            [
                slot.path, slot.name, slot.kind, slot.persistent, qualified(type(tensor)), tensor.requires_grad,
                str(tensor.dtype), list(tensor.shape), list(tensor.stride()), repr(context),
                first.setdefault(id(tensor), [slot.path, slot.name]),
            ]
        )  # fmt: skip
        for part in parts:
            tell(part)

    for slot in _held(root(module)):
        if wanted(slot.path):
            tell(slot)
    return sorted(rows)


def _told_in_full(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether equal texts mean equal values: `repr` shortens tensors and arrays, and tells only where some objects are."""
    if isinstance(value, (str, bytes, type, enum.Enum)):
        return True
    if id(value) in above or (hasattr(type(value), "__array__") and not isinstance(value, numbers.Number)):
        return False
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (tuple, list, set, frozenset)):
        inner = list(value)
    else:
        text = repr(value)
        if "..." in text or " at 0x" in text:
            return False
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            if not all(field.repr for field in fields):
                return False
            inner = [getattr(value, field.name) for field in fields]
        elif hasattr(value, "__dict__"):
            inner = list(vars(value).values())
    return all(_told_in_full(item, (*above, id(value))) for item in inner)


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
    return _told_attributes(vars(tensor))


def _told_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Without torch.compile's marks, which are nobody's state."""
    return {name: told(value) for name, value in sorted(attributes.items()) if not name.startswith("_dynamo_")}


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
    spans: set[tuple[str, int, int, str]] = set()
    for slot in slots(root(module)):
        if not wanted(slot.path):
            continue
        plain = _plain(slot)
        untyped = plain.untyped_storage()
        place = (str(untyped.device), untyped.data_ptr() if untyped.nbytes() else -id(slot.tensor))
        if place not in index_of:
            index_of[place] = len(storages)
            storages.append(TensorStorage(untyped))
        spans.add((*place, place[1] + untyped.nbytes(), slot.label))
        rows.append(
            [
                slot.path, slot.name, slot.kind, slot.persistent, qualified(type(slot.tensor)), slot.tensor.requires_grad,
                index_of[place], NAMES[plain.dtype], plain.storage_offset(), list(plain.shape), list(plain.stride()),
                objects.setdefault(id(slot.tensor), len(rows)), tensor_attributes(slot.tensor),
            ]
        )  # fmt: skip
    for one, other in zip(ordered := sorted(spans), ordered[1:]):
        if one[0] == other[0] and other[1] < one[2] and one[1:3] != other[1:3]:
            raise Mismatch(
                f"{one[3]} and {other[3]} look at the same memory, each as at memory of its own: make one a view of the other"
            )
    state: dict[str, Any] = {"slots": rows}
    wrapped = wrappers(module, wanted)
    if wrapped:
        state["wrappers"] = wrapped
    return Captured(storages, state)


def _plain(slot: Slot) -> torch.Tensor:
    """The tensor without its Parameter class. Raises Mismatch if it is more than bytes in one storage."""
    _check_made(slot)
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


def _check_shaped(slot: Slot) -> None:
    if torch.nn.parameter.is_lazy(slot.tensor):
        raise Mismatch(f"{slot.label} has no shape yet: run the module once, or build it with its sizes")


def _check_made(slot: Slot) -> None:
    _check_shaped(slot)
    if slot.tensor.is_nested:
        raise Mismatch(f"{slot.label} is a nested tensor, which is not bytes: keep its values and its offsets instead")


def check_shaped(module: torch.nn.Module) -> None:
    """Raises Mismatch if a tensor has no shape yet, as those of lazy modules."""
    for slot in _held(root(module)):
        _check_shaped(slot)


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

    def is_(self, other: SlotRow) -> bool:
        """Whether both can be the same tensor object."""
        return (
            self.cls, self.requires_grad, self.storage, self.dtype, self.offset, self.shape, self.strides, self.same,
            self.attributes,
        ) == (
            other.cls, other.requires_grad, other.storage, other.dtype, other.offset, other.shape, other.strides, other.same,
            other.attributes,
        )  # fmt: skip


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
            if row.same < len(found) and not row.is_(found[row.same]):
                raise ValueError(f"the identity of {row.name!r}")
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
    attributes = [
        _attributes(slot.tensor if slot else None, row, owners[row.path], row.path in processed)
        for row, slot in zip(rows, (here.get((row.path, row.name)) for row in rows))
    ]
    own = own_storages(contents, rows, here) if overwrite and device is not None and device.type != "cpu" else None
    made = views(contents, segments, rows, device, own)
    values: list[torch.Tensor] = []
    for index, (row, data) in enumerate(zip(rows, made)):
        slot = here.get((row.path, row.name))
        old = slot.tensor if slot else None
        values.append(values[row.same] if row.same < index else _value(old, data, row.cls, row.requires_grad))
    wrapped = _rewrapped(module, {(row.path, row.name): value for row, value in zip(rows, values) if row.kind == PART})
    taken = {id(value) for value in values}
    for index, (row, data, value) in enumerate(zip(rows, made, values)):
        slot = here.get((row.path, row.name))
        if slot is not None and id(slot.tensor) not in taken and qualified(type(slot.tensor)) == row.cls:
            _refill(slot.tensor, data)
        if row.same == index:
            if slot is not None and slot.tensor is value:
                value.data = data
            if value.requires_grad != row.requires_grad:
                value.requires_grad_(row.requires_grad)
            vars(value).clear()
            vars(value).update(attributes[index])
        if row.kind != PART:
            _put(owners[row.path], row.name, row.kind, row.persistent, value)
    for wrapper, value in wrapped:
        _put(wrapper.owner, wrapper.name, wrapper.kind, wrapper.persistent, value)
    _compare(module, rows)
    _check_wrappers(contents, module)


_MISSING = object()
_PLAIN_PARAMETER = "torch.nn.parameter.Parameter"
_PLAIN_TENSOR = "torch.Tensor"


def _check(
    contents: Manifest,
    rows: list[SlotRow],
    here: Mapping[tuple[str, str], Slot],
    owners: Mapping[str, torch.nn.Module],
    processed: AbstractSet[str],
) -> None:
    taken: dict[int, SlotRow] = {}  # tensor of the module -> what it is to hold
    for index, row in enumerate(rows):
        slot = here.get((row.path, row.name))
        if row.path not in owners:
            raise Mismatch(f"the module has no {row.path}, which {contents.model!r} was published with")
        plain = row.kind == ATTRIBUTE and (row.same < index or row.cls in (_PLAIN_TENSOR, _PLAIN_PARAMETER))
        if slot is None and (plain or _vacant(owners[row.path], row)):
            continue
        if slot is None or slot.kind != row.kind:
            raise Mismatch(f"the module has no {row.kind} {row.label}, which {contents.model!r} was published with")
        cls = qualified(type(slot.tensor))
        if row.path in processed and cls != row.cls == _PLAIN_PARAMETER:
            continue
        _check_made(slot)
        again = not _renewed(slot.tensor)
        if again and cls == row.cls and row.same == index and taken.setdefault(id(slot.tensor), row) is not row:
            raise Mismatch(
                f"{row.label} and {taken[id(slot.tensor)].label} are tied in the module and were published apart: build the "
                "module without the tie"
            )
        if not slot.tensor.is_leaf and (not again or slot.tensor.requires_grad != row.requires_grad):
            raise Mismatch(f"{row.label} is computed from other tensors: compute it without gradients before attaching")
        if row.path in processed and cls == row.cls:
            continue
        if cls != row.cls or tuple(slot.tensor.shape) != row.shape or NAMES.get(slot.tensor.dtype) != row.dtype:
            raise Mismatch(
                f"{slot.label} is a {cls} of {slot.tensor.dtype} {tuple(slot.tensor.shape)} and was published as "
                f"{row.cls} of {row.dtype} {row.shape}"
            )
        if slot.tensor.layout != torch.strided or slot.tensor.is_quantized:
            raise Mismatch(f"{slot.label} is {slot.tensor.layout} and was published as strided: build the module with that")
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


def _rewrapped(
    module: torch.nn.Module, parts: Mapping[tuple[str, str], torch.Tensor]
) -> list[tuple[Slot, torch.Tensor]]:
    """The wrappers, made anew where a part cannot be exchanged in place, as on `meta`."""
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
                if isinstance(old, torch.nn.Parameter):
                    made[id(old)] = torch.nn.Parameter(made[id(old)], requires_grad=old.requires_grad)
        return made[id(old)]

    return [(slot, renewed(slot)) for slot in _held(module) if _parts(slot)] if parts else []


def _attributes(old: Optional[torch.Tensor], row: SlotRow, owner: torch.nn.Module, processed: bool) -> dict[str, Any]:
    """What will hang on a slot's tensor: what hangs on `old`, with the published values. Raises Mismatch unless that is
    what was published."""
    told_only = [name for name, value in row.attributes.items() if isinstance(value, dict)]
    if old is None:
        found = {name: getattr(owner, name) for name in told_only if hasattr(owner, name)} if row.kind == PARAMETER else {}
    elif qualified(type(old)) != row.cls:  # post-processing had made a new one: so do we
        loader = getattr(old, "weight_loader", None)
        found = {"weight_loader": loader} if loader is not None else {}
    else:
        found = dict(vars(old))
    if processed:  # post-processing drops what only loading needs
        found = {name: value for name, value in found.items() if name in row.attributes}
    found.update((name, value) for name, value in row.attributes.items() if not isinstance(value, dict))
    now = _told_attributes(found)
    unlike = [name for name in sorted({*now, *row.attributes}) if now.get(name, _MISSING) != row.attributes.get(name, _MISSING)]
    if unlike:
        here, there = (repr(side[unlike[0]]) if unlike[0] in side else "none" for side in (now, row.attributes))
        raise Mismatch(
            f"the attribute {unlike[0]} of {row.label} is not as it was published ({here} instead of {there}): build the "
            "module as the published one was"
        )
    return found


def _renewed(old: torch.Tensor) -> bool:
    """Whether another tensor must take its place, since its bytes cannot be exchanged."""
    return old.device.type == "meta" or old.is_inference()


def _copy(old: torch.Tensor, data: torch.Tensor) -> None:
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        old.copy_(data)


def _refill(old: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor that another has replaced the same bytes, for whoever else holds it, such as an LSTM in a list."""
    if old.is_meta or torch.nn.parameter.is_lazy(old):
        return
    if (old.device, old.dtype, old.shape) != (data.device, data.dtype, data.shape):
        return
    if not old.is_inference():
        old.data = data
    elif 0 not in old.stride():
        _copy(old, data)


def _value(old: Optional[torch.Tensor], data: torch.Tensor, cls: str, requires_grad: bool) -> torch.Tensor:
    """The tensor that is to hold `data`: `old` itself where its bytes can be exchanged, else another in its place."""
    alike = old is not None and qualified(type(old)) == cls
    if old is not None and alike and old.device == data.device and old.dtype == data.dtype and not _renewed(old):
        return old
    if not isinstance(old, torch.nn.Parameter) and cls != _PLAIN_PARAMETER:
        return data
    new = torch.nn.Parameter(data, requires_grad=requires_grad)
    if alike:
        new.__class__ = type(old)  # type: ignore[assignment]  # an engine's own kind of parameter
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
    """Binds checkpoint tensors by name, with the result of `load_state_dict`: zero-copy, or copied into a tensor that is not
    the only one to look at its bytes or has them in another order.

    Raises Mismatch, before anything is touched, unless every parameter and persistent buffer has exactly one tensor of its
    shape and type, ties counted once, no tensor is left over, and loading is nothing but copying.
    """
    module = root(module)
    _check_loading(module)
    objects: dict[int, list[Slot]] = {}
    for held in _held(module):
        if held.persistent:
            _check_made(held)
        for slot in _spread(held):
            if held.persistent and slot is not held:
                if held.label not in tensors:
                    raise _missing(held.label, model)
                raise Mismatch(
                    f"{held.label} is a {qualified(type(held.tensor))}, which is made of other tensors: load it in the "
                    "ordinary way and publish the module, then attach"
                )
            objects.setdefault(id(slot.tensor), []).append(slot)
    shared = _sharing(group[0].tensor for group in objects.values()) | elsewhere(group[0].tensor for group in objects.values())
    plan: list[tuple[list[Slot], torch.Tensor]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    used = set()
    for place, group in objects.items():
        old = group[0].tensor
        known = [slot.label for slot in group if slot.persistent]
        if old.is_meta and (not known or any(slot.kind == PART for slot in group)):
            raise Mismatch(
                f"{group[0].label} is not part of a checkpoint and has no value on the meta device: build the module normally"
            )
        if not known:
            continue
        names = [name for name in known if name in tensors]
        if not names:
            raise _missing(known[0], model)
        data = tensors[names[0]]
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
        if old.layout != torch.strided or old.is_quantized:
            raise Mismatch(f"{names[0]} is {old.layout} of {old.dtype}, which cannot be bound: build it strided")
        strides = old.stride()
        ordered = strides == data.stride()
        if not ordered and any(extent > 1 and not stride for extent, stride in zip(old.shape, strides)):
            raise Mismatch(f"{names[0]} is an expanded tensor, which cannot be filled: build it with bytes for every element")
        if old.is_meta:
            if place in shared:
                raise Mismatch(f"{names[0]} shares its bytes with another tensor on the meta device: build the module normally")
            plan.append((group, data))
        elif ordered and place not in shared and not old.is_inference() and _alone(group):
            plan.append((group, data))
        else:
            copies.append((old, data))
    left = [name for name in tensors if name not in used]
    if left:
        raise Mismatch(
            f"the module has no place for {left[0]} of {model!r} ({len(left)} tensors are left over): build the module with "
            "the checkpoint's configuration"
        )
    made = []
    for group, data in plan:
        old = group[0].tensor
        if old.stride() != data.stride():
            data = torch.empty_strided(old.shape, old.stride(), dtype=data.dtype, device=data.device).copy_(data)
        made.append((group, data, _value(old, data, qualified(type(old)), old.requires_grad)))
    for group, data, value in made:
        if value is group[0].tensor:
            value.data = data
        else:
            vars(value).update(vars(group[0].tensor))
        for slot in group:
            _put(slot.owner, slot.name, slot.kind, slot.persistent, value)
    for old, data in copies:
        _copy(old, data)


def _missing(name: str, model: str) -> Mismatch:
    return Mismatch(
        f"{model!r} has no tensor {name}, which the module needs: build the module with the checkpoint's configuration"
    )


def _check_loading(module: torch.nn.Module) -> None:
    """Raises Mismatch if the module's own `load_state_dict` does more than copy tensors by name."""
    for path, owner in module.named_modules():
        steps = [owner._load_from_state_dict, owner.set_extra_state, *([] if path else [owner.load_state_dict])]
        hooks = [*owner._load_state_dict_pre_hooks.values(), *owner._load_state_dict_post_hooks.values()]
        for step in (*steps, *(getattr(hook, "hook", hook) for hook in hooks)):
            if not str(getattr(step, "__module__", None)).startswith("torch."):
                raise Mismatch(
                    f"{path or 'the module'} ({qualified(type(owner))}) has a way of its own to load weights "
                    f"({getattr(step, '__qualname__', type(step).__qualname__)}): load it in the ordinary way and publish it"
                )


def _sharing(tensors: Iterator[torch.Tensor]) -> set[int]:
    """Which of these tensors, each given once, look at bytes that another one looks at, or might."""
    spans = []
    for tensor in tensors:
        kind, start, nbytes = 2, id(tensor), 1
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # without bytes of its own
            storage = tensor.untyped_storage()
            if tensor.is_meta:
                kind, start = 1, storage._cdata
            elif storage.nbytes():
                kind, start, nbytes = 0, storage.data_ptr(), storage.nbytes()
        spans.append((kind, start, start + nbytes, id(tensor)))
    found: set[int] = set()
    last = (-1, 0, 0, 0)  # of those so far the one that ends last
    for span in sorted(spans):
        if span[0] == last[0] and span[1] < last[2]:
            found.update((last[3], span[3]))
        if span[0] != last[0] or span[2] > last[2]:
            last = span
    return found


def elsewhere(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Which of these tensors have bytes that are not the module's alone: other processes share them, or they are an array's."""
    found: set[int] = set()
    theirs: Optional[list[tuple[int, int]]] = None
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without bytes of its own
            storage = tensor.untyped_storage()
            if tensor.device.type != "cpu" or not storage.nbytes() or (storage.resizable() and not storage.is_shared()):
                continue
            if theirs is None:  # what is neither torch's own nor a private map of a file
                theirs = sorted(maps.own_memory() + maps.shared_memory())
            if within(storage, theirs):
                found.add(id(tensor))
    return found


def within(storage: torch.UntypedStorage, memory: Sequence[tuple[int, int]]) -> bool:
    """Whether a storage lies in one of these ranges of addresses, given in order."""
    place = storage.data_ptr()
    before = bisect.bisect_right(memory, (place, sys.maxsize)) - 1
    return before >= 0 and bool(place + storage.nbytes() <= memory[before][1])


def _alone(group: list[Slot]) -> bool:
    """Whether a tensor's bytes are its own and nobody's view, and no wrapper has been made of it."""
    tensor = group[0].tensor
    return tensor._base is None and not (tensor.is_conj() or tensor.is_neg()) and all(slot.kind != PART for slot in group)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


