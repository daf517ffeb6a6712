"""What engines do in the device tests, each in a process of its own: see `tests.never_wrong.forked`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import time
from typing import Any

import torch

import engine_shim
from engine_shim import device, ladder, onboard
from engine_shim.handoff import attachment
from engine_shim.handoff.names import PoolPaths
from tests.never_wrong.engine_side import Plain, fingerprints
from tests.never_wrong.forked import KEPT


def prepare(library: str) -> None:
    """The emulated driver, and host memory where torch would look at a GPU's."""
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # by its soname, whoever asks for libcuda.so.1 gets it from now on

    def bytes_at(ordinal: int, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        buffer = (ctypes.c_ubyte * nbytes).from_address(pointer)
        buffer.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)

    device.bytes_at = bytes_at
    device.torch_device = lambda ordinal: torch.device("cpu")


def open_on(where: str, model: str, keep: str = "m") -> dict[str, str]:
    """Opens a model on a GPU, keeps it, and says what it got."""
    KEPT[keep] = engine_shim.open(model, device=where)
    return fingerprints(dict(KEPT[keep].tensors))


def kept(keep: str = "m") -> dict[str, str]:
    return fingerprints(dict(KEPT[keep].tensors))


def keep_one_tensor(keep: str = "m") -> None:
    """Lets go of all but one tensor."""
    tensors = KEPT.pop(keep).tensors
    KEPT["tensor"] = next(tensor for tensor in tensors.values() if tensor.numel())
    del tensors
    gc.collect()


def forget(keep: str = "m") -> None:
    del KEPT[keep]
    gc.collect()


def addresses(keep: str = "m") -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in KEPT[keep].tensors.items() if tensor.numel()}


def storages(keep: str = "m") -> int:
    """How many different storages the tensors have."""
    return len({tensor.untyped_storage().data_ptr() for tensor in KEPT[keep].tensors.values() if tensor.numel()})


def leave() -> None:
    """Ends as a program ends: finalizers, then the C library's."""
    atexit._run_exitfuncs()
    ctypes.CDLL(None).exit(0)


def gpus() -> list[tuple[int, str]]:
    return [(one.ordinal, one.uuid) for one in device.driver().gpus()]


def findings(pool: str) -> list[tuple[str, str, str, str]]:
    return device.findings(PoolPaths(pool))


def attach(where: str, model: str, tensors: dict[str, tuple[list[int], str]]) -> dict[str, str]:
    """Binds a model into a module of these parameters, and keeps the module."""
    empty = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (shape, dtype) in tensors.items()}
    KEPT["module"] = engine_shim.attach(Plain(empty), model, device=where)
    return fingerprints(KEPT["module"].state_dict())


def module() -> dict[str, str]:
    return fingerprints(KEPT["module"].state_dict())


class Tied(torch.nn.Module):
    """Two names for one parameter, a view of another, and a large one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.one = torch.nn.Parameter(torch.rand(64, 64, generator=generator), requires_grad=False)
        self.other = self.one
        self.large = torch.nn.Parameter(torch.rand(1024, 256, generator=generator), requires_grad=False)
        self.register_buffer("part", self.large.data[10:20])
        self.register_buffer("scale", torch.rand(4, generator=generator))


def publish(model: str, gpu: str | None = None, seed: int = 0, key: str = "") -> dict[str, str]:
    """Publishes the state of a module as if it had been on a GPU."""
    if gpu is not None:
        onboard.home = lambda captured: {"gpu": gpu}
    made = Tied(seed)
    engine_shim.publish(made, model, wait=30, key={"key": key})
    return fingerprints(made.state_dict())


def attach_tied(where: str, model: str, key: str = "") -> dict[str, str]:
    KEPT["module"] = engine_shim.attach(Tied(seed=99), model, device=where, key={"key": key})
    return fingerprints(KEPT["module"].state_dict())


def tied() -> dict[str, Any]:
    """How a Tied module hangs together, and how much of it is shared."""
    made = KEPT["module"]
    return {
        "one object": made.one is made.other,
        "alias": made.part.untyped_storage().data_ptr() == made.large.untyped_storage().data_ptr(),
        "shared": sorted({slot.label for slot in onboard.shared_slots(made)}),
    }


def make_private() -> int:
    return onboard.make_private(KEPT["module"])


def refuse_writes() -> str | None:
    try:
        onboard.refuse_writes(KEPT["module"], "a weight update")
    except Exception as error:
        return str(error)
    return None


def scribble() -> None:
    with torch.no_grad():
        for parameter in KEPT["module"].parameters():
            parameter.zero_()


def external(keys: list[str], where: str, wait: float = 10.0) -> int:
    return onboard.external_weight_memory(keys, device.gpu(where), paths=PoolPaths.from_environment(), wait=wait)


def state_key(model: str) -> str:
    found = ladder.pool().catalog().of_model(model)
    return next(generation.key for generation in found if generation.kind == "engine")


def on_loss(path: str) -> None:
    """From now on a loss is written to a file."""

    def write(line: str) -> None:
        with open(path, "a") as file:
            file.write(line + "\n")

    onboard.on_loss(write)


def note_closing(path: str) -> None:
    """From now on, whenever a handle is closed, a file gets a line that says whether a lease of the memory is still held."""
    close, paths = device._close, PoolPaths.from_environment()

    def noting(*arguments: Any) -> None:
        leased = any(record.residency.startswith("cuda:") for record in attachment.alive(paths))
        with open(path, "a") as file:
            file.write("leased\n" if leased else "not leased\n")
        close(*arguments)

    device._close = noting


def settings(**changes: str) -> None:
    os.environ.update(changes)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def mapped_file(address: int) -> str:
    """What is mapped at an address."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return line.split()[-1]
    return ""


def drop_tensor() -> None:
    del KEPT["tensor"]
    gc.collect()


def parameters() -> list[int]:
    return [parameter.data_ptr() for parameter in KEPT["module"].parameters()]


def tied_labels() -> list[str]:
    return sorted({slot.label for slot in onboard.shared_slots(KEPT["module"])})


def allocate(where: str, size: int) -> None:
    """Memory of this process's own on a GPU."""
    one = device.gpu(where)
    pointer = ctypes.c_uint64()
    with device.driver().context(one.ordinal).current():
        device.driver().call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))


def memory(where: str) -> tuple[int, int]:
    return device.driver().memory(device.gpu(where).ordinal)


def collected() -> None:
    gc.collect()


def attempt(where: str, model: str) -> tuple[str, str] | None:
    try:
        open_on(where, model)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# Single calls of the driver: what they answer, and what it means


def _current(where: str) -> tuple[Any, Any]:
    one = device.gpu(where)
    return device.driver(), device.driver().context(one.ordinal).current()


def raw_export(where: str) -> bytes:
    allocate(where, 1 << 16)
    driver, current = _current(where)
    pointer, handle = ctypes.c_uint64(), device._Handle()
    with current:
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(1 << 16))
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    return bytes(handle)


def raw_open(where: str, handle: bytes) -> int:
    """The address, or the driver's error."""
    driver, current = _current(where)
    pointer = ctypes.c_uint64()
    with current:
        opened = device._Handle.from_buffer_copy(handle)
        code: int = driver._lib.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), opened, 1)
    return code or pointer.value


def raw_close(pointer: int) -> int:
    driver, current = _current("cuda:0")
    with current:
        code: int = driver._lib.cuIpcCloseMemHandle(ctypes.c_uint64(pointer))
    return code
