"""Checkpoints that cannot be served: each is refused at once, in one sentence that names it and says what to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sidecar.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoints import entry, write

NOBODY = 65534


@contextmanager
def soon() -> Iterator[None]:
    """Fail instead of hanging where a pipe is opened and nobody writes."""

    def late(*_: object) -> None:
        raise TimeoutError("still waiting after five seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(path: Path) -> str:
    with soon(), pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def refused(path: Path, about: Path | str, *words: str) -> None:
    """`path` is refused in one printable sentence with a remedy, about `about`, that holds these words."""
    sentence = refusal(path)
    assert sentence.startswith(str(about))
    assert sentence.isprintable() and ";" in sentence and not sentence.endswith(".")
    for word in words:
        assert word in sentence, sentence


def put(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, {name: entry("F32", (2,), seed) for seed, name in enumerate(names)})
    return path


def put_header(path: Path, header: Any, data_bytes: int = 0) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes))
    return path


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# The path


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "absent", tmp_path / "absent", "does not exist", "hf download")
    refused(tmp_path / "absent" / "model.safetensors", tmp_path / "absent", "does not exist")
    put(tmp_path / "model.safetensors", "a")
    refused(tmp_path / "model.safetensors" / "x", tmp_path, "does not exist")
    refused(tmp_path / "a\0b", repr(str(tmp_path / "a\0b")), "does not exist")


def test_no_directory_and_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", tmp_path / "pipe", "pipe, socket or device")
    refused(Path("/dev/null"), "/dev/null", "pipe, socket or device")


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    put(Path(os.fsdecode(folder)) / "model.safetensors", "a")
    assert "not UTF-8" in refusal(Path(os.fsdecode(folder)))
    put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff.safetensors")), "a")
    assert "not UTF-8" in refusal(tmp_path)


# Directories without weights, or with others


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, tmp_path, "holds no .safetensors file")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, tmp_path, "finish the download")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "v1-5.ckpt"])
def test_pickled_weights_only(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, tmp_path, name, "pickled", "unpickling runs code", "save_pretrained")


def test_gguf_only(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    refused(tmp_path, tmp_path, "GGUF", 'gguf_file="model-q4.gguf"', "save_pretrained")
    refused(tmp_path / "model-q4.gguf", tmp_path / "model-q4.gguf", "GGUF", "save_pretrained")


def test_the_weights_are_a_folder_further(tmp_path: Path) -> None:
    put(tmp_path / "llama" / "model.safetensors", "a")
    put(tmp_path / "qwen" / "model.safetensors", "a")
    refused(tmp_path, tmp_path, "its folders do", "llama, qwen")


def test_a_repository_of_the_cache_instead_of_a_snapshot(tmp_path: Path) -> None:
    put(tmp_path / "snapshots" / "0123" / "model.safetensors", "a")
    (tmp_path / "blobs").mkdir()
    refused(tmp_path, tmp_path, "give one of its snapshots")


def test_one_name_in_two_files(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", "a", "b")
    put(tmp_path / "consolidated.safetensors", "b", "c")
    refused(tmp_path, tmp_path, "'b'", "consolidated.safetensors, model.safetensors", "give one file")


def test_one_name_in_two_files_of_an_index(tmp_path: Path) -> None:
    put(tmp_path / "1.safetensors", "a")
    put(tmp_path / "2.safetensors", "b", "a")
    put_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    refused(tmp_path, tmp_path, "'a'", "1.safetensors, 2.safetensors")


# The index


def put_index(folder: Path, weight_map: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_an_index_names_a_missing_file(tmp_path: Path) -> None:
    put(tmp_path / "1.safetensors", "a")
    index = put_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    refused(tmp_path, index, "'2.safetensors', which is missing", "finish the download")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b'{"weight_map": {"a": "1.saf', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"[]", "no weight_map"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": ["a"]}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "no file name for tensor 'a'"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    put(tmp_path / "1.safetensors", "a")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    refused(tmp_path, index, words)
    refused(index, index, words)


@pytest.mark.parametrize(
    "name", ["../1.safetensors", "/etc/passwd", "x/../../1.safetensors", "..", "", "a\0b", "\ud800"]
)
def test_an_index_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    put(tmp_path / "1.safetensors", "a")
    (tmp_path / "model").mkdir()
    index = put_index(tmp_path / "model", {"a": name})
    refused(tmp_path / "model", index, "not one within its own folder")


def test_an_index_of_another_version(tmp_path: Path) -> None:
    put(tmp_path / "1.safetensors", "a")
    put(tmp_path / "2.safetensors", "b")
    index = put_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "": "2.safetensors"})
    refused(
        tmp_path, index, "tensor 'b' is in '1.safetensors', but '2.safetensors' holds it", "download all of them again"
    )
    put_index(tmp_path, {"a": "1.safetensors", "c\n": "2.safetensors"})
    refused(tmp_path, index, r"tensor 'c\n' is in '2.safetensors', but no file holds it")


def test_an_index_names_something_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04\0\0\x08\x08" + bytes(100))
    put_index(tmp_path, {"a": "pytorch_model.bin"})
    refused(tmp_path, tmp_path / "pytorch_model.bin", "pickled", "save_file")
    put_index(tmp_path, {"a": "."})
    refused(tmp_path, tmp_path, "is a directory")


def test_several_indexes(tmp_path: Path) -> None:
    put(tmp_path / "1.safetensors", "a")
    for name in ("x", "y"):
        put_index(tmp_path, {"a": "1.safetensors"}).rename(tmp_path / f"{name}.safetensors.index.json")
    refused(tmp_path, tmp_path, "x.safetensors.index.json, y.safetensors.index.json", "give one of them")


def test_descriptions_of_folders(tmp_path: Path) -> None:
    put(tmp_path / "unet" / "model.safetensors", "a")
    (tmp_path / "model_index.json").write_text("[]")
    refused(tmp_path, tmp_path / "model_index.json", "not a JSON object")
    (tmp_path / "model_index.json").write_text("{")
    refused(tmp_path, tmp_path / "model_index.json", "not JSON")
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "modules.json").write_text('[{"path": "../unet"}]')
    refused(tmp_path, tmp_path / "modules.json", "'../unet'", "not one within its own folder")


# Files that are no regular files, or not there


def test_a_directory_in_a_files_place(model: Path) -> None:
    model.mkdir()
    refused(model.parent, model, "is a directory")


def test_a_pipe_in_a_files_place(model: Path) -> None:
    os.mkfifo(model)
    refused(model.parent, model, "pipe, socket or device")


def test_a_socket_in_a_files_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(model.name)
        refused(model.parent, model, "pipe, socket or device")


def test_a_device_in_a_files_place(model: Path) -> None:
    model.symlink_to("/dev/zero")
    refused(model.parent, model, "pipe, socket or device")


def test_a_pipe_in_the_configs_place(model: Path) -> None:
    put(model, "a")
    os.mkfifo(model.parent / "config.json")
    refused(model.parent, model.parent / "config.json", "pipe, socket or device")


def test_a_pipe_in_the_indexs_place(model: Path) -> None:
    os.mkfifo(f"{model}.index.json")
    refused(model.parent, f"{model}.index.json", "pipe, socket or device")


def test_a_pipe_that_takes_a_files_place_at_the_last_moment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(model, "a")
    real_open = os.open

    def swap(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if Path(path) == model:
            model.unlink()
            os.mkfifo(model)
        return real_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", swap)
    refused(model, model, "pipe, socket or device")


def test_an_unfinished_download(model: Path) -> None:
    """The Hugging Face cache renames a blob when it is whole; until then it is called .incomplete."""
    (model.parent / "blobs").mkdir()
    (model.parent / "blobs" / "abc.incomplete").write_bytes(b"\0")
    model.symlink_to("blobs/abc")
    refused(model.parent, model, "blobs/abc", "missing", "download it again")
    put_index(model.parent, {"a": "model.safetensors"})
    refused(model.parent, model, "missing", "download it again")
    refused(model, model, "missing", "download it again")


def test_a_config_that_was_not_downloaded(model: Path) -> None:
    put(model, "a")
    (model.parent / "config.json").symlink_to("blobs/def")
    refused(model.parent, model.parent / "config.json", "missing", "download it again")


def test_a_loop_of_links(model: Path) -> None:
    model.symlink_to(model.name)
    refused(model.parent, model, "loop of symbolic links")
    refused(model, model, "loop of symbolic links")


def test_what_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, inner = put(folder / "model.safetensors", "a"), put(folder / "inner" / "model.safetensors", "a")
        folder.chmod(0o755)
        model.chmod(0)
        inner.parent.chmod(0)
        try:
            for path, about in ((folder, model), (model, model), (inner.parent, inner.parent), (inner, inner)):
                sentence = _as_nobody(partial(refusal, path))
                assert sentence.startswith(f"{about} may not be read by user"), sentence
                assert "; allow it" in sentence
        finally:
            inner.parent.chmod(0o755)


def _as_nobody(action: Callable[[], str]) -> str:
    """What `action` returns in a process without privileges."""
    if os.geteuid() != 0:
        return action()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, action().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def test_a_disk_that_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(model, "a")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    refused(model, model, "Input/output error", "check the disk")


# The content


def test_an_empty_file(model: Path) -> None:
    model.touch()
    refused(model.parent, model, "is empty")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", ("git lfs pull",)),
        (b"GGUF\x03\0\0\0" + bytes(50), ("GGUF", "save_pretrained")),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}.", ("pickled", "save_file")),
        (b"PK\x03\x04\0\0\x08\x08\0\0\0\0", ("pickled", "save_file")),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), ("HDF5", "save_file")),
        (b"<!DOCTYPE html><html>Access denied</html>", ("web page", "download the weights again")),
        (b'{"weight_map": {}}', ("JSON", "give the .safetensors file")),
        (b"weights\xff" + bytes(90), ("more than the 100000000 that safetensors allows",)),
        (struct.pack("<Q", 100_000_001) + bytes(20), ("has a header of 100000001 bytes",)),
    ],
)
def test_something_else(model: Path, content: bytes, words: tuple[str, ...]) -> None:
    model.write_bytes(content)
    refused(model.parent, model, *words)


def test_truncated_anywhere(model: Path) -> None:
    put(model, "a", "b")
    whole = model.read_bytes()
    for length in range(1, len(whole)):
        model.write_bytes(whole[:length])
        refused(model.parent, model, "cut off")
    model.write_bytes(whole + b"\0")
    refused(model.parent, model, "has 1 bytes behind its last tensor")


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        (b"", 0, "header that is not JSON (it is empty)"),
        (b"{", 0, "header that is not JSON"),
        (b'{"a":\xff}', 0, "header that is not JSON (str is not valid UTF-8"),
        (b'{"\\ud800":1}', 0, "header that is not JSON"),
        (b"{}" + bytes(6), 0, "header that is not JSON"),
        ([], 0, "header that is not a JSON object"),
        (None, 0, "header that is not a JSON object"),
        ({"a": None}, 0, "something else than a tensor's description for 'a'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "lacks dtype, shape or data_offsets for tensor 'a'"),
        (
            {"a": tensor("F33")},
            8,
            "unknown dtype 'F33'; save it in a dtype of safetensors 0.8, or look for a newer Ballast",
        ),
        ({"a": tensor("f32\n")}, 8, r"unknown dtype 'f32\n'"),
        ({"a": tensor(7)}, 8, "unknown dtype 7"),  # type: ignore[arg-type]
        ({"a": tensor(shape="2")}, 8, "malformed shape"),
        ({"a": tensor(shape=[2.0])}, 8, "not made of possible numbers"),
        ({"a": tensor(shape=[True, 2])}, 8, "not made of possible numbers"),
        ({"a": tensor(shape=[-2])}, 8, "not made of possible numbers"),
        ({"a": tensor(shape=[2**62, 0], offsets=[0, 0])}, 0, "not made of possible numbers"),
        ({"a": tensor(shape=[2**40, 2**40])}, 8, "overflows 64 bits"),
        ({"a": tensor(shape=[2**61])}, 8, "overflows 64 bits"),
        ({"a": tensor(shape=[2**40, 2**40, 0], offsets=[0, 0])}, 0, "overflows 64 bits"),
        ({"a": tensor(shape=[3])}, 8, "dtype and shape make 12 bytes and whose data_offsets 8"),
        ({"a": tensor(offsets=[8])}, 8, "malformed shape or data_offsets"),
        ({"a": tensor(offsets=[0, 8, 16])}, 8, "malformed shape or data_offsets"),
        ({"a": tensor(offsets=[8, 0])}, 8, "no range of bytes"),
        ({"a": tensor(offsets=[-8, 0])}, 8, "no range of bytes"),
        ({"a": tensor(offsets=[0, 8.0])}, 8, "no range of bytes"),
        ({"a": tensor(offsets=["0", "8"])}, 8, "no range of bytes"),
        ({"a": tensor(offsets=[0, 2**80])}, 8, "no range of bytes"),
        ({"a": tensor("F4", [3], [0, 2])}, 2, "packed F4 that does not end on a whole byte"),
        ({"a": tensor("F6_E3M2", [2], [0, 2])}, 2, "packed F6_E3M2 that does not end on a whole byte"),
        ({"a": tensor(offsets=[8, 16])}, 16, "bytes 8 to 16, which leaves a hole from byte 0 on"),
        (
            {"a": tensor(), "b": tensor(offsets=[12, 20])},
            20,
            "'b' at bytes 12 to 20, which leaves a hole from byte 8 on",
        ),
        ({"a": tensor(), "b": tensor(offsets=[4, 12])}, 12, "'b' at bytes 4 to 12, which overlaps the one before it"),
        ({"a": tensor(), "b": tensor(offsets=[0, 8])}, 8, "overlaps the one before it"),
        ({"a": tensor()}, 7, "promises 8 bytes of tensors, 7 are there"),
        ({"a": tensor(offsets=[2**50, 2**50 + 8])}, 8, "leaves a hole"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ that is not an object of strings"),
        ({"__metadata__": "pt"}, 0, "__metadata__ that is not an object of strings"),
        ({"__metadata__": tensor()}, 8, "__metadata__ that is not an object of strings"),
        (b'{"__metadata__":{},"__metadata__":{}}', 0, "two __metadata__"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "gives dtype of tensor 'a' twice"),
        (b'{"a":["U8",[0],[0,0]],"a":["U8",[0],[0,0]]}', 0, "has tensor 'a' twice"),
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", 0, "nested more than 127 deep"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", 0, "header that is not JSON"),
    ],
)
def test_damaged_headers(model: Path, header: Any, data_bytes: int, words: str) -> None:
    put_header(model, header, data_bytes)
    refused(model.parent, model, words)


def test_names_cannot_write_on_the_terminal(model: Path) -> None:
    put_header(model, {"\x1b[2J\n" + "x" * 100_000: tensor("F33")}, 8)
    assert len(refusal(model)) < 500
    folder = model.parent / "a\nb\x1b[2J"
    folder.mkdir()
    assert refusal(folder).isprintable()


def test_a_file_that_is_still_being_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(model, "a")
    real_pread, whole = os.pread, model.read_bytes()

    def grow(fd: int, length: int, offset: int) -> bytes:
        with model.open("ab") as file:
            file.write(b"\0")
        return real_pread(fd, length, offset)

    def shrink(fd: int, length: int, offset: int) -> bytes:
        os.truncate(model, 4)
        return real_pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", grow)
    refused(model, model, "changed while it was read", "try again")
    model.write_bytes(whole)
    monkeypatch.setattr(os, "pread", shrink)
    refused(model, model, "became shorter while it was read", "try again")


def test_a_companion_out_of_all_proportion(model: Path) -> None:
    put(model, "a")
    (model.parent / "config.json").touch()
    os.truncate(model.parent / "config.json", 1 << 40)
    refused(model.parent, model.parent / "config.json", "1099511627776 bytes", "more than")
