"""`safetensors.safe_open` out of shared memory: the same object as far as a program can tell, without reading the file.

Opening asks `engine_shim.ladder.shard_for` for the file's tensors in memory. Where the pool does not hold the file, and
for every framework, argument and element type that is not plainly ours, the original does the work: what is not served
here behaves like safetensors because it is safetensors.

What is served behaves like safetensors 0.8 with torch. Its default backend makes a private map for each open file: two
reads of one tensor show the same memory, two open files never do, and a tensor outlives the closing of its file.
`Shard.tensor` gives just that: a private map for each shard handed out, and a view with its own storage for each call.

Where the original follows torch's default device so does what is served: slices through maps, and with backend "pread" the
tensors without elements. Nothing else does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterable, NamedTuple, Optional, Union

if TYPE_CHECKING:
    import torch

    from engine_shim.mapping import Shard

log = logging.getLogger("ballast")

_FRAMEWORKS = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")
_said: set[str] = set()
_ACCELERATOR = re.compile(r"(cuda|musa|npu|xpu|xla|mlu|hpu)(?::([0-9]{1,9}))?\Z")


class ExtensionType(type):
    """Makes Python classes look like an extension module's: they have the full names that go into the texts of errors
    (`builtins.safe_open`), and cannot be derived from."""

    def __new__(meta, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> ExtensionType:
        for base in bases:
            if base is not safe_open or "original" not in namespace:
                raise TypeError(f"type '{_full_name(base)}' is not an acceptable base type")
        return type.__new__(meta, f"{namespace['__module__']}.{name}", bases, namespace)

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return cls.__qualname__


class StandIn(ExtensionType):
    """The type of classes that stand in for a class of safetensors; instances of either are instances of both."""

    original: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or subclass is cls.original

    @property
    def __signature__(cls) -> Any:
        import inspect

        return inspect.signature(cls.original)


def stand_in(original: Any, by_handle: bool = False) -> StandIn:
    """A replacement for safetensors' class `original`, called in the same way.

    `by_handle`: the original takes a Python file object, whose `name` it opens, instead of a path.
    """
    namespace = {
        "__slots__": (),
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "original": staticmethod(original),
        "by_handle": by_handle,
    }
    return StandIn(original.__qualname__, (safe_open,), namespace)


class Request(NamedTuple):
    """What a call of `safe_open` asks for. A number for a device means that many places down torch's accelerators."""

    path: str
    device: Union[str, int]
    copying: bool  # backend "pread": every read has its own memory


# The two classes below are named as in safetensors: Python puts their names into its TypeErrors about arguments.


class safe_open(metaclass=StandIn):
    """One open file. Base of the stand-ins; `keys` and its like are documented in safetensors."""

    __module__ = "builtins"
    __slots__ = ("_copying", "_device", "_file", "_path", "_reopen", "_shard", "_stamp")
    original: ClassVar[Any] = None
    by_handle: ClassVar[bool] = False

    _shard: Optional[Shard]  # None once closed
    _device: Union[str, int]
    _copying: bool
    _path: str
    _stamp: Any  # of the file when it was opened
    _reopen: Callable[[], Any]
    _file: Any  # the original, once it was needed; from the start if it may be: the path may mean another file by then

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        request = _understand(args, kwargs, cls.by_handle)
        stamp = _stamp(request.path) if request is not None else None
        shard = _shard_for(request.path) if request is not None and stamp is not None else None
        if request is None or shard is None:
            return cls.original(*args, **kwargs)
        reopen = functools.partial(cls.original, *args, **kwargs)
        file = None
        if request.copying or any(_is_packed(row.dtype) for row in shard.tensors.values()):
            file = reopen()
            if _stamp(request.path) != stamp:  # no longer the file that the shard was found for
                return file
        self = object.__new__(cls)
        self._path, self._device, self._copying = request
        self._shard, self._stamp = shard, stamp
        self._reopen, self._file = reopen, file
        return self

    def keys(self) -> list[str]:
        return sorted(self._open().tensors)

    def offset_keys(self) -> list[str]:
        rows = self._open().tensors
        return sorted(rows, key=lambda name: (rows[name].start, rows[name].nbytes))

    def metadata(self) -> Optional[dict[str, str]]:
        metadata = self._open().metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        row = self._row(name)
        view = None if row is None else self._view(row)
        if view is None:
            tensor: torch.Tensor = self._original().get_tensor(name)
            return tensor
        return _delivered(view, self._device, self._copying)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> Any:
        row = self._row(name)
        # Slicing with "pread" is not torch's, and of packed elements it only fails: both are left to the original.
        if row is None or self._copying or _is_packed(row.dtype):
            return self._original().get_slice(name)
        part = object.__new__(PySafeSlice)
        part._file, part._shard, part._row = self, self._open(), row
        return part

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, _exc_type: Any, _exc_value: Any, _traceback: Any) -> None:
        self._shard = None
        if self._file is not None:
            self._file.__exit__(_exc_type, _exc_value, _traceback)

    def _open(self) -> Shard:
        if self._shard is None:
            raise _error("File is closed")
        return self._shard

    def _row(self, name: Any) -> Any:
        """The table's row of a tensor; None for what is not a name at all, which the original words best."""
        if not isinstance(name, str):
            return None
        shard = self._shard
        row = None if shard is None else shard.tensors.get(str.__str__(name))  # a subclass may hash as it likes
        if row is None:
            name.encode()  # raises for a lone surrogate, before anything else is looked at
            self._open()
            raise _error(f"File does not contain tensor {str.__str__(name)}")
        return row

    def _view(self, row: Any) -> Optional[torch.Tensor]:
        """The tensor in shared memory; None where it has to come, or the refusal has to come, from the original."""
        if _is_packed(row.dtype) and (row.dtype != "F4" or self._copying or row.shape[-1] % 2):
            return None
        return _view(self._open(), row.name)

    def _original(self) -> Any:
        """The file as safetensors opens it, in the state that this one is in. Raises SafetensorError if it has changed, since
        tensors of another version must not be mixed in."""
        file = self._reopen() if self._file is None else self._file
        now = _stamp(self._path)
        if _rewritten(self._stamp, now) or (self._file is None and now != self._stamp):
            raise _error(f"{self._path} has changed since it was opened")
        if self._file is None and self._shard is None:
            file.__exit__(None, None, None)
        self._file = file
        return file

    def __getattr__(self, name: str) -> Any:
        # What a later safetensors can do and this file has not heard of.
        if not name.startswith("_") and hasattr(type(self).original, name):
            return getattr(self._original(), name)
        raise AttributeError(f"'{_full_name(type(self))}' object has no attribute '{name}'")

    def __dir__(self) -> Iterable[str]:
        return dir(type(self).original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle '{_full_name(type(self))}' object")


class PySafeSlice(metaclass=ExtensionType):
    """One tensor of an open file, of which a part can be read. It outlives the closing of its file."""

    __module__ = "builtins"
    __doc__ = None
    __slots__ = ("_file", "_row", "_shard")

    _file: safe_open
    _shard: Shard
    _row: Any

    def __new__(cls) -> PySafeSlice:
        raise TypeError(f"cannot create '{_full_name(cls)}' instances")

    def get_shape(self) -> list[int]:
        return list(self._row.shape)

    def get_dtype(self) -> str:
        dtype: str = self._row.dtype
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        view = _view(self._shard, self._row.name)
        if view is None:
            tensor: torch.Tensor = self._file._original().get_slice(self._row.name)[index]
            return tensor
        part = (view if _makes_on_cpu() else _made_anew(view, None))[index]
        return part if self._file._device == "cpu" else part.to(self._file._device)

    def __dir__(self) -> Iterable[str]:
        return sorted({*dir(object), "__module__", "__getitem__", "get_dtype", "get_shape"})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle '{_full_name(type(self))}' object")


def _understand(args: tuple[Any, ...], kwargs: dict[str, Any], by_handle: bool) -> Optional[Request]:
    """The request that a call makes; None for a call that is wrong, or unusual, or not for torch."""
    file = "f" if by_handle else "filename"
    given = dict(zip((file, "framework", "device"), args))
    if len(args) > 3 or given.keys() & kwargs.keys():
        return None
    given.update(kwargs)
    if not {file, "framework"} <= given.keys() <= {file, "framework", "device", "backend"}:
        return None
    framework, backend = given["framework"], given.get("backend", "mmap")
    if not isinstance(framework, str) or framework not in _FRAMEWORKS:
        return None
    if not isinstance(backend, str) or backend not in _BACKENDS:
        return None
    path, device = _path(given[file], by_handle), _device(given.get("device"))
    return None if path is None or device is None else Request(path, device, backend == "pread")


def _path(file: Any, by_handle: bool) -> Optional[str]:
    try:
        if by_handle:
            file.fileno  # noqa: B018 - asked for by the original, and never called
            file = file.name
        path = os.fspath(file)
        path.encode()  # the original refuses paths that are not UTF-8
    except Exception:
        return None
    return path if isinstance(path, str) else None


def _device(device: Any) -> Union[str, int, None]:
    """A device as safetensors hands it to torch; None for what it refuses, or at least reads differently."""
    if device is None:
        return "cpu"
    if isinstance(device, int):
        return int(device) if 0 <= device < 1 << 64 else None
    if not isinstance(device, str):
        return None
    if device in ("cpu", "mps"):
        return device
    if device == "mps:0":
        return "mps"
    accelerator = _ACCELERATOR.match(device)
    return f"{accelerator[1]}:{int(accelerator[2] or 0)}" if accelerator else None


def _shard_for(path: str) -> Optional[Shard]:
    try:
        from engine_shim.ladder import shard_for

        return shard_for(path)
    except Exception as error:
        if os.environ.get("BALLAST_MODE", "").strip().lower() == "require":
            raise
        reason = f"{type(error).__name__}: {error}"
        if reason not in _said:  # once, not for each of a checkpoint's files
            _said.add(reason)
            with contextlib.suppress(Exception):  # our own handler may be missing, and others can raise where stderr is closed
                log.warning("reading %s without Ballast, because of %s", path, reason)
        return None


def _stamp(path: str) -> Any:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _rewritten(before: Any, now: Any) -> bool:
    """Whether a path that still means the same file means other bytes; one that means another file tells nothing."""
    return now is not None and now[:2] == before[:2] and now[2:4] != before[2:4]


def _is_packed(dtype: str) -> bool:
    return dtype[:2] in ("F4", "F6")


def _view(shard: Shard, name: str) -> Optional[torch.Tensor]:
    try:
        return shard.tensor(name)
    except Exception as error:  # say, an element type that this torch does not have
        log.debug("leaving tensor %s to safetensors, because of %s: %s", name, type(error).__name__, error)
        return None


def _delivered(view: torch.Tensor, device: Union[str, int], copying: bool) -> torch.Tensor:
    """The tensor as the original hands it out, step by step, so that it also fails in the same words."""
    import torch

    if isinstance(device, str) and device.startswith("cuda:"):
        pinned = torch.empty(view.shape, dtype=view.dtype, device="cpu", pin_memory=True)
        _bytes(pinned).copy_(_bytes(view))
        return pinned.to(device)
    if copying:
        if view.numel() == 0:
            copy = torch.zeros(view.shape, dtype=view.dtype, device=None)  # the default device's
        else:
            buffer = bytearray(view.untyped_storage().nbytes())
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(_bytes(view))
            copy = torch.frombuffer(buffer, dtype=view.dtype).reshape(view.shape)
        return copy if device == "cpu" else copy.to(device)
    if device == "cpu":
        return view
    return _made_anew(view, device)


def _made_anew(view: torch.Tensor, device: Union[str, int, None]) -> torch.Tensor:
    """The tensor out of its storage, on a device, or with None on torch's default device; copied only if it is not there."""
    import torch

    return torch.asarray(view.untyped_storage(), dtype=torch.uint8, device=device).view(view.dtype).reshape(view.shape)


def _makes_on_cpu() -> bool:
    """Whether torch's default device is the CPU, as far as this torch tells."""
    import torch

    default = getattr(torch, "get_default_device", None)
    return default is not None and default().type == "cpu"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, byte by byte; nothing is copied."""
    import torch

    return torch.asarray(tensor.untyped_storage(), dtype=torch.uint8, device=tensor.device)


def _error(text: str) -> Exception:
    from safetensors import SafetensorError

    return SafetensorError(text)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
