"""A manifest comes back as it was written, or not at all; and no number in it leads out of its segment."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim.handoff import manifest, posix
from engine_shim.handoff.dtypes import BITS
from engine_shim.handoff.errors import Damaged, Foreign, NoRoom, NotFound
from engine_shim.handoff.identity import FileIdentity
from engine_shim.handoff.manifest import (
    ALIGNMENT,
    HANDLE_BYTES,
    DeviceCopy,
    Manifest,
    Shard,
    Tensor,
    Window,
    align,
    decode,
    encode,
)
from sidecar import checkpoint, serve
from tests.checkpoints import Checkpoint, checkpoints, one_of_each

drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
HEX = "0123456789abcdef" * 2
PATH = Path("/x/manifest")


@pytest.fixture(params=["orjson", "json"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both sides work with the standard library alone as well."""
    if request.param == "json":
        monkeypatch.setattr(manifest, "orjson", None)
    yield


def of_checkpoint(path: Path) -> tuple[Manifest, Manifest]:
    """The manifests of a checkpoint while it is loading, and when it is complete, with made-up digests."""
    loading, _ = serve.plan(checkpoint.open_checkpoint(path), "m")
    rows = [row._replace(digest=HEX) for row in loading.tensors]
    shards = [
        Shard(s.name, FileIdentity(s.identity.size, s.identity.header, HEX, s.identity.stat), *_rest(s))
        for s in loading.shards
    ]
    whole = Manifest(7, "m", "checkpoint", True, 1.5, "/x", loading.segments, rows, tuple(shards), loading.config)
    return loading, whole


def _rest(shard: Shard) -> tuple[Any, ...]:
    return shard.metadata, shard.first, shard.count, shard.segment


@given(st.lists(checkpoints(), min_size=1, max_size=1))
@drawn
def test_it_comes_back_as_it_was(tmp_path: Path, files: list[Checkpoint]) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    for number, file in enumerate(files):
        file.write(tmp_path / f"{number}.safetensors")
    for written in of_checkpoint(tmp_path):
        assert decode(encode(written), PATH) == written


def test_an_engines_state_comes_back_as_it_was() -> None:
    rows = [Tensor("0", "U8", (64,), None, 0, 0, 64, HEX, 0), Tensor("1", "F32", (2, 3), (1, 2), 0, 256, 24, HEX, 0)]
    state, engine = {"slots": [["a", 1, None, True, 1.5]]}, {"key": "k", "torch": "2.13", "deep": {"er": [1]}}
    written = Manifest(3, "org/m", "engine", True, 2.0, "", (2 << 20,), rows, state=state, engine=engine)
    assert decode(encode(written), PATH) == written


def test_names_are_any_text(tmp_path: Path) -> None:
    for name in ("", "\0", "\x7f", "é", "\U0001f600", "a" * 10_000, '"\\', "__metadata_"):
        Checkpoint({name: ("U8", (1,), b"x")}, {name: name}).write(tmp_path / "a.safetensors")
        for written in of_checkpoint(tmp_path / "a.safetensors"):
            assert decode(encode(written), PATH) == written


# Bytes that are not what was written


@pytest.fixture
def sound(tmp_path: Path) -> bytes:
    one_of_each().write(tmp_path / "model.safetensors")
    return encode(of_checkpoint(tmp_path)[1])


def test_every_flipped_bit_and_every_missing_byte_is_noticed(sound: bytes) -> None:
    for position in [*range(300), *range(300, len(sound), 97)]:
        data = bytearray(sound)
        data[position] ^= 1 << position % 8
        if 12 <= position < 16:
            continue  # reserved
        with pytest.raises(Damaged):
            decode(bytes(data), PATH)
        with pytest.raises(Damaged):
            decode(sound[:position], PATH)
    with pytest.raises(Damaged, match="checksum"):
        decode(sound + b" ", PATH)
    decode(sound, PATH)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "cut short"), (b"BALLASTM", "cut short"), (b"x" * 100, "not a manifest"),
        (struct.pack("<8sIIQ32s", b"BALLASTM", 2, 0, 0, b""), "format 2 and this Ballast reads format 1"),
        (struct.pack("<8sIIQ32s", b"BALLASTM", 0, 0, 0, b""), "format 0"),
        (struct.pack("<8sIIQ32s", b"BALLASTM", 1, 0, 0, b""), "checksum"),
        (struct.pack("<8sIIQ32s", b"BALLASTM", 1, 0, 1 << 63, b""), "checksum"),
    ],
)  # fmt: skip
def test_what_is_no_manifest(start: bytes, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        decode(start, PATH)


def seal(document: Any) -> bytes:
    """With header and digest, as a hostile writer would make it."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return manifest._HEADER.pack(manifest.MAGIC, manifest.FORMAT, 0, len(body), manifest._digest(body)) + body


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"1", b"{}", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"x" * 99]
)
def test_a_body_that_is_no_table(body: bytes) -> None:
    with pytest.raises(Damaged, match="does not make sense"):
        decode(seal(body), PATH)


# Numbers that would lead astray

BASE: dict[str, Any] = {
    "generation": 3, "model": "m", "kind": "checkpoint", "complete": True, "created": 1.0, "source": "/x",
    "segments": [2 << 20, 4096], "config": {}, "state": {}, "engine": {},
    "shards": [
        {"name": "a", "size": 5000, "header": HEX, "sample": HEX, "stat": [1, 2, 3, 4, 5], "metadata": {"k": "v"},
         "first": 0, "count": 2, "segment": 0},
    ],
    "tensors": [
        ["x", "F32", [2, 3], None, 0, 256, 24, HEX, 0],
        ["y", "F4", [4], None, 0, 512, 2, HEX, 24],
        ["z", "U8", [4096], None, 1, 0, 4096, HEX, 0],
        ["e", "I64", [0, 5], None, 1, 4096, 0, HEX, 0],
    ],
}  # fmt: skip


def test_the_base_of_what_follows_is_sound() -> None:
    found = decode(seal(BASE), PATH)
    assert [row.name for row in found.tensors] == ["x", "y", "z", "e"]
    assert decode(encode(found), PATH) == found


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(BASE)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


NAME, DTYPE, SHAPE, STRIDES, SEGMENT, OFFSET, NBYTES, DIGEST, START = range(9)
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (NAME, [None, 1, ["x"], {}]),
        (DTYPE, ["f32", "", None, 5, [], "F6_E2M3", "U8"]),
        (SHAPE, [None, [3, 3], [2], [], 6, [-2, -3], [2.0, 3], ["2", 3], [True, 6], [HUGE, 0], [2, 3, 1, 2], "23", [None],
                 [1 << 40, 1 << 40], {"2": 3}]),
        (STRIDES, [[3], [3, 1, 1], [1, 1], [0, 0], [4, 1], [-3, 1], [3.0, 1], "31", {}, 1, [HUGE, 1], [True, 1], [2, 2]]),
        (SEGMENT, [2, -1, HUGE, 0.0, "0", None, True, 1]),
        (OFFSET, [1, 255, 32, -256, 2 << 20, (2 << 20) - 16, HUGE, 1 << 100, 256.0, "256", None, True]),
        (NBYTES, [0, 23, 25, -24, HUGE, 1 << 100, 24.0, "24", None, True]),
        (DIGEST, [None, "", HEX[:-1], HEX + "0", HEX.upper(), "g" * 32, 5, [], HEX + "\n"]),
        (START, [-1, HUGE, 0.0, "0", None, True]),
    ],
)  # fmt: skip
def test_a_tensor_out_of_bounds(field: int, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(Damaged, match="does not make sense"):
            decode(seal(changed(("tensors", 0, field), value)), PATH)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("generation",), [-1, 1.0, "3", None, True, HUGE]),
        (("model",), ["", "../x", 5, None, "a b", "x\x1b"]),
        (("kind",), ["other", None, 1, [], {}]),
        (("complete",), [1, 0, None, "true", False]),
        (("created",), ["now", None, True]),
        (("source",), [None, 1, []]),
        (("segments",), [None, [], [2 << 20], [-1, 4096], [1.5, 4096], ["1", 4096], [True, 4096], {}, [HUGE, 4096], 5]),
        (("config",), [None, [], {"a": 1}, {"a": None}]),
        (("state",), [None, [], "x"]),
        (("engine",), [None, [], "x"]),
        (("tensors",), [None, 5, [None], [[]], [["x"]], ["abcdefghi"], [[1] * 10], {"a": 1}]),
        (("shards",), [None, 5, [None], [[]], [{}], {"a": 1}]),
        (("shards", 0, "name"), [None, 1]),
        (("shards", 0, "size"), [-1, None, "5", 1.5, HUGE]),
        (("shards", 0, "header"), [None, "", HEX[1:], 5]),
        (("shards", 0, "sample"), [None, "", HEX[1:], 5]),
        (("shards", 0, "stat"), [5, [], [1, 2, 3, 4], [1, 2, 3, 4, "5"], [1, 2, 3, 4, 5.0], {}, [1, 2, 3, 4, None]]),
        (("shards", 0, "metadata"), [5, [], {"a": 1}, {"a": None}]),
        (("shards", 0, "first"), [-1, 3, 4, HUGE, 0.0, None, True, 1]),
        (("shards", 0, "count"), [-1, 5, HUGE, 2.0, None, 3, True]),
        (("shards", 0, "segment"), [-1, 2, 1, HUGE, None, 0.0]),
        (("over",), [None, [], "x", {"content": HEX}, {"content": HEX, "files": {}}, {"content": 5, "files": []},
                     {"content": HEX, "files": [["a", HEX]]}, {"content": HEX, "files": [], "more": 1}]),
    ],
)  # fmt: skip
def test_anything_else_out_of_bounds(path: tuple[Any, ...], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(Damaged):
            decode(seal(changed(path, value)), PATH)


def test_a_missing_field() -> None:
    for key in BASE:
        with pytest.raises(Damaged):
            decode(seal({k: v for k, v in BASE.items() if k != key}), PATH)
    for key in BASE["shards"][0]:
        with pytest.raises(Damaged):
            decode(seal(changed(("shards", 0), {k: v for k, v in BASE["shards"][0].items() if k != key})), PATH)


def test_fields_of_a_later_version_are_ignored() -> None:
    assert decode(seal(BASE | {"device": {"cuda:0": 1}}), PATH) == decode(seal(BASE), PATH)


def test_strides_are_permutations_of_a_dense_layout() -> None:
    for strides in ([3, 1], [1, 2]):
        decode(seal(changed(("tensors", 0, STRIDES), strides)), PATH)
    one = ["x", "F32", [1, 6, 1], [99, 1, 0], 0, 256, 24, HEX, 0]  # the stride of an extent of one means nothing
    decode(seal(changed(("tensors", 0), one)), PATH)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4)
    | st.sampled_from([0, 1, 2, 24, 256, 4096, 2 << 20, HEX, "F32", "U8", "F4"]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=9,
)  # fmt: skip
places = st.sampled_from(
    [*((key,) for key in BASE), *(("tensors", row, field) for row in range(4) for field in range(9)),
     *(("tensors", row) for row in range(4)), *(("shards", 0, key) for key in BASE["shards"][0])]
)  # fmt: skip


@given(st.lists(st.tuples(places, json_values), min_size=1, max_size=3))
@settings(parent=drawn, max_examples=300)
def test_whatever_is_accepted_stays_within_its_segment(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document: Any = copy.deepcopy(BASE)
    for path, value in changes:
        place = document
        try:
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
        except (TypeError, KeyError, IndexError):
            continue
    try:
        found = decode(seal(document), PATH)
    except Damaged:
        return
    for row in found.tensors:
        assert row.offset >= 0 and row.offset + row.nbytes <= found.segments[row.segment]
        elements = 1
        for extent in row.shape:
            elements *= extent
        assert elements * BITS[row.dtype] == 8 * row.nbytes
        assert row.strides is None or len(row.strides) == len(row.shape)
    for shard in found.shards:
        assert {row.segment for row in found.rows(shard)} <= {shard.segment}
        assert len(found.rows(shard)) == shard.count


# In shared memory


def test_written_and_read(pool_paths: Any, sound: bytes) -> None:
    path = pool_paths.manifest(1)
    written = decode(sound, PATH)
    manifest.write(written, path)
    assert manifest.read(path) == written
    assert os.stat(path).st_mode & 0o777 == 0o400
    first = os.stat(path).st_ino
    manifest.write(written, path)
    assert os.stat(path).st_ino != first  # replaced, never written to again
    assert [name.file for name in pool_paths.objects()] == [path.name]
    path.unlink()
    with pytest.raises(NotFound):
        manifest.read(path)


def test_the_old_one_is_there_until_the_new_is_whole(
    pool_paths: Any, sound: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step in which its writer may die, readers find one of the two."""
    path = pool_paths.manifest(1)
    old, new = decode(sound, PATH), dataclasses.replace(decode(sound, PATH), source="elsewhere")
    manifest.write(old, path)
    steps = []
    for step in ("create", "write_exactly", "share", "rename"):
        really = getattr(posix, step)

        def look(*args: Any, step: str = step, really: Any = really) -> Any:
            before = manifest.read(path)
            done = really(*args)
            steps.append((step, before == old, manifest.read(path) == old))
            return done

        monkeypatch.setattr(posix, step, look)
    manifest.write(new, path)
    monkeypatch.undo()
    assert steps == [(step, True, step != "rename") for step in ("create", "write_exactly", "share", "rename")]
    assert manifest.read(path) == new
    path.unlink()


def test_copies_on_gpus_go_with_it(sound: bytes) -> None:
    plain = decode(sound, PATH)
    gpu = "GPU-" + "-".join("a" * length for length in (8, 4, 4, 4, 12))
    windows = tuple(Window(bytes([index]) * HANDLE_BYTES, size + 256, 256) for index, size in enumerate(plain.segments))
    copied = dataclasses.replace(plain, devices=(DeviceCopy(gpu, "0" * 16, windows),))
    assert decode(encode(copied), PATH) == copied
    assert b'"devices"' not in encode(plain), "the very bytes that a Ballast without device copies writes"


def test_what_was_rolled_back_from_goes_with_it(sound: bytes) -> None:
    plain = decode(sound, PATH)
    back = dataclasses.replace(plain, over={"content": HEX, "files": [["a", HEX, [1, 2, 3, 4, 5]], ["b", HEX, None]]})
    assert decode(encode(back), PATH) == back
    assert b'"over"' not in encode(plain)


def test_where_a_checkpoints_files_are(sound: bytes) -> None:
    plain = decode(sound, PATH)
    shard = dataclasses.replace(plain.shards[0], name="a.safetensors")
    for source, place in (
        ("/x/Llama-3.1", "/x/Llama-3.1/a.safetensors"), ("/x/a.safetensors", "/x/a.safetensors"),
        ("/x/model.safetensors.index.json", "/x/a.safetensors"),
    ):  # fmt: skip
        assert str(dataclasses.replace(plain, source=source).file(shard)) == place


def test_what_a_checkpoint_holds_has_one_digest(sound: bytes) -> None:
    """Wherever its files lie, and whatever number the generation has; none while it is being loaded."""
    found = decode(sound, PATH)
    assert len(found.content) == 32 and found.nbytes == sum(row.nbytes for row in found.tensors)
    moved = dataclasses.replace(found, generation=9, source="elsewhere", created=1.0)
    assert moved.content == found.content
    changed = [found.tensors[0]._replace(digest="f" * 32), *found.tensors[1:]]
    assert dataclasses.replace(found, tensors=changed).content != found.content
    assert dataclasses.replace(found, complete=False).content == dataclasses.replace(found, shards=()).content == ""


def test_the_segment_that_was_published_or_none(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.touch(0o600)
    os.truncate(path, 100)
    inode = path.stat().st_ino
    for size, known in ((100, inode), (100, None), (50, inode)):
        os.close(manifest.open_segment(path, size, known))
    with pytest.raises(Damaged, match="is shorter than its manifest says"):
        manifest.open_segment(path, 101, inode)
    with pytest.raises(Damaged, match="is another file than the one that was published"):
        manifest.open_segment(path, 100, inode + 1)


def test_strangers_manifests(pool_paths: Any, sound: bytes, tmp_path: Path) -> None:
    path = pool_paths.manifest(1)
    manifest.write(decode(sound, PATH), path)
    os.chmod(path, 0o646)
    with pytest.raises(Foreign, match="writable by other"):
        manifest.read(path)
    os.chmod(path, 0o400)
    os.chown(path, 65534, 65534)
    with pytest.raises(Foreign, match="belongs to user 65534"):
        manifest.read(path)
    path.unlink()
    (tmp_path / "m").write_bytes(sound)
    path.symlink_to(tmp_path / "m")
    with pytest.raises(Foreign, match="symbolic link"):
        manifest.read(path)
    path.unlink()


def test_an_endless_manifest_is_not_read(pool_paths: Any) -> None:
    path = pool_paths.manifest(1)
    path.touch(0o400)
    os.truncate(path, manifest.LIMIT + 100)  # sparse
    try:
        with pytest.raises(Damaged, match="at most"):
            manifest.read(path)
    finally:
        path.unlink()


def test_no_room_leaves_nothing(pool_paths: Any, sound: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(posix, "write_exactly", full)
    with pytest.raises(NoRoom):
        manifest.write(decode(sound, PATH), pool_paths.manifest(1))
    assert not pool_paths.objects()


def test_alignment_of_what_is_written(tmp_path: Path) -> None:
    one_of_each().write(tmp_path / "model.safetensors")
    whole = of_checkpoint(tmp_path)[1]
    assert all(row.offset % ALIGNMENT == 0 for row in whole.tensors)
    assert all(size % manifest.SEGMENT_ALIGNMENT == 0 for size in whole.segments)
    assert [align(value, 256) for value in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]
