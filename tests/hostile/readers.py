"""Everything that reads bytes which another process wrote, each as a function of those bytes: what a fuzzer feeds.

A reader returns, or raises one of REFUSALS; anything else it raises is a fault, and so is accepting what breaks a rule.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine_shim.handoff import attachment, catalog, manifest, posix, request
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.dtypes import BITS
from engine_shim.handoff.errors import Damaged, Foreign, NotFound
from engine_shim.handoff.names import PoolPaths
from sidecar import checkpoint

REFUSALS = (Damaged, Foreign, NotFound, checkpoint.CheckpointError, checkpoint._Refused)

PATH = Path("/nowhere/ballast-p.g1.manifest")
PLACE: str | None = None  # where a control page is made; None: where temporary files are
_page: list[tuple[int, PoolPaths, bytes]] = []


def read_manifest(data: bytes) -> None:
    """A table with a right checksum: only somebody who knows how can have written it."""
    check_manifest(manifest.decode(sealed(data), PATH))


def read_sealed_manifest(data: bytes) -> None:
    """Any bytes at all in a manifest's place."""
    check_manifest(manifest.decode(data, PATH))


def sealed(body: bytes) -> bytes:
    return manifest._HEADER.pack(manifest.MAGIC, manifest.FORMAT, 0, len(body), manifest._digest(body)) + body


def check_manifest(contents: manifest.Manifest) -> None:
    """What everybody relies on from then on: nothing leads out of its segment."""
    for row in contents.tensors:
        elements = 1
        for extent in row.shape:
            assert extent >= 0
            elements *= extent
        assert BITS[row.dtype] * elements == 8 * row.nbytes
        assert 0 <= row.offset <= row.offset + row.nbytes <= contents.segments[row.segment]
        if row.strides is not None and elements:
            last = sum((extent - 1) * stride for extent, stride in zip(row.shape, row.strides, strict=True))
            assert last < elements and min(row.strides, default=0) >= 0
    for shard in contents.shards:
        assert 0 <= shard.first <= shard.first + shard.count <= len(contents.tensors)
    manifest.encode(contents)


def read_catalog(data: bytes) -> None:
    """A slot's payload with a right checksum."""
    found = catalog.decode(data, 1)
    again = catalog.decode(catalog.encode(found), 1)
    assert again == found
    assert all(0 < g.number + 1 <= found.next for g in found.generations)


def read_page(data: bytes) -> None:
    """A whole control page, of which `data` is some: (position, bytes) one after the other, as far as it goes."""
    fd, paths, sound = _made_page()
    os.pwrite(fd, sound, 0)
    position = 0
    while len(data) > 3:
        position = int.from_bytes(data[:2], "little") % 600 if data[2] & 1 else catalog.SLOT_OFFSET + data[0]
        piece = data[3 : 3 + data[2] % 64 + 1]
        os.pwrite(fd, piece, position)
        data = data[3 + len(piece) :]
    page = ControlPage.open(paths)
    try:
        page.read()
    finally:
        page.close()


def _made_page() -> tuple[int, PoolPaths, bytes]:
    if not _page:
        paths = PoolPaths("p", Path(tempfile.mkdtemp(prefix="ballast-page-", dir=PLACE)))
        page = ControlPage.create_or_open(paths)
        row = catalog.Generation(1, "m", "checkpoint", "ready", 64)
        for _ in range(2):
            page.write(catalog.Catalog("ab" * 16, 2, 0, (row,), "p"))
        sound = posix.read_exactly(page.fd, catalog.SLOT_OFFSET + 1024, 0, paths.control)
        _page.append((page.fd, paths, sound))
    return _page[0]


def forget_page() -> None:
    for fd, paths, _ in _page:
        os.close(fd)
        for file in paths.dir.iterdir():
            file.unlink()
        paths.dir.rmdir()
    _page.clear()


def read_attachment(data: bytes) -> None:
    record = attachment._decode(data, "a.x")
    assert type(record.generation) is int and isinstance(record.command, str)


def read_request(data: bytes) -> None:
    found = request._decode(data, "0123456789abcdef")
    assert len(found.verb) <= 80 and ".." not in found.model


def read_answer(data: bytes) -> None:
    done, text = request._decode_answer(data)
    assert type(done) is bool and isinstance(text, str)


def read_header(data: bytes) -> None:
    """A safetensors header, its data area's size in the first two bytes."""
    header_of(data[2:], int.from_bytes(data[:2], "little"))


def header_of(header: bytes, size: int) -> None:
    _, tensors = checkpoint.parse_header(header, size)
    assert sum(tensor.nbytes for tensor in tensors) == size
    for tensor in tensors:
        assert 0 <= tensor.begin <= tensor.end <= size
    json.dumps([tensor.name for tensor in tensors])


READERS: dict[str, Callable[[bytes], None]] = {
    "manifest": read_manifest,
    "sealed": read_sealed_manifest,
    "catalog": read_catalog,
    "page": read_page,
    "attachment": read_attachment,
    "request": read_request,
    "answer": read_answer,
    "header": read_header,
}
