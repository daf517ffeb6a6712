"""A generation in host memory as torch tensors, nothing copied.

Each segment is mapped once per opening, private and writable: what an engine writes stays its own (the kernel copies the
page), and the shared bytes cannot be changed. A tensor is one view with a storage object of its own, so that saving,
tying and deduplicating by storage work as ever. Segments are mapped, and views made, when first asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Protocol, Sequence

import torch

from engine_shim.handoff import maps
from engine_shim.handoff.manifest import Manifest, Tensor, open_segment
from engine_shim.handoff.manifest import Shard as ShardRow

_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
# torch counts these in whole bytes, the checkpoint in elements: how many elements a byte holds, in the last dimension.
_PACKED = {"F4": 2}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _TORCH.items() if hasattr(torch, attribute)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def map_segment(path: Path, size: int, inode: Optional[int] = None) -> maps.Buffer:
    """The first `size` bytes of a segment, private and writable. Raises NotFound, Foreign or Damaged."""
    fd = open_segment(path, size, inode)
    try:
        return maps.private(fd, size)
    finally:
        os.close(fd)


def layout(row: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """A row's type and shape as torch has them. Raises TypeError for an element type that this torch has not."""
    dtype = DTYPES.get(row.dtype)
    if dtype is None:
        raise TypeError(f"{row.name!r} is of type {row.dtype}, which torch {torch.__version__} does not have")
    shape = row.shape
    if row.dtype in _PACKED:
        if not shape or shape[-1] % _PACKED[row.dtype]:
            raise TypeError(f"{row.name!r} of {row.dtype} and shape {shape} has a last dimension that torch cannot pack")
        shape = (*shape[:-1], shape[-1] // _PACKED[row.dtype])
    return dtype, shape


def view(buffer: maps.Buffer, row: Tensor, derived: bool = False) -> torch.Tensor:
    """The tensor that `row` describes in a mapped segment. Raises TypeError for an element type that this torch has not.

    With `derived` it is a view of a flat tensor, as safetensors makes them, which some operations can tell (`detach_`,
    `_version`); otherwise the flat tensor itself in its shape, which is made in half the time.
    """
    dtype, shape = layout(row)
    if not row.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if row.dtype == "BOOL":  # by way of bytes, since a byte that is neither 0 nor 1 must come through as it is
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=row.nbytes, offset=row.offset).view(torch.bool)
    else:
        flat = torch.frombuffer(buffer, dtype=dtype, count=row.nbytes // dtype.itemsize, offset=row.offset)
    if row.strides is not None:
        return flat.as_strided_(shape, row.strides)
    # A scalar is always derived: torch remembers the size of what loses its only dimension in place.
    return flat.view(shape) if derived or not shape else flat.resize_(shape)


class Segments:
    """The segments of one opened generation, mapped when first needed. `on_map` is told of every new map."""

    def __init__(
        self,
        path_of: Callable[[int], Path],
        sizes: Sequence[int],
        on_map: Callable[[maps.Buffer], Any] = lambda _: None,
        inodes: Sequence[int] = (),
    ) -> None:
        self._path_of = path_of
        self._sizes = sizes
        self._inodes = inodes
        self._on_map = on_map
        self._maps: dict[int, maps.Buffer] = {}

    def __getitem__(self, index: int) -> maps.Buffer:
        found = self._maps.get(index)
        if found is None:
            inode = self._inodes[index] if self._inodes else None
            found = self._maps[index] = map_segment(self._path_of(index), self._sizes[index], inode)
            self._on_map(found)
        return found

    def flat(self, row: Tensor) -> torch.Tensor:
        """A row's bytes."""
        if not row.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self[row.segment], dtype=torch.uint8, count=row.nbytes, offset=row.offset)

    def view(self, row: Tensor, derived: bool = False) -> torch.Tensor:
        return view(self[row.segment], row, derived)


class Residency(Protocol):
    """Where a generation's tensors come from: host memory, a GPU's, or the one copied to the other."""

    def flat(self, row: Tensor) -> torch.Tensor: ...

    def view(self, row: Tensor, derived: bool = False) -> torch.Tensor: ...


class Uploaded:
    """Segments in host memory whose tensors are copied to a device when asked for: private there, through pinned buffers."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self.host = segments
        self.device = device

    def flat(self, row: Tensor) -> torch.Tensor:
        return upload(self.host.flat(row), self.device)

    def view(self, row: Tensor, derived: bool = False) -> torch.Tensor:
        dtype, shape = layout(row)
        if not row.nbytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        flat = self.flat(row).view(dtype)
        return flat.view(shape) if row.strides is None else flat.as_strided(shape, row.strides)


_STAGE = 32 << 20  # bytes of each of two pinned buffers: long enough for the bus's full rate


def upload(
    flat: torch.Tensor, device: torch.device, into: Optional[torch.UntypedStorage] = None
) -> torch.Tensor:
    """A copy of host bytes on a device; in memory of its own, or in the storage `into`, which has that size. While one pinned
    buffer is on its way the other is filled."""
    target = torch.empty(flat.numel() if into is None else 0, dtype=torch.uint8, device=device)
    if into is not None:
        target.set_(into)
    pinned = device.type == "cuda"
    size = min(flat.numel(), _STAGE)
    buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    sent: list[Optional[torch.cuda.Event]] = [None, None]
    for turn, start in enumerate(range(0, flat.numel(), _STAGE)):
        piece = flat[start : start + _STAGE]
        buffer, before = buffers[turn % 2][: piece.numel()], sent[turn % 2]
        if before is not None:
            before.synchronize()
        buffer.copy_(piece)
        target[start : start + _STAGE].copy_(buffer, non_blocking=True)
        if pinned:
            event = sent[turn % 2] = new_event()
            event.record(torch.cuda.current_stream(device))
    for last in sent:
        if last is not None:
            last.synchronize()
    return target


class Shard:
    """One checkpoint file of an attached generation, in memory. Has a private map of its own."""

    def __init__(self, manifest: Manifest, shard: ShardRow, segments: Segments) -> None:
        self.name = shard.name
        self.metadata = shard.metadata
        self.tensors: Mapping[str, Tensor] = {row.name: row for row in manifest.rows(shard)}
        self._buffer = segments[shard.segment]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, zero-copy. Raises KeyError, or TypeError for an element type that this torch has not."""
        row = self.tensors[name]
        return view(self._buffer, row, derived=True)


class Tensors(Mapping[str, torch.Tensor]):
    """All tensors of a checkpoint generation by name; a view is made when first asked for and then kept.

    A tensor of a file in a subfolder (`unet/…`, `2_Dense/…`) is called `<subfolder>/<name>`: such files repeat names.
    """

    def __init__(self, manifest: Manifest, segments: Residency) -> None:
        self._segments = segments
        self._rows: dict[str, Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        for shard in manifest.shards:
            folder = shard.name.rpartition("/")[0]
            prefix = f"{folder}/" if folder else ""
            for row in manifest.rows(shard):
                self._rows[prefix + row.name] = row

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._views.get(name)
        if found is None:
            row = self._rows[name]
            # Kept for good, and so never made in the mode of whoever asks first: an inference tensor cannot be trained or
            # written to outside of it. To enter another mode costs as much as a view.
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    view = self._segments.view(row)
            else:
                view = self._segments.view(row)
            found = self._views.setdefault(name, view)  # another thread may have been quicker
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, name: str) -> Optional[Tensor]:
        """What the manifest says of a tensor, without making it."""
        return self._rows.get(name)
