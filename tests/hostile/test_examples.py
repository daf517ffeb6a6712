"""The folder of hostile examples: each is refused, by type, for the reason that it was put there for.

An example says which reader it is for (`what`), why it would do harm (`why`), what the refusal says (`says`, a regular
expression), and has a `document` of JSON, or a `text` that is repeated `times` over.
"""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import attachment, catalog, manifest, posix
from engine_shim.handoff.catalog import Catalog, ControlPage
from engine_shim.handoff.errors import Damaged
from engine_shim.handoff.names import PoolPaths
from tests.hostile import readers

FOLDER = Path(__file__).parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    example: dict[str, Any] = json.loads(path.read_text())
    return example


def data_of(example: dict[str, Any]) -> bytes:
    if "document" in example:
        return json.dumps(example["document"]).encode()
    text: str = example["text"]
    return text.encode("latin-1", "replace") * example.get("times", 1)


def judge(example: dict[str, Any], data: bytes, paths: PoolPaths) -> None:
    if example["what"] == "header":
        readers.header_of(data, example["data"])
    elif example["what"] == "catalog":
        page = ControlPage.create_or_open(paths)
        try:
            slot = catalog._SLOT.pack(7, len(data), catalog._digest(7, data))
            posix.write_exactly(page.fd, slot + data, catalog.SLOT_OFFSET, paths.control)
            page.read()
        finally:
            page.close()
            paths.control.unlink()
    else:
        readers.READERS[example["what"]](data)


@pytest.mark.parametrize("library", ["orjson", "json"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_refused(path: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "json":
        monkeypatch.setattr(manifest, "orjson", None)
    example = load(path)
    data = data_of(example)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(readers.REFUSALS) as caught:
            judge(example, data, PoolPaths("p", tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert re.search(example["says"], str(caught.value)), str(caught.value)[:500]
    assert "\n" not in str(caught.value)
    assert peak < 64 * len(data) + (4 << 20), "a small lie took much memory"
    assert time.process_time() - began < 5
    if len(data) < 10_000:
        assert len(str(caught.value)) < 1200, "it prints what it was given"


def test_the_folder_covers_every_reader() -> None:
    kinds = {load(path)["what"] for path in EXAMPLES}
    assert kinds == {"manifest", "catalog", "attachment", "request", "answer", "header"}
    assert len(EXAMPLES) > 80


def test_what_the_examples_are_made_from_is_sound() -> None:
    """Otherwise they would be refused for nothing."""
    for path in EXAMPLES:
        example = load(path)
        if example["what"] == "manifest" and path.stem == "manifest-offset-odd":
            example["document"]["tensors"][0][5] = 0
            readers.read_manifest(data_of(example))
        if example["what"] == "catalog" and path.stem == "catalog-number-negative":
            example["document"]["generations"][0]["number"] = 1
            readers.read_catalog(data_of(example))


def test_a_sparse_manifest_is_not_read(tmp_path: Path) -> None:
    """A gigabyte of holes costs its maker nothing."""
    path = tmp_path / "ballast-p.g1.manifest"
    fd = posix.create(path)
    os.ftruncate(fd, 1 << 30)
    posix.write_exactly(fd, manifest._HEADER.pack(manifest.MAGIC, manifest.FORMAT, 0, (1 << 30) - 56, bytes(32)), 0, path)
    os.close(fd)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="mostly holes"):
            manifest.read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_record_is_read_no_further_than_makes_sense(tmp_path: Path) -> None:
    paths = PoolPaths("p", tmp_path)
    token = attachment.Token.take(paths, 1, "m")
    assert token._fd is not None
    os.ftruncate(token._fd, 1 << 34)
    tracemalloc.start()
    try:
        assert [record.generation for record in attachment.alive(paths)] == [-1]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        token.release()


def test_a_slot_that_lies_about_its_length(tmp_path: Path) -> None:
    page = ControlPage.create_or_open(PoolPaths("p", tmp_path))
    page.write(Catalog("ab" * 16))
    for length in (catalog.SLOT_SIZE, 1 << 40, (1 << 64) - 1):
        posix.write_exactly(page.fd, catalog._SLOT.pack(9, length, bytes(32)), catalog.SLOT_OFFSET, page.paths.control)
        with pytest.raises(Damaged, match="torn"):
            page.read()
    page.close()
