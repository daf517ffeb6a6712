"""GPU memory as its holder needs it: allocate, fill from host memory, export, free. By way of `cuda-bindings`.

Only the holder's process imports this. All sizes in bytes; every failure is a DeviceError with what can be done about it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from engine_shim import device
from engine_shim.device import REMEDIES
from engine_shim.handoff import maps
from engine_shim.handoff.errors import DeviceError
from engine_shim.handoff.manifest import HANDLE_BYTES

STAGED, REGISTERED = "staged", "registered"
WAYS = (STAGED, REGISTERED)  # of uploading; which is faster depends on the machine: bench/gpu_check.py measures both
_BUFFER = 16 << 20  # of pinned memory for each thread of a staged upload
_THREADS = max(2, min(8, os.cpu_count() or 1))  # one fills a buffer at some 10 GB/s, and the bus takes 50
_PIECE = 1 << 30  # of one copy from registered memory: so that ending need not wait for a whole segment
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY: segments are mapped for reading, and must not be pinned for writing


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError(
            "device memory needs the package cuda-bindings: pip install 'ballast-sidecar[cuda]', or serve without --device"
        ) from None
    return driver


class Gpu:
    """One GPU, or MIG instance, whose memory this process holds. Its context is made when it is first needed."""

    def __init__(self, driver: Any, seen: device.Gpu) -> None:
        self._driver = driver
        self.uuid = seen.uuid
        self._device = self._call("cuDeviceGet", seen.ordinal)
        self._context: Any = None

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            answer = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # of the bindings, where the driver is too old to have the call, or is none
            raise DeviceError(f"{name} cannot be called ({error}): install or update the NVIDIA driver") from None
        code = int(answer[0])
        if code:
            raise DeviceError(f"{name} says {answer[0].name} ({code}): {REMEDIES.get(code, 'see the driver log')}", code)
        return answer[1] if len(answer) > 1 else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the GPU's primary context this thread's."""
        if self._context is None:
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def free(self) -> int:
        """Bytes that nobody has."""
        with self.current():
            return int(self._free_and_total()[0])

    def _free_and_total(self) -> tuple[int, int]:
        code, free, total = self._driver.cuMemGetInfo()
        if int(code):
            raise DeviceError(f"cuMemGetInfo says {code.name} ({int(code)}): {REMEDIES.get(int(code), '')}", int(code))
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """A plain allocation of its own, which is what can be exported. Returns its address."""
        with self.current():
            return int(self._call("cuMemAlloc", size))

    def release(self, pointer: int) -> None:
        with self.current():
            self._call("cuMemFree", pointer)

    def export(self, pointer: int) -> tuple[bytes, int, int]:
        """(handle, size of what it opens, where in it `pointer` is)."""
        with self.current():
            code, base, size = self._driver.cuMemGetAddressRange(pointer)
            if int(code):
                raise DeviceError(f"cuMemGetAddressRange says {code.name} ({int(code)})", int(code))
            handle = self._call("cuIpcGetMemHandle", base)
            # By its address: the bindings hide the handle's bytes since their version 13.4.
            return ctypes.string_at(handle.getPtr(), HANDLE_BYTES), int(size), pointer - int(base)

    def upload(self, pointer: int, fd: int, size: int, way: str, stop: Callable[[], bool]) -> None:
        """Fills `size` bytes at `pointer` with those of a segment. Returns early once `stop` says so."""
        if way == REGISTERED:
            try:
                self._upload_registered(pointer, fd, size, stop)
                return
            except DeviceError as error:
                if error.code not in (1, 2, 304, 800, 801):
                    raise  # otherwise: this machine cannot pin shared pages; in pieces it can
        self._upload_staged(pointer, fd, size, stop)

    def _upload_registered(self, pointer: int, fd: int, size: int, stop: Callable[[], bool]) -> None:
        buffer = maps.shared(fd, size)
        address = ctypes.addressof(buffer)
        with self.current():
            self._call("cuMemHostRegister", address, size, _READ_ONLY)
            stream = None
            try:
                stream = self._call("cuStreamCreate", 0)
                for offset in range(0, size, _PIECE):
                    if stop():
                        break
                    length = min(_PIECE, size - offset)
                    self._call("cuMemcpyHtoDAsync", pointer + offset, address + offset, length, stream)
                    self._call("cuStreamSynchronize", stream)
            finally:
                if stream is not None:
                    self._call("cuStreamDestroy", stream)
                self._call("cuMemHostUnregister", address)

    def _upload_staged(self, pointer: int, fd: int, size: int, stop: Callable[[], bool]) -> None:
        """Several threads, each with a pinned buffer: while one copies to the device the others fill theirs."""
        pieces = itertools.count()
        failed = threading.Event()

        def work() -> None:
            with self.current():
                host = self._call("cuMemHostAlloc", _BUFFER, 0)
                stream = None
                try:
                    stream = self._call("cuStreamCreate", 0)
                    view = memoryview((ctypes.c_ubyte * _BUFFER).from_address(int(host))).cast("B")
                    while not failed.is_set() and not stop():
                        offset = next(pieces) * _BUFFER
                        if offset >= size:
                            return
                        length = min(_BUFFER, size - offset)
                        done = 0
                        while done < length:
                            count = os.preadv(fd, [view[done:length]], offset + done)
                            if not count:
                                raise DeviceError("a segment ended early while it was copied to a GPU")
                            done += count
                        self._call("cuMemcpyHtoDAsync", pointer + offset, int(host), length, stream)
                        self._call("cuStreamSynchronize", stream)
                except BaseException:
                    failed.set()
                    raise
                finally:
                    if stream is not None:
                        self._call("cuStreamDestroy", stream)
                    self._call("cuMemFreeHost", host)

        count = min(_THREADS, -(-size // _BUFFER))
        with ThreadPoolExecutor(count, thread_name_prefix="ballast-upload") as executor:
            for future in [executor.submit(work) for _ in range(count)]:
                future.result()

    def close(self) -> None:
        """Gives the context back; everything in it must have been released."""
        if self._context is not None:
            self._call("cuDevicePrimaryCtxRelease", self._device)
            self._context = None


def gpus(spec: str) -> list[Gpu]:
    """The GPUs that `--device` names. Raises DeviceError without a driver, or where one is not there."""
    driver = _bindings()
    seen = device.driver().gpus()  # cuInit as well, with a better sentence than the bindings have
    (code,) = driver.cuInit(0)
    if int(code):
        raise DeviceError(f"cuInit says {code.name} ({int(code)}): {REMEDIES.get(int(code), 'see the driver log')}", int(code))
    chosen: list[device.Gpu] = []
    for part in parse(spec):
        found = [g for g in seen if part == "all" or part == str(g.ordinal) or (not part.isalnum() and g.is_called(part))]
        if not found:
            there = ", ".join(f"cuda:{g.ordinal} ({g.uuid})" for g in seen)
            raise DeviceError(f"--device {spec}: there is no {part} here, but {there}")
        chosen += [one for one in found if one not in chosen]
    return [Gpu(driver, one) for one in chosen]


def parse(spec: str) -> list[str]:
    """`cuda:all`, `cuda:0,1`, `GPU-<uuid>,MIG-<uuid>` as a list of parts: "all", numbers, UUIDs. Raises ValueError."""
    parts = []
    for part in map(str.strip, spec.removeprefix("cuda:").split(",")):
        if part == "all" or part.isdecimal():
            parts.append(part)
            continue
        try:
            if part[:4].upper() not in ("GPU-", "MIG-"):
                raise ValueError
            parts.append(part[:4].upper() + str(uuid.UUID(part[4:])))
        except ValueError:
            raise ValueError(
                f"{spec!r} is no device: write cuda:all, cuda:0,1, or UUIDs as `nvidia-smi -L` prints them (GPU-…, MIG-…)"
            ) from None
    return parts
