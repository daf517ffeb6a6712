"""The manifest: a generation's table of tensors, as JSON behind a small header with a digest.

After `decode` nothing needs to be checked again: every number has been bounds-checked, every tensor lies inside its segment
and has exactly the bytes that its type and shape call for. `docs/protocol.md` describes each field.
"""

from __future__ import annotations

import base64
import functools
import gc
import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from engine_shim.handoff import posix
from engine_shim.handoff.catalog import KINDS
from engine_shim.handoff.dtypes import BITS
from engine_shim.handoff.errors import Damaged
from engine_shim.handoff.identity import FileIdentity, Stat
from engine_shim.handoff.identity import digest as digest_of
from engine_shim.handoff.names import check_model, temporary

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

MAGIC = b"BALLASTM"
FORMAT = 1  # a reader refuses any other; fields that it does not know it ignores
ALIGNMENT = 256  # of every tensor written here: what GPU kernels and cuMemAlloc assume
LEAST_ALIGNMENT = 64  # of every tensor accepted: a cache line, and what vectorised CPU kernels want
SEGMENT_ALIGNMENT = 2 << 20  # a huge page

_HEADER = struct.Struct("<8sIIQ32s")  # magic, format, reserved, length of JSON, digest of JSON
LIMIT = 2 << 30  # bytes of JSON: ten million tensors
_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
_LARGE = 1 << 62
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE of cuda.h
_GPU = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_HOLDER = re.compile(r"[0-9a-f]{16}\Z")


class Tensor(NamedTuple):
    """One row of the table. Sizes and positions in bytes; `strides` in elements, None for dense row-major.

    `start` is its position in its file's data area (0 where there is no file).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: Optional[tuple[int, ...]]
    segment: int
    offset: int
    nbytes: int
    digest: Optional[str]
    start: int


@dataclass(frozen=True)
class Shard:
    """One checkpoint file: rows `first` to `first + count` of the table, in the order of its header; all in one segment."""

    name: str
    identity: FileIdentity
    metadata: Optional[dict[str, str]]
    first: int
    count: int
    segment: int


class Window(NamedTuple):
    """One segment in a GPU's memory: the handle of an allocation, its size, and where in it the segment begins."""

    handle: bytes
    size: int
    offset: int


@dataclass(frozen=True)
class DeviceCopy:
    """A generation's bytes in the memory of one GPU, as long as its holder lives: `segments` as in the manifest."""

    gpu: str  # UUID as NVIDIA's tools write it
    holder: str  # the process that owns the memory: the id of its record, another one for each of its lives
    segments: tuple[Window, ...]


@dataclass(frozen=True)
class Manifest:
    """One generation. `complete` is False while it is being loaded: then digests and samples are not there yet."""

    generation: int
    model: str
    kind: str
    complete: bool
    created: float
    source: str
    segments: tuple[int, ...]
    tensors: Sequence[Tensor]
    shards: tuple[Shard, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)  # companion file → digest of its bytes
    state: Mapping[str, Any] = field(default_factory=dict)  # of an engine's module tree; see engine_shim.modules
    engine: Mapping[str, Any] = field(default_factory=dict)  # what an engine's state depends on
    inodes: tuple[int, ...] = ()  # of the segments, once complete: a segment under another's name is not that one
    devices: tuple[DeviceCopy, ...] = ()
    over: Mapping[str, Any] = field(default_factory=dict)  # of a rollback: what the files hold; see sidecar.history

    @property
    def content(self) -> str:
        """A digest of what the checkpoint's files hold, wherever they lie; "" where there are none, or not yet."""
        if not self.complete or not self.shards:
            return ""
        parts = []  # of every tensor's digest: samples are alike where only other bytes differ
        for shard in self.shards:
            parts.append(f"{shard.name}\n{shard.identity.header}\n".encode())
            parts.extend((row.digest or "").encode() for row in self.rows(shard))
        return digest_of(*parts)

    def file(self, shard: Shard) -> Path:
        """Where the sidecar read a checkpoint file. What it serves may be a directory, one file of it, or its index."""
        source = Path(self.source)
        return (source.parent if source.suffix in (".safetensors", ".json") else source) / shard.name

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, shard: Shard) -> Sequence[Tensor]:
        return self.tensors[shard.first : shard.first + shard.count]


def align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _dumps(document: Any) -> bytes:
    return orjson.dumps(document) if orjson else json.dumps(document, separators=(",", ":")).encode()


def _loads(data: bytes) -> Any:
    # orjson refuses deep nesting, huge integers and NaN by itself; json is slower and more lenient, and what it lets through
    # the checks below stop.
    return orjson.loads(data) if orjson else json.loads(data)


def encode(manifest: Manifest) -> bytes:
    """Header and JSON, ready to be written."""
    document = {
        "generation": manifest.generation,
        "model": manifest.model,
        "kind": manifest.kind,
        "complete": manifest.complete,
        "created": manifest.created,
        "source": manifest.source,
        "segments": manifest.segments,
        "inodes": manifest.inodes,
        "config": manifest.config,
        "state": manifest.state,
        "engine": manifest.engine,
        "shards": [
            {
                "name": shard.name,
                "size": shard.identity.size,
                "header": shard.identity.header,
                "sample": shard.identity.sample,
                "stat": stat_row(shard.identity.stat),
                "metadata": shard.metadata,
                "first": shard.first,
                "count": shard.count,
                "segment": shard.segment,
            }
            for shard in manifest.shards
        ],
        "tensors": [tuple(tensor) for tensor in manifest.tensors],
    }
    if manifest.devices:  # otherwise the very bytes that a Ballast without device copies writes
        document["devices"] = [device_row(copy) for copy in manifest.devices]
    if manifest.over:
        document["over"] = manifest.over
    body = _dumps(document)
    return _HEADER.pack(MAGIC, FORMAT, 0, len(body), _digest(body)) + body


def decode(data: bytes, path: Path) -> Manifest:
    """A manifest from its bytes. Raises Damaged with what is wrong."""
    remedy = "run 'ballast verify', and restart the sidecar to have it loaded again"
    if len(data) < _HEADER.size:
        raise Damaged(f"{path} is cut short: {remedy}")
    magic, version, _, length, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Damaged(f"{path} is not a manifest of Ballast: {remedy}")
    if version != FORMAT:
        raise Damaged(
            f"{path} has format {version} and this Ballast reads format {FORMAT}: use the same version for sidecar and engine"
        )
    body = data[_HEADER.size :]
    if length != len(body) or digest != _digest(body):
        raise Damaged(f"{path} fails its checksum: {remedy}")
    collecting = gc.isenabled()
    gc.disable()  # a million rows hold no cycles; looking for some among them takes longer than making them
    try:
        return _parse(_loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{path} does not make sense ({type(error).__name__}: {error}): {remedy}") from None
    finally:
        if collecting:
            gc.enable()


def read(path: Path) -> Manifest:
    """The manifest in shared memory at `path`. Raises NotFound, Foreign or Damaged."""
    return decode(posix.read_all(path, LIMIT + _HEADER.size), path)


def write(manifest: Manifest, path: Path, group: Optional[int] = None) -> None:
    """Puts a manifest in place, or a new one in place of the old, in one step; read-only from then on. Raises NoRoom."""
    data = encode(manifest)
    new = temporary(path)
    fd = posix.create(new)
    try:
        posix.write_exactly(fd, data, 0, new)
        posix.share(fd, posix.PUBLISHED, group)
        posix.rename(new, path)
    except BaseException:
        posix.remove(new)
        raise
    finally:
        os.close(fd)


def device_row(copy: DeviceCopy) -> dict[str, Any]:
    """A device copy as JSON has it."""
    windows = [[base64.b64encode(w.handle).decode(), w.size, w.offset] for w in copy.segments]
    return {"gpu": copy.gpu, "holder": copy.holder, "segments": windows}


def parse_device(row: Any, segments: Sequence[int]) -> DeviceCopy:
    """Checks every number. Raises ValueError and its like."""
    _require(isinstance(row["gpu"], str) and _GPU.match(row["gpu"]), "a GPU's UUID")
    _require(isinstance(row["holder"], str) and _HOLDER.match(row["holder"]), "a holder's id")
    _require(isinstance(row["segments"], list) and len(row["segments"]) == len(segments), "a GPU's segments")
    windows = []
    for (text, size, offset), needed in zip(row["segments"], segments):
        handle = base64.b64decode(text, validate=True)
        _require(len(handle) == HANDLE_BYTES, "a GPU's handle")
        _require(_whole(size) and _whole(offset) and offset + needed <= size, "the place of a segment on a GPU")
        windows.append(Window(handle, size, offset))
    return DeviceCopy(row["gpu"], row["holder"], tuple(windows))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()


def stat_row(stat: Optional[Stat]) -> Optional[list[int]]:
    """A file's state as JSON has it."""
    return None if stat is None else [stat.dev, stat.ino, stat.size, stat.mtime_ns, stat.ctime_ns]


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _parse(raw: Any) -> Manifest:
    for key in ("generation",):
        _require(_whole(raw[key]), key)
    check_name(raw["model"])
    _require(raw["kind"] in KINDS and type(raw["complete"]) is bool, "kind")
    _require(type(raw["created"]) in (int, float) and isinstance(raw["source"], str), "created or source")
    segments = raw["segments"]
    _require(isinstance(segments, list) and all(map(_whole, segments)), "segments")
    _require(_texts(raw["config"]) and isinstance(raw["state"], dict) and isinstance(raw["engine"], dict), "config")
    tensors = _parse_tensors(raw["tensors"], segments, raw["complete"])
    return Manifest(
        generation=raw["generation"],
        model=raw["model"],
        kind=raw["kind"],
        complete=raw["complete"],
        created=float(raw["created"]),
        source=raw["source"],
        segments=tuple(segments),
        tensors=tensors,
        shards=tuple(_parse_shard(row, tensors, segments, raw["complete"]) for row in raw["shards"]),
        config=raw["config"],
        state=raw["state"],
        engine=raw["engine"],
        inodes=tuple(_inodes(raw.get("inodes", []), len(segments))),
        devices=tuple(parse_device(row, segments) for row in raw.get("devices", ())),
        over=_parse_over(raw.get("over", {})),
    )


def _parse_over(value: Any) -> Mapping[str, Any]:
    _require(isinstance(value, dict) and value.keys() in ({"content", "files"}, set()), "over")
    if value:
        _require(isinstance(value["content"], str) and isinstance(value["files"], list), "over")
        _require(all(isinstance(row, list) and len(row) == 3 for row in value["files"]), "files of over")
    return dict(value)


def _inodes(value: Any, count: int) -> list[int]:
    whole = isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
    _require(whole and len(value) in (0, count), "inodes")
    return list(value)


def open_segment(path: Path, size: int, inode: Optional[int] = None) -> int:
    """A segment, open for reading. Raises NotFound, Foreign, or Damaged if it is not the one that was published.

    What its name leads to is compared with the inode in the manifest: in a directory in which others may rename files, a name
    alone would let them put one segment of ours in another's place.
    """
    fd = posix.open_existing(path)
    status = os.fstat(fd)
    if status.st_size >= size and inode in (None, status.st_ino):
        return fd
    os.close(fd)
    if status.st_size < size:
        raise Damaged(f"{path} is shorter than its manifest says: restart the sidecar to have it loaded again")
    raise Damaged(f"{path} is another file than the one that was published: restart the sidecar to have it loaded again")


def check_name(name: Any) -> None:
    _require(isinstance(name, str), "model name")
    try:
        check_model(name)
    except Exception as error:
        raise ValueError(str(error)) from None


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGE


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())


def _parse_tensors(rows: Any, segments: list[int], complete: bool) -> list[Tensor]:
    """Checks every row. Plain and flat on purpose: it runs a million times for the largest checkpoints."""
    tensors = []
    make, bits_of, is_digest, count = Tensor._make, BITS, _DIGEST.match, len(segments)
    for row in rows:
        name, dtype, shape, strides, segment, offset, nbytes, digest, start = row
        bits = bits_of[dtype]
        for extent in shape:
            if type(extent) is not int or not 0 <= extent < _LARGE:
                raise ValueError(f"shape of {name!r}")
            bits *= extent
        if not (
            type(name) is str
            and type(segment) is int
            and type(offset) is int
            and type(nbytes) is int
            and type(start) is int
            and 0 <= segment < count
            and 0 <= offset <= offset + nbytes <= segments[segment]
            and 0 <= start < _LARGE
            and not offset % LEAST_ALIGNMENT
            and bits == nbytes * 8
        ):
            raise ValueError(f"place or size of {name!r}")
        if not (is_digest(digest) if complete else digest is None):
            raise ValueError(f"digest of {name!r}")
        row[2] = tuple(shape)
        if strides is not None:
            row[3] = _strides(name, row[2], strides)
        tensors.append(make(row))
    return tensors


def _strides(name: str, shape: tuple[int, ...], strides: Any) -> tuple[int, ...]:
    """Only permutations of a dense layout: anything else would need more bytes than type and shape say."""
    _require(isinstance(strides, list) and len(strides) == len(shape) and all(map(_whole, strides)), f"strides of {name!r}")
    expected = 1
    for stride, extent in sorted(zip(strides, shape)):
        if extent > 1:
            _require(stride == expected, f"strides of {name!r}")
            expected *= extent
    return tuple(strides)


def _parse_shard(row: Any, tensors: Sequence[Tensor], segments: list[int], complete: bool) -> Shard:
    name, first, count, segment, metadata = (row[key] for key in ("name", "first", "count", "segment", "metadata"))
    _require(isinstance(name, str), "shard's name")
    _require(all(map(_whole, (first, count, segment, row["size"]))) and first + count <= len(tensors), f"rows of {name!r}")
    _require(segment < len(segments), f"segment of {name!r}")
    _require(all(tensor.segment == segment for tensor in tensors[first : first + count]), f"segment of {name!r}")
    _require(metadata is None or _texts(metadata), f"metadata of {name!r}")
    _require(isinstance(row["header"], str) and _DIGEST.match(row["header"]), f"header digest of {name!r}")
    _require(_DIGEST.match(row["sample"]) if complete else row["sample"] == "", f"sample digest of {name!r}")
    stat = row["stat"]
    if stat is not None:
        _require(isinstance(stat, list) and len(stat) == 5 and all(type(part) is int for part in stat), f"stat of {name!r}")
        stat = Stat(*stat)
    identity = FileIdentity(row["size"], row["header"], row["sample"], stat)
    return Shard(name, identity, metadata, first, count, segment)
