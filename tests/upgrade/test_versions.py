"""Sidecar and engine of different versions: what is compatible works, what is not is refused by name (docs/protocol.md, 18).

`layout1/` holds the bytes of a pool as this layout's first versions write it. A later version reads them, or refuses them with
a sentence; whoever changes the layout adds a folder and leaves this one as it is.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine_shim
from engine_shim.handoff import attachment, catalog, manifest, posix, request
from engine_shim.handoff.catalog import FAILED, READY, ControlPage
from engine_shim.handoff.errors import Busy, Damaged
from engine_shim.handoff.names import PoolPaths
from sidecar.pool import PoolWriter, damaged
from tests.generations.parts import checkpoint
from tests.generations.states import publish
from tests.hostile.readers import sealed
from tests.never_wrong.loading import Loading
from tests.never_wrong.logs import Lines, forget_pools
from tests.processes import Sidecar

FIXTURE = Path(__file__).parent / "layout1"
DATA = bytes(range(64))


def parts(name: str) -> bytes:
    described = json.loads((FIXTURE / name).read_text())
    content = bytearray(described["size"])
    for position, text in described["parts"]:
        piece = bytes.fromhex(text)
        content[position : position + len(piece)] = piece
    return bytes(content)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolPaths:
    """The fixture as a pool, without a sidecar, that this process is switched to."""
    paths = PoolPaths("p", tmp_path)
    put(paths.control, parts("ctl.json"), 0o600)
    put(paths.manifest(1), (FIXTURE / "g1.manifest").read_bytes(), 0o400)
    put(paths.segment(1, 0), parts("g1.w0.json"), 0o400)
    monkeypatch.setenv("BALLAST_POOL", "p")
    monkeypatch.setenv("BALLAST_DIR", str(tmp_path))
    forget_pools()
    return paths


def put(path: Path, data: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def served() -> bytes:
    forget_pools()
    with engine_shim.open("m", wait=1) as model:
        return bytes(model.tensors["t"].numpy().tobytes())


def test_the_fixture_is_read(place: PoolPaths) -> None:
    page = ControlPage.open(place)
    now = page.read()
    page.close()
    assert [(g.number, g.model, g.state, g.reason, g.shards) for g in now.generations] == [
        (1, "m", READY, "", ""), (2, "n", "loading", "", "3"), (3, "o", FAILED, "the disk is on fire", ""),
    ]  # fmt: skip
    assert served() == DATA
    contents = manifest.read(place.manifest(1))
    assert not list(damaged(place, contents)), "digests are computed as they were"
    assert contents.content == now.generations[0].content
    assert attachment._decode((FIXTURE / "a.json").read_bytes(), "a").engine == "vllm"


def test_the_fixture_is_adopted(place: PoolPaths) -> None:
    pool = PoolWriter(place)
    assert [item.generation.number for item in pool.adopt()] == [1]
    pool.close(remove=False)
    assert served() == DATA


def change_catalog(paths: PoolPaths, change: Callable[[Any], None]) -> None:
    raw = bytearray(paths.control.read_bytes())
    start = catalog.SLOT_OFFSET
    _, length, _ = catalog._SLOT.unpack_from(raw, start)
    document = json.loads(raw[start + 48 : start + 48 + length])
    change(document)
    payload = json.dumps(document).encode()
    raw[start : start + 48 + len(payload)] = catalog._SLOT.pack(99, len(payload), catalog._digest(99, payload)) + payload
    put(paths.control, bytes(raw), 0o600)


def change_manifest(paths: PoolPaths, change: Callable[[Any], None]) -> None:
    document = json.loads(paths.manifest(1).read_bytes()[manifest._HEADER.size :])
    change(document)
    put(paths.manifest(1), sealed(json.dumps(document).encode()), 0o400)


def test_the_version_before(place: PoolPaths) -> None:
    """It knew neither contents nor inodes, neither rollbacks nor budgets, and did not write its pool's name."""

    def older(document: Any) -> None:
        del document["pool"]
        for row in document["generations"]:
            for name in ("content", "over", "evicted"):
                del row[name]

    change_catalog(place, older)
    change_manifest(place, lambda document: document.pop("inodes"))
    assert served() == DATA
    pool = PoolWriter(place)
    assert [item.generation.number for item in pool.adopt()] == [1]
    pool.close(remove=False)


def test_a_compatible_later_version(place: PoolPaths) -> None:
    """It has added fields, which nobody has to know."""

    def newer(document: Any) -> None:
        document["colour"] = "red"
        for row in document["generations"]:
            row.update(heat=[1, 2], residency={"cuda": {}})

    def newer_manifest(document: Any) -> None:
        document["residencies"] = {"cuda:GPU-1": {"handles": ["AAAA"]}}
        document["shards"][0]["etag"] = "x"

    change_catalog(place, newer)
    change_manifest(place, newer_manifest)
    assert served() == DATA
    pool = PoolWriter(place)
    assert [item.generation.number for item in pool.adopt()] == [1]
    pool.close(remove=False)


def test_a_later_versions_attachment_holds(place: PoolPaths) -> None:
    token = attachment.Token.take(place, 1, "m")
    assert token._fd is not None
    record = json.dumps({"generation": 1, "model": "m", "lease": {"until": 5}}).encode()
    os.ftruncate(token._fd, 0)
    os.pwrite(token._fd, record, 0)
    assert [found.generation for found in attachment.alive(place)] == [1]
    token.release()


def next_layout(paths: PoolPaths) -> None:
    raw = bytearray(paths.control.read_bytes())
    struct.pack_into("<I", raw, 8, catalog.LAYOUT + 1)
    put(paths.control, bytes(raw), 0o600)


def test_the_next_layout_is_refused_by_name(place: PoolPaths, lines: Lines, tmp_path: Path) -> None:
    next_layout(place)
    with pytest.raises(Damaged, match=r"has layout 2 and this is a Ballast of layout 1: use the same version for sidecar"):
        served()
    from safetensors import safe_open

    from engine_shim.safe_open import stand_in

    folder = checkpoint(tmp_path / "files", 1, 1000)
    assert type(stand_in(safe_open)(folder / "model.safetensors", "pt")) is safe_open, "the engine loads as ever"
    assert "layout 2" in lines.take()[0]


def test_a_sidecar_does_not_touch_a_living_one_of_the_next_layout(place: PoolPaths) -> None:
    next_layout(place)
    fd = posix.open_existing(place.control, write=True)
    assert posix.try_flock(fd)
    with pytest.raises(Damaged, match="has layout 2"):
        PoolWriter(place)
    assert place.segment(1, 0).exists()
    os.close(fd)
    # Once it is gone the pool is anybody's, who then begins anew.
    pool = PoolWriter(place)
    assert not pool.adopt() and not place.segment(1, 0).exists()
    pool.close(remove=True)


def test_the_next_manifest_is_refused_by_name(place: PoolPaths) -> None:
    raw = bytearray(place.manifest(1).read_bytes())
    struct.pack_into("<I", raw, 8, manifest.FORMAT + 1)
    put(place.manifest(1), bytes(raw), 0o400)
    with pytest.raises(Damaged, match=r"has format 2 and this Ballast reads format 1: use the same version for sidecar"):
        served()
    pool = PoolWriter(place)
    assert not pool.adopt(), "it is loaded again from its files"
    pool.close(remove=True)


def test_an_engine_of_the_next_version_publishes(filled: Loading, tmp_path: Path) -> None:
    identifier = publish(filled.paths, "m", "k", 5000)
    path = filled.paths.publication(identifier)
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 8, manifest.FORMAT + 1)
    path.write_bytes(raw)
    assert not filled.pool.adopt_publication(identifier)
    assert not filled.pool.publications()
    assert not filled.pool.catalog.generations


def test_a_command_of_the_next_version_asks(pool_name: str, tmp_path: Path) -> None:
    with Sidecar(pool_name, checkpoint(tmp_path / "m", 1, 1000)) as sidecar:
        sidecar.ready("m")
        with pytest.raises(request.Refused, match=r"does not know what 'defragment' is: use one version for all"):
            request.ask(sidecar.paths, "defragment", "m", timeout=20)


def test_two_sidecars_of_one_layout_are_one_too_many(place: PoolPaths) -> None:
    pool = PoolWriter(place)
    with pytest.raises(Busy):
        PoolWriter(place)
    pool.close(remove=True)
