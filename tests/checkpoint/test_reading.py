"""What `open_checkpoint` makes of good checkpoints, and that it agrees with safetensors about every header."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

import sidecar.checkpoint
from engine_shim.handoff.dtypes import BITS
from sidecar.checkpoint import (
    MAX_EXTENT,
    Checkpoint,
    CheckpointError,
    TensorEntry,
    default_name,
    open_checkpoint,
    read_header,
)
from tests.checkpoints import Checkpoint as Drawn
from tests.checkpoints import checkpoints, entry, one_of_each, write

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put(path: Path, *names: str, **options: Any) -> Path:
    """A small file with these tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, {name: entry("F32", (2,), seed) for seed, name in enumerate(names)}, **options)
    return path


def put_index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))


def names(checkpoint: Checkpoint) -> dict[str, list[str]]:
    return {shard.name: [tensor.name for tensor in shard.tensors] for shard in checkpoint.shards}


# One file


def test_a_file_is_described_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"b": entry("BF16", (2, 3)), "a": entry("U8", ()), "c": entry("F4", (4,))}
    write(path, tensors, {"format": "pt"}, order=["c", "b", "a"], header_padding=5)
    shard = read_header(path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert shard.tensors == (
        TensorEntry("b", "BF16", (2, 3), 2, 14),
        TensorEntry("a", "U8", (), 14, 15),
        TensorEntry("c", "F4", (4,), 0, 2),
    )
    assert [tensor.nbytes for tensor in shard.tensors] == [12, 1, 2]
    assert shard.metadata == {"format": "pt"}
    assert (shard.name, shard.path, shard.real, shard.component) == (path.name, path, path.resolve(), "")
    assert (shard.size, shard.header_len, shard.data_begin, shard.nbytes) == (len(raw), length, 8 + length, 15)
    assert shard.header_digest == hashlib.blake2b(raw[: 8 + length], digest_size=16).hexdigest()
    status = path.stat()
    assert (shard.stat.dev, shard.stat.ino, shard.stat.size) == (status.st_dev, status.st_ino, status.st_size)
    assert (shard.stat.mtime_ns, shard.stat.ctime_ns) == (status.st_mtime_ns, status.st_ctime_ns)


def test_every_dtype_every_rank_and_no_elements(tmp_path: Path) -> None:
    drawn, path = one_of_each(), tmp_path / "model.safetensors"
    drawn.write(path)
    shard = read_header(path)
    assert {tensor.dtype for tensor in shard.tensors} == set(BITS)
    _agrees(path, drawn)


@given(checkpoints())
@settings(deadline=None)
def test_any_legal_file(workshop: Path, drawn: Drawn) -> None:
    drawn.write(workshop)
    _agrees(workshop, drawn)


def _agrees(path: Path, drawn: Drawn) -> None:
    """What was read is what was written, byte for byte, and in the header's order."""
    shard, raw = read_header(path), path.read_bytes()
    assert [tensor.name for tensor in shard.tensors] == list(drawn.tensors)
    assert shard.metadata == drawn.metadata
    for tensor in shard.tensors:
        dtype, shape, data = drawn.tensors[tensor.name]
        assert (tensor.dtype, tensor.shape) == (dtype, tuple(shape))
        assert raw[shard.data_begin + tensor.begin : shard.data_begin + tensor.end] == data


@pytest.mark.parametrize("header", [b"{}", b"  {}", b'\n{"__metadata__":null}\t\r\n', b'{"__metadata__":{}}'])
def test_a_file_without_tensors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.tensor_count, checkpoint.nbytes) == (0, 0)
    assert checkpoint.shards[0].metadata == ({} if b"{}}" in header else None)


# The header, against safetensors itself


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers") / "model.safetensors"


def compare(path: Path, header: bytes, data_bytes: int) -> bool:
    """Whether both accept the file; fails where they disagree, in the verdict or in what they read."""
    content = struct.pack("<Q", len(header)) + header + bytes(data_bytes)
    path.write_bytes(content)
    try:
        theirs = {name: (t["dtype"], tuple(t["shape"]), len(t["data"])) for name, t in deserialize(content)}  # type: ignore[no-untyped-call]
    except SafetensorError:
        with pytest.raises(CheckpointError):
            read_header(path)
        return False
    pairs = json.loads(header, object_pairs_hook=list)
    if len(dict(pairs)) < len(pairs) or any(extent > MAX_EXTENT for _, shape, _ in theirs.values() for extent in shape):
        with pytest.raises(CheckpointError):  # the two exceptions, see sidecar.checkpoint
            read_header(path)
        return False
    shard = read_header(path)
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in shard.tensors} == theirs
    with safe_open(path, framework="np") as file:
        assert file.metadata() == shard.metadata
        offsets = {name: place for place, name in enumerate(file.offset_keys())}
    filled = [t for t in sorted(shard.tensors, key=lambda t: t.begin) if t.nbytes]
    assert [t.name for t in filled] == sorted((t.name for t in filled), key=offsets.__getitem__)
    return True


PLAIN = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def _info(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]", more: str = "") -> str:
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


@pytest.mark.parametrize(
    ("header", "data_bytes", "accepted"),
    [
        (_info(), 4, True),
        (f' \n\t{{ "a"\r: {PLAIN} , "__metadata__" : {{ "k" : ":" }} }}  ', 4, True),
        (f"\ufeff{_info()}", 4, False),
        (f"{_info()}\0\0", 4, False),
        ("", 0, False),
        ("null", 0, False),
        ("[]", 0, False),
        ("{}", 1, False),
        (f'{{"a":{PLAIN},}}', 4, False),
        (f'{{"a":{PLAIN}', 4, False),
        ('{"a":["F32",[1],[0,4]]}', 4, True),  # serde reads a struct from an array, too
        ('{"a":["F32",[1],[0,4],0]}', 4, False),
        ('{"a":null}', 0, False),
        (_info(dtype='{"F32":null}'), 4, True),  # … and a variant from an object
        (_info(dtype='{"F32":[]}'), 4, False),
        (_info(dtype='{"F32":null,"F32":null}'), 4, False),
        (_info(dtype="17"), 4, False),
        (_info(dtype='"f32"'), 4, False),
        (_info(more=',"strides":{"x":[1,1e5]}'), 4, True),
        (_info(more=',"x":1,"x":2'), 4, True),
        (_info(more=',"shape":[1]'), 4, False),
        (_info(more=',"x":1e999'), 4, False),
        (_info(more=',"x":NaN'), 4, False),
        (_info(more=f',"x":{"[" * 125}{"]" * 125}'), 4, True),
        (_info(more=f',"x":{"[" * 126}{"]" * 126}'), 4, False),
        (_info(more=f',"x":{"[" * 9999}{"]" * 9999}'), 4, False),
        ('{"a":{"dtype":"F32","shape":[1]}}', 4, False),
        (_info(shape="[1.0]"), 4, False),
        (_info(shape="[true]"), 4, False),
        (_info(shape='["1"]'), 4, False),
        (_info(shape="null"), 4, False),
        (_info(shape="{}"), 4, False),
        (_info(shape="[-1]"), 4, False),
        (_info(shape="[-0]", offsets="[0,0]"), 0, False),
        (_info(shape="[01]"), 4, False),
        (_info(shape="[]"), 4, True),
        (_info(shape="[0,4611686018427387903]", offsets="[0,0]"), 0, True),
        (_info(shape="[0,18446744073709551615]", offsets="[0,0]"), 0, False),  # a difference: MAX_EXTENT
        (_info(shape="[0,18446744073709551616]", offsets="[0,0]"), 0, False),
        (_info(shape="[4611686018427387903,4,0]", offsets="[0,0]"), 0, True),
        (_info(shape="[4611686018427387903,5,0]", offsets="[0,0]"), 0, False),
        (_info(shape="[4611686018427387903]"), 4, False),
        (_info(offsets="[0]"), 4, False),
        (_info(offsets="[0,4,4]"), 4, False),
        (_info(offsets="[4,8]"), 8, False),
        (_info(offsets="[4,0]"), 4, False),
        (_info(offsets="[-0,4]"), 4, False),
        (_info(shape="[0]", offsets="[4,4]"), 4, False),
        (_info(), 5, False),
        (_info(), 3, False),
        (_info(dtype='"F4"', shape="[3]", offsets="[0,2]"), 2, False),
        (_info(dtype='"F6_E2M3"', shape="[4]", offsets="[0,3]"), 3, True),
        (_info(dtype='"F6_E2M3"', shape="[2]", offsets="[0,2]"), 2, False),
        (f'{{"a":{PLAIN},"a":{PLAIN}}}', 4, False),  # a difference: there the last of equal names counts
        (f'{{"a":{PLAIN.replace("0,4", "4,8")},"a":{PLAIN}}}', 4, False),
        (f'{{"a":0,"a":{PLAIN},"::::":{PLAIN.replace("[1]", "[0]").replace("0,4", "0,0")}}}', 4, False),
        (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{PLAIN}}}', 4, False),
        (f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{PLAIN}}}', 4, True),
        (f'{{"__metadata__":{{"k":1,"k":"2"}},"a":{PLAIN}}}', 4, False),
        (f'{{"__metadata__":{{"k":null}},"a":{PLAIN}}}', 4, False),
        (f'{{"__metadata__":[],"a":{PLAIN}}}', 4, False),
        (f'{{"__meta\\u0064ata__":{{"\\u003a":"\\u003A"}},"a":{PLAIN}}}', 4, True),
        (f'{{"\\u003aa\\u003a":{PLAIN},"::":{PLAIN.replace("0,4", "4,8")}}}', 8, True),
        (f'{{"\\u003aa\\u003a":0,"\\u003aa\\u003a":{PLAIN}}}', 4, False),
        (f'{{"\\ud83d\\ude00 -0 :":{PLAIN}}}', 4, True),
        (f'{{"\\ud800":{PLAIN}}}', 4, False),
        (f'{{"\\u0000":{PLAIN},"":{PLAIN.replace("0,4", "4,8")}}}', 8, True),
        (f'{{"\x01":{PLAIN}}}', 4, False),
    ],
)
def test_every_peculiarity_is_judged_as_safetensors_judges_it(
    workshop: Path, header: str, data_bytes: int, accepted: bool
) -> None:
    assert compare(workshop, header.encode(), data_bytes) is accepted


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe2\x82"])
def test_invalid_utf8(workshop: Path, bad: bytes) -> None:
    assert not compare(workshop, b'{"' + bad + b'":' + PLAIN.encode() + b"}", 4)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(8), bytes(8) + b"{}", b"\x03" + bytes(7) + b"{}", struct.pack("<Q", 2**64 - 1)]
)
def test_impossible_lengths(workshop: Path, content: bytes) -> None:
    workshop.write_bytes(content)
    with pytest.raises(SafetensorError):
        deserialize(content)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError):
        read_header(workshop)


_number = st.sampled_from(
    ["0", "1", "2", "3", "4", "8", "16", "-0", "-1", "1.0", "1e0", "true", "null", str(2**64 - 1), str(2**64)]
)
_string = st.sampled_from(
    ["a", "b", "b.c", "x:y", ":", "", "-0", "[-0", "\\u003a", "\\n", "é", "\\ud83d\\ude00", "dtype"]
)
_text = _string.map(lambda text: f'"{text}"')
_value = st.recursive(
    _number | _text,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(_text, inner), max_size=3).map(lambda pairs: "{" + ",".join(map(":".join, pairs)) + "}")
    ),
    max_leaves=6,
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header that is nearly right, and the number of bytes behind it."""

    def rarely() -> bool:
        return draw(st.integers(0, 14)) == 0

    members, place = [], 0
    for _ in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from([*BITS, "F32", "F4", "X"] if rarely() else [*BITS]))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3))
        bits = BITS.get(dtype, 8)
        for extent in shape:
            bits *= extent
        begin, end = place, place + (bits + 7) // 8
        place = end if not rarely() else begin
        fields = [
            f'"dtype":"{dtype}"'
            if not rarely()
            else draw(st.sampled_from([f'"dtype":{{"{dtype}":null}}', '"dtype":1'])),
            f'"shape":{shape}' if not rarely() else f'"shape":[{draw(_number)}]',
            f'"data_offsets":[{begin},{end}]' if not rarely() else f'"data_offsets":[{begin},{draw(_number)}]',
        ]
        if rarely():
            fields.append(f"{draw(_text)}:{draw(_value)}")
        if rarely():
            fields.append(draw(st.sampled_from(fields)))
        if rarely():
            fields = draw(st.permutations(fields))
        described = "{" + ",".join(fields) + "}"
        if rarely():
            described = "[" + ",".join(field.split(":", 1)[1] for field in fields[:3]) + "]"
        members.append(f"{draw(_text)}:{described if not rarely() else draw(_value)}")
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(_text, _text if not rarely() else _value), max_size=2))
        members.append('"__metadata__":{' + ",".join(map(":".join, pairs)) + "}")
    if rarely() and members:
        members.append(draw(st.sampled_from(members)))
    if rarely():
        members.append(draw(st.sampled_from(['"__metadata__":null', '"__metadata__":{}', '"__met\\u0061data__":{}'])))
    glue = draw(st.sampled_from([",", ",", ", ", " ,\n"]))
    text = "{" + glue.join(draw(st.permutations(members))) + "}" + " " * draw(st.integers(0, 3))
    if draw(st.integers(0, 4)) == 0:
        for _ in range(draw(st.integers(1, 2))):
            where = draw(st.integers(0, len(text)))
            piece = draw(st.sampled_from([*'{}[]",:0123-.eE \\\n\x00', "", "18446744073709551615", "é", "null"]))
            text = text[:where] + piece + text[where + draw(st.integers(0, 2)) :]
    size = place if not rarely() else draw(st.integers(0, 64))
    return text.encode(), size


@given(headers())
@settings(max_examples=int(os.environ.get("BALLAST_TEST_EXAMPLES", "600")), deadline=None)
def test_mutated_headers_are_judged_as_safetensors_judges_them(workshop: Path, drawn: tuple[bytes, int]) -> None:
    compare(workshop, *drawn)


def test_large_headers_do_not_take_long(tmp_path: Path) -> None:
    """A hundred thousand tensors in a fraction of a second; the bound is for machines that do much else."""
    count, path = 100_000, tmp_path / "model.safetensors"
    header = json.dumps(
        {
            f"layers.{i // 100}.experts.{i % 100}.weight": {
                "dtype": "BF16",
                "shape": [1, 2],
                "data_offsets": [i * 4, i * 4 + 4],
            }
            for i in range(count)
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * count)
    start = time.monotonic()
    checkpoint = open_checkpoint(path)
    assert time.monotonic() - start < 10
    assert checkpoint.tensor_count == count


def test_known_writers_take_the_fast_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(header: bytes) -> Any:
        raise AssertionError("the slow way")

    monkeypatch.setattr(sidecar.checkpoint, "_peculiar", unexpected)
    one_of_each().write(tmp_path / "a.safetensors")
    read_header(tmp_path / "a.safetensors")
    put(tmp_path / "b.safetensors", "x:y", "block-0.w", metadata={"a:b": json.dumps({"k": ["-0.5", "é\n"]})})
    read_header(tmp_path / "b.safetensors")


# Directories


def test_one_file_in_a_directory(tmp_path: Path) -> None:
    put(tmp_path / "llama" / "model.safetensors", "a", "b")
    checkpoint = open_checkpoint(str(tmp_path / "llama") + "/")
    assert (checkpoint.name, checkpoint.path, checkpoint.root) == ("llama", tmp_path / "llama", tmp_path / "llama")
    assert names(checkpoint) == {"model.safetensors": ["a", "b"]}
    assert (checkpoint.tensor_count, checkpoint.nbytes, checkpoint.notes) == (2, 16, ())
    assert open_checkpoint(tmp_path / "llama", "other").name == "other"


def test_many_files_without_an_index(tmp_path: Path) -> None:
    for i in range(200):
        put(tmp_path / f"part-{i:03}.safetensors", f"t{i}")
    (tmp_path / "._part-000.safetensors").write_bytes(b"droppings of another system")
    assert list(names(open_checkpoint(tmp_path))) == [f"part-{i:03}.safetensors" for i in range(200)]


@pytest.mark.parametrize(
    "index",
    [
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "model.fp16.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "consolidated.safetensors.index.json",
    ],
)
def test_an_index_decides(tmp_path: Path, index: str) -> None:
    put(tmp_path / "model-1.safetensors", "a", "not named")
    put(tmp_path / "parts" / "model-2.safetensors", "b")
    put(tmp_path / "whole.safetensors", "a", "b")
    put_index(tmp_path / index, {"b": "./parts/model-2.safetensors", "a": "model-1.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert names(checkpoint) == {"model-1.safetensors": ["a", "not named"], "parts/model-2.safetensors": ["b"]}
    (note,) = checkpoint.notes
    assert "whole.safetensors" in note and index in note


def test_the_plain_index_wins_over_others_and_any_may_be_chosen(tmp_path: Path) -> None:
    put(tmp_path / "model-1.safetensors", "a")
    put(tmp_path / "consolidated-1.safetensors", "x")
    put_index(tmp_path / "model.safetensors.index.json", {"a": "model-1.safetensors"})
    put_index(tmp_path / "consolidated.safetensors.index.json", {"x": "consolidated-1.safetensors"})
    assert names(open_checkpoint(tmp_path)) == {"model-1.safetensors": ["a"]}
    chosen = open_checkpoint(tmp_path / "consolidated.safetensors.index.json")
    assert names(chosen) == {"consolidated-1.safetensors": ["x"]}
    assert (chosen.name, chosen.root) == (tmp_path.name, tmp_path)


def test_the_plain_file_wins_over_its_variants(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "a")
    put(tmp_path / "model.fp16.safetensors", "a")
    put(tmp_path / "model.bf16-00001-of-00001.safetensors", "a")
    put_index(tmp_path / "model.safetensors.index.bf16.json", {"a": "model.bf16-00001-of-00001.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert names(checkpoint) == {"model.safetensors": ["a"]}
    assert "model.fp16.safetensors" in checkpoint.notes[0]
    assert names(open_checkpoint(tmp_path / "model.fp16.safetensors")) == {"model.fp16.safetensors": ["a"]}


def test_a_lone_variant_is_the_model(tmp_path: Path) -> None:
    put(tmp_path / "model.fp16.safetensors", "a")
    assert names(open_checkpoint(tmp_path)) == {"model.fp16.safetensors": ["a"]}


def test_a_diffusers_pipeline(tmp_path: Path) -> None:
    """One checkpoint; each folder has its own index and its own tensor names."""
    put(tmp_path / "unet" / "diffusion_pytorch_model-1.safetensors", "conv.weight")
    put_index(
        tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json",
        {"conv.weight": "diffusion_pytorch_model-1.safetensors"},
    )
    put(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", "conv.weight")
    put(tmp_path / "vae" / "diffusion_pytorch_model.fp16.safetensors", "conv.weight")
    put(tmp_path / "old_unet" / "diffusion_pytorch_model.safetensors", "conv.weight")
    put(tmp_path / "everything.safetensors", "conv.weight")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    described = {
        "_class_name": "P",
        "unet": ["diffusers", "U"],
        "vae": ["diffusers", "V"],
        "scheduler": ["diffusers", "S"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(described))
    checkpoint = open_checkpoint(tmp_path)
    assert [(shard.component, shard.name) for shard in checkpoint.shards] == [
        ("unet", "unet/diffusion_pytorch_model-1.safetensors"),
        ("vae", "vae/diffusion_pytorch_model.safetensors"),
    ]
    assert checkpoint.tensor_count == 2
    assert set(checkpoint.config) == {"model_index.json", "vae/config.json"}
    assert checkpoint.shards[1].path == tmp_path / "vae" / "diffusion_pytorch_model.safetensors"


def test_a_sentence_transformers_model(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "encoder.weight", "linear.weight")
    put(tmp_path / "2_Dense" / "model.safetensors", "linear.weight")
    put(tmp_path / "onnx" / "model.safetensors", "unrelated")
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"idx": i, "path": path} for i, path in enumerate(["", "1_Pooling", "2_Dense"])]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense" / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert names(checkpoint) == {
        "model.safetensors": ["encoder.weight", "linear.weight"],
        "2_Dense/model.safetensors": ["linear.weight"],
    }
    assert [shard.component for shard in checkpoint.shards] == ["", "2_Dense"]
    assert set(checkpoint.config) == {"modules.json", "2_Dense/config.json"}


def test_the_hugging_face_cache(tmp_path: Path) -> None:
    """Snapshots are symbolic links to blobs, and the model's name is in the folder's."""
    repository = tmp_path / "hub" / "models--meta-llama--Llama-3.2-1B"
    blob = put(repository / "blobs" / "e3b0c442", "a")
    (repository / "blobs" / "44136fa3").write_text('{"model_type": "llama"}')
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/e3b0c442")
    (snapshot / "config.json").symlink_to("../../blobs/44136fa3")
    checkpoint = open_checkpoint(snapshot)
    (shard,) = checkpoint.shards
    assert checkpoint.name == "meta-llama/Llama-3.2-1B"
    assert (shard.name, shard.path, shard.real) == ("model.safetensors", snapshot / "model.safetensors", blob.resolve())
    assert shard.stat.ino == blob.stat().st_ino
    assert checkpoint.config == {"config.json": hashlib.blake2b(b'{"model_type": "llama"}', digest_size=16).hexdigest()}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/llama", "llama"),
        ("/models/llama/model.safetensors", "llama"),
        ("/models/llama/model.safetensors.index.json", "llama"),
        ("/models/loras/style.safetensors", "style"),
        (f"/hub/models--gpt2/snapshots/{REVISION}", "gpt2"),
        (f"/hub/models--a--b-c/snapshots/{REVISION}/unet", "a/b-c/unet"),
        (f"/hub/models--a--b/snapshots/{REVISION}/model.safetensors", "a/b"),
        (f"/hub/models--a--b/snapshots/{REVISION}/ema.safetensors", "a/b/ema"),
        (f"/hub/datasets--a--b/snapshots/{REVISION}", REVISION),
    ],
)
def test_default_names(path: str, name: str) -> None:
    assert default_name(Path(path)) == name


def test_companions_are_part_of_the_identity(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "a")
    for name in (
        "config.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "tokenizer.json",
        "generation_config.json",
    ):
        (tmp_path / name).write_text(name)
    config = open_checkpoint(tmp_path).config
    assert set(config) == {"config.json", "hf_quant_config.json", "quantize_config.json"}
    assert open_checkpoint(tmp_path / "model.safetensors").config == config
    (tmp_path / "config.json").write_text("other")
    assert open_checkpoint(tmp_path).config["config.json"] != config["config.json"]


def test_nothing_stays_open(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "a")
    before = os.listdir("/proc/self/fd")
    open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    assert os.listdir("/proc/self/fd") == before
