"""What a module tree has besides the tensors of its slots: its modules and their classes, flags, hooks, and what their
attributes lead to, such as tensors in a list. A published state does not bring it along: whoever attaches has built it himself.
So nothing of it may come from loading.
"""

from __future__ import annotations

import enum
import hashlib
import types
from dataclasses import dataclass
from typing import Any, Optional

import torch

from engine_shim import modules

_NESTED = 5  # levels of containers and objects that are looked into
_ELEMENTS = 4096  # of one container
_DIGESTED = 16 << 20  # bytes of a tensor; of a larger one its place and version must do
_TORCHS_OWN = frozenset(vars(torch.nn.Module()))
_HOOKS = tuple(sorted(name for name in _TORCHS_OWN if name.endswith("_hooks")))
_LEAVES = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, enum.Enum)


def surroundings(module: torch.nn.Module) -> dict[str, Any]:
    """Place -> what is there, equal as long as nothing has changed. Tensors outside the slots count by their bytes."""
    return _Look(module).all()


def _is_simple(value: Any) -> bool:
    """Whether a state has it along, as an attribute."""
    return not isinstance(modules.told(value), dict)


def changed(before: dict[str, Any], after: dict[str, Any]) -> Optional[str]:
    """The first place that is not as it was."""
    return next((place for place in {**before, **after} if before.get(place, ()) != after.get(place, ())), None)


@dataclass(frozen=True, eq=False)
class _Hung:
    """What an engine has hung on a tensor. Another tensor's is never compared: tensors are a state's own matter."""

    tensor: int
    told: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, _Hung) or self.tensor != other.tensor or self.told == other.told


class _Look:
    """One walk through a tree. What was met before is not gone through again."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = modules.root(module)
        self._modules = {id(owner): path for path, owner in self._root.named_modules()}
        self._slots: set[int] = set()
        self._storages: set[int] = set()
        self._tensors: list[tuple[str, torch.Tensor]] = []
        for slot in modules.slots(self._root):
            self._slots.add(id(slot.tensor))
            if (place := _place(slot.tensor)) is not None:
                self._storages.add(place)
            self._tensors.append((slot.label, slot.tensor))
        self._met: dict[int, Any] = {}  # kept as long as the walk lasts, or its number would be another's

    def all(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, owner in self._root.named_modules():
            hooks = [len(getattr(owner, name, ())) for name in _HOOKS]
            found[path or "the model"] = (modules.qualified(type(owner)), owner.training, hooks)
            for name, value in vars(owner).items():
                if name not in _TORCHS_OWN and not isinstance(value, torch.Tensor) and not _is_simple(value):
                    found[f"{path}.{name}" if path else name] = self._tell(value, _NESTED, True)
        for label, tensor in self._tensors:
            more = [(name, value) for name, value in vars(tensor).items() if not _is_simple(value)]
            hung = {name: self._tell(value, _NESTED, True) for name, value in more}
            found[f"what hangs on {label}"] = _Hung(id(tensor), hung)
        return found

    def _tell(self, value: Any, levels: int, values: bool) -> Any:
        """What a value comes to. Numbers and texts count only with `values`: deep in objects there are counters."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._modules:
            return self._modules[id(value)]
        if _is_simple(value) or isinstance(value, (float, bytes)):
            return repr(value) if values else None
        kind = modules.qualified(type(value))
        if id(value) in self._met or not levels or isinstance(value, _LEAVES):
            return kind
        self._met[id(value)] = value
        if isinstance(value, dict):
            pairs = list(value.items())
            told = [(str(key), self._tell(each, levels - 1, values)) for key, each in pairs[:_ELEMENTS]]
            return kind, len(pairs) if values else None, told
        if isinstance(value, (list, tuple)):
            return kind, len(value) if values else None, [self._tell(each, levels - 1, values) for each in value[:_ELEMENTS]]
        if isinstance(value, (set, frozenset)):
            return kind, len(value) if values else None
        if kind == "numpy.ndarray":
            return kind, value.shape, _digest(value.tobytes())
        inside = getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            outside = isinstance(value, torch.nn.Module)
            counts = outside or (values and levels == _NESTED)
            return kind, [(name, self._tell(each, levels - 1, counts)) for name, each in list(inside.items())]
        return kind

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._slots:
            return "of the tree"
        shape = (str(tensor.dtype), tuple(tensor.shape))
        place = _place(tensor)
        if place is None:
            return modules.qualified(type(tensor)), shape
        if place in self._storages:
            return shape, tensor.stride(), tensor.storage_offset()
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > _DIGESTED:
            return shape, place, None if tensor.is_inference() else tensor._version
        with torch.no_grad():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1).view(torch.uint8)
            return shape, _digest(bytes(flat.untyped_storage())[flat.storage_offset() : flat.storage_offset() + nbytes])


def _place(tensor: torch.Tensor) -> Optional[int]:
    """Where its bytes begin; None if it has none, or none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or None if tensor.layout == torch.strided else None
    except (RuntimeError, NotImplementedError):  # what torch raises for a wrapper around other tensors
        return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
