"""A generation in a GPU's memory as torch tensors, nothing copied. The driver seam: another kind of GPU is another such file.

The holder has exported one handle for each segment. Here each is opened once in a process, on the GPU with the UUID that the
manifest names, whatever number it has in this process; a tensor is an address in there. The memory is *shared and writable*:
the driver knows no read-only import, so whoever writes to such a tensor writes to everybody's (see `engine_shim.onboard`).

Only the standard library is needed: the few calls go to libcuda by ctypes. torch is imported when a tensor is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator, Optional, Sequence, Union

from engine_shim.handoff import holder
from engine_shim.handoff.errors import DeviceError, NotFound
from engine_shim.handoff.manifest import HANDLE_BYTES, DeviceCopy, Manifest, Window
from engine_shim.handoff.names import PoolPaths

if TYPE_CHECKING:
    import torch

    from engine_shim.handoff.manifest import Tensor

LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the one flag there is, and it must be given

# CUdevice_attribute and CUresult of cuda.h, as far as they are needed.
_COMPUTE_MODE, _UNIFIED_ADDRESSING, _IPC_EVENT_SUPPORTED = 20, 41, 125
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3
REMEDIES = {
    1: "the handle is of a GPU that this process does not see: give both containers the same GPU",
    2: "the GPU has no memory left",
    3: "this process was forked after its parent had begun to use the GPU: start it with 'spawn'",
    46: "another process has the GPU to itself: set its compute mode to default (nvidia-smi -c 0)",
    100: "no GPU is visible here: look at CUDA_VISIBLE_DEVICES, and at what the container was given",
    201: "its holder runs in another PID namespace, or is this very process: let the containers share one PID namespace",
    205: "the memory behind the handle cannot be mapped: has its holder been restarted?",
    400: "the memory behind the handle is gone: has its holder been restarted?",
    801: "this GPU cannot share memory between processes",
    803: "the driver and libcuda are of different versions: update the driver, or restart the machine after an update",
}


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance, as this process sees it."""

    ordinal: int
    uuid: str  # "GPU-…" or "MIG-…", as NVIDIA's tools write it
    name: str
    total: int  # bytes

    def is_called(self, other: str) -> bool:
        """Whether a UUID means this one; by its digits, since not everybody tells the two prefixes apart."""
        return self.uuid[4:] == other[4:].lower()


class Driver:
    """libcuda in this process. Raises DeviceError where there is none, or no GPU."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL(LIBRARY)
        except OSError:
            raise DeviceError(
                f"{LIBRARY} is not there: this machine has no NVIDIA driver, or the container was started without GPUs "
                "(docker: --gpus; Kubernetes: a GPU resource or claim)"
            ) from None
        self._contexts: dict[int, _Context] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """One call of the driver API. Raises DeviceError with what can be done about it."""
        try:
            function = getattr(self._lib, name)
        except AttributeError:
            raise DeviceError(f"the driver has no {name}: update it (CUDA 11.4 or later)") from None
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            what = text.value.decode() if text.value else f"error {code}"
            raise DeviceError(f"{name} says {what} ({code}): {REMEDIES.get(code, 'see the log of the driver')}", code)

    def gpus(self) -> list[Gpu]:
        """What this process sees, by its own numbers. Makes no context."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return [self._gpu(ordinal) for ordinal in range(number.value)]

    def _gpu(self, ordinal: int) -> Gpu:
        name, own = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)()
        total = ctypes.c_size_t()
        self.call("cuDeviceGetName", name, len(name), ordinal)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), ordinal)
        self.call("cuDeviceGetUuid_v2", own, ordinal)
        # The older call tells of the GPU, the newer of the instance where the GPU is divided: so they differ there. Where a
        # driver has the older one no more, the prefix is a guess, and nothing is looked up by that.
        plain = (ctypes.c_ubyte * 16)(*own)
        with contextlib.suppress(DeviceError):
            self.call("cuDeviceGetUuid", plain, ordinal)
        prefix = "GPU" if bytes(plain) == bytes(own) else "MIG"
        return Gpu(ordinal, f"{prefix}-{uuid.UUID(bytes=bytes(own))}", name.value.decode(), total.value)

    def attribute(self, attribute: int, ordinal: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
        return value.value

    def context(self, ordinal: int) -> _Context:
        """The GPU's primary context, which torch uses as well. Given back at the end of the process."""
        if ordinal not in self._contexts:
            self._contexts[ordinal] = _Context(self, ordinal)
        return self._contexts[ordinal]

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.context(ordinal).current():
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def read(self, ordinal: int, pointer: int, buffer: Any) -> None:
        """Copies device memory into a writable buffer of host memory and fills it."""
        with self.context(ordinal).current():
            target = (ctypes.c_ubyte * len(buffer)).from_buffer(buffer)
            self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(pointer), ctypes.c_size_t(len(buffer)))


class _Context:
    """A GPU's primary context, held."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._handle = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._handle), ordinal)
        # Finalizers of one kind run in the reverse order of their making: this one after those of what was opened in it.
        weakref.finalize(self, _in_this_process(driver.call), "cuDevicePrimaryCtxRelease_v2", ordinal)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent_v2", self._handle)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _in_this_process(function: Any) -> Any:
    """For finalizers: never in a forked child, which has no part in the driver, and never an error to anybody."""
    owner = os.getpid()

    def run(*arguments: Any) -> None:
        if os.getpid() == owner:
            with contextlib.suppress(DeviceError):
                function(*arguments)

    return run


class Import:
    """An opened handle: memory of another process, in the address space of this one's context, until nobody uses it."""

    def __init__(self, driver: Driver, ordinal: int, window: Window) -> None:
        self.ordinal = ordinal
        self.size = window.size
        self._context = driver.context(ordinal)
        pointer = ctypes.c_uint64()
        with self._context.current():
            opened = _Handle.from_buffer_copy(window.handle)
            driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.pointer = pointer.value

    def close_after(self, driver: Driver) -> None:
        """Arranges for the closing. Called once everything else that is to happen after it has its finalizer."""
        weakref.finalize(self, _in_this_process(_close), driver, self._context, self.pointer)


def _close(driver: Driver, context: _Context, pointer: int) -> None:
    with context.current():
        with contextlib.suppress(DeviceError):
            driver.call("cuCtxSynchronize")  # what still runs may be reading there
        driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


_lock = threading.RLock()
_driver: Optional[Driver] = None
_imports: weakref.WeakValueDictionary[tuple[int, bytes], Import] = weakref.WeakValueDictionary()


def _forget_after_fork() -> None:
    global _lock, _driver
    _lock = threading.RLock()
    _driver = None
    _imports.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def driver() -> Driver:
    """This process's driver. Raises DeviceError where there is none, or no GPU."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = Driver()
        return _driver


Device = Union[str, int, "torch.device"]


def gpu(device: Device) -> Gpu:
    """The GPU that is meant: `cuda`, `cuda:1`, 1, a torch device, or a UUID. Raises DeviceError."""
    gpus = driver().gpus()
    text = str(device)
    if text.startswith(("GPU-", "MIG-")):
        found = [one for one in gpus if one.is_called(text)]
    else:
        number = text.rpartition(":")[2]
        ordinal = int(number) if number.isdecimal() else _current()
        found = [one for one in gpus if one.ordinal == ordinal and text.rpartition(":")[0] in ("", "cuda")]
    if not found:
        seen = ", ".join(f"cuda:{one.ordinal} ({one.uuid})" for one in gpus)
        raise DeviceError(f"there is no GPU {text!r} here: this process sees {seen}")
    return found[0]


def _current() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


# The seam to torch. A test that has no GPU puts a view of ordinary memory in the place of these two, and of nothing else.


def torch_device(ordinal: int) -> torch.device:
    import torch

    return torch.device("cuda", ordinal)


def bytes_at(ordinal: int, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
    """Device memory as a tensor of bytes with a storage of its own, which keeps `owner` alive. Nothing is copied."""
    import torch

    with torch.cuda.device(ordinal):
        return torch.as_tensor(_Bytes(pointer, nbytes, owner), device=torch_device(ordinal))


class _Bytes:
    """What torch needs to know of memory that is not its own (the CUDA array interface, version 3)."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


class Copy:
    """The segments of one generation in a GPU's memory, opened. Stands where `mapping.Segments` stands for host memory."""

    def __init__(self, where: Gpu, windows: Sequence[Window], imports: Sequence[Import]) -> None:
        self.gpu = where
        self._windows = windows
        self.imports = imports

    @property
    def device(self) -> torch.device:
        return torch_device(self.gpu.ordinal)

    def flat(self, row: Tensor) -> torch.Tensor:
        import torch

        if not row.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return bytes_at(self.gpu.ordinal, self.address(row), row.nbytes, self.imports[row.segment])

    def view(self, row: Tensor, derived: bool = False) -> torch.Tensor:
        """The tensor that a manifest's row describes. Raises TypeError for an element type that this torch has not."""
        import torch

        from engine_shim import mapping

        dtype, shape = mapping.layout(row)
        if not row.nbytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        flat = self.flat(row).view(dtype)
        return flat.view(shape) if row.strides is None else flat.as_strided(shape, row.strides)

    def address(self, row: Tensor) -> int:
        return self.imports[row.segment].pointer + self._windows[row.segment].offset + row.offset

    def read(self, row: Tensor, offset: int, buffer: Any) -> None:
        """Fills a buffer with the bytes of a tensor from `offset` on, as they are on the device now."""
        driver().read(self.gpu.ordinal, self.address(row) + offset, buffer)


def copy_on(contents: Manifest, where: Gpu) -> Optional[DeviceCopy]:
    """What the manifest says of this GPU."""
    return next((copy for copy in contents.devices if where.is_called(copy.gpu)), None)


def check_served(paths: PoolPaths, contents: Manifest, copy: DeviceCopy, watch: holder.Watch) -> None:
    """Raises NotFound unless the holder lives and still has this copy on its page. To be asked after a record is taken: a
    holder first takes the copy off its page, and then looks for records."""
    if not watch.alive:
        raise NotFound(f"the holder of the copy on {copy.gpu} is gone: it is made again once the sidecar runs")
    page = holder.read(paths, copy.holder, contents.generation, contents.segments)
    if copy not in page.copies:
        raise NotFound(f"the copy on {copy.gpu} was withdrawn just now")


def import_copy(copy: DeviceCopy, where: Gpu, lease: Any) -> Copy:
    """Opens every handle of a copy, each once in this process, and keeps `lease` as long as one is open.

    Raises DeviceError with nothing left open.
    """
    found = []
    with _lock:
        for window in copy.segments:
            key = (where.ordinal, window.handle)
            one = _imports.get(key)
            if one is None:
                one = _imports[key] = Import(driver(), where.ordinal, window)
                lease.hold(one)
                one.close_after(driver())
            found.append(one)
    return Copy(where, copy.segments, found)


# What `ballast doctor` asks


def findings(paths: Optional[PoolPaths] = None) -> list[tuple[str, str, str, str]]:
    """(check, verdict, text, remedy) for everything that a device copy needs here. Makes no context."""
    found: list[tuple[str, str, str, str]] = []

    def say(check: str, verdict: str, text: str, remedy: str = "") -> None:
        found.append((f"gpu: {check}", verdict, text, remedy))

    paths = paths or PoolPaths.from_environment()
    try:
        gpus = driver().gpus()
    except DeviceError as error:
        text, _, remedy = str(error).partition(": ")
        say("driver", "note", f"{text}; weights are served from host memory", remedy)
        return found
    say("driver", "ok", f"{LIBRARY} works and sees {len(gpus)} GPUs: {', '.join(one.uuid for one in gpus)}")
    for one in gpus:
        _ask(one, say)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", ""):
        say(
            "allocator", "note", "torch's expandable segments are on: mapped weights do not mind, but torch cannot share "
            "tensors of its own with other processes", "unset PYTORCH_CUDA_ALLOC_CONF if something else needs that",
        )  # fmt: skip
    else:
        say("allocator", "ok", "torch's allocator is as it comes")
    _ask_holders(paths, gpus, say)
    return found


def _ask(one: Gpu, say: Any) -> None:
    label = f"cuda:{one.ordinal}"
    try:
        shares = driver().attribute(_UNIFIED_ADDRESSING, one.ordinal)
        with contextlib.suppress(DeviceError):  # which NVIDIA names as the test for sharing; older drivers do not know it
            shares = shares and driver().attribute(_IPC_EVENT_SUPPORTED, one.ordinal)
        mode = driver().attribute(_COMPUTE_MODE, one.ordinal)
    except DeviceError as error:
        text, _, remedy = str(error).partition(": ")
        say(label, "fault", text, remedy)
        return
    if not shares:
        say(label, "fault", f"{one.name} cannot share memory between processes", "serve it from host memory")
    elif mode in (_PROHIBITED, _EXCLUSIVE_PROCESS):
        say(
            label, "fault", f"{one.name} lets in one process only, and a holder and an engine are two",
            "set its compute mode to default: nvidia-smi -c 0",
        )  # fmt: skip
    elif one.uuid.startswith("MIG-"):
        say(label, "ok", f"{one.name} is a MIG instance: its copy serves engines on this very instance only")
    else:
        say(label, "ok", f"{one.name} can share memory between processes")


def _ask_holders(paths: PoolPaths, gpus: Sequence[Gpu], say: Any) -> None:
    """Whether what the pool's holders keep can be opened from here: by their PIDs' visibility, and by what they name."""
    holders = list(holder.alive(paths))
    if not holders:
        say("holder", "note", f"pool {paths.pool!r} has no holder of device memory", "start the sidecar with --device")
        return
    for one in holders:
        if not _sees_process(one.pid):
            say(
                "PID namespace", "fault", f"the holder's process {one.pid} is not to be seen from here: the driver refuses its "
                "handles (201)", "let the containers share one PID namespace (compose: pid: service:…; Kubernetes: "
                "shareProcessNamespace: true)",
            )  # fmt: skip
        else:
            say("PID namespace", "ok", "the holder's process is to be seen from here")
        shared = [name for name in one.gpus if any(here.is_called(name) for here in gpus)]
        if shared:
            say("same GPU", "ok", f"the holder serves {', '.join(shared)}, which this process sees")
        else:
            say(
                "same GPU", "fault", f"the holder serves {', '.join(one.gpus)} and this process sees other GPUs",
                "give both containers the same GPU (one claim for both; a device plugin gives a GPU to one container only)",
            )  # fmt: skip
    if len(gpus) > 1:
        value = ctypes.c_int()
        driver().call("cuDeviceCanAccessPeer", ctypes.byref(value), gpus[0].ordinal, gpus[1].ordinal)
        text = "can" if value.value else "cannot"
        say("peer access", "ok", f"cuda:0 {text} read cuda:1's memory; a copy is only ever opened on its own GPU")


def _sees_process(pid: int) -> bool:
    """Whether a process with this number, and with Ballast on its command line, is there."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"sidecar" in file.read() or b"ballast" in file.read()
    except OSError:
        return False
