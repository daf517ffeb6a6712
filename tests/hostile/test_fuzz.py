"""Bytes that nobody has thought of: whatever reads them returns or refuses; no other error, no hang, no great allocation."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim.handoff import manifest, posix
from engine_shim.handoff.catalog import ENGINE, FAILED, READY
from engine_shim.handoff.names import PoolPaths
from tests.generations.states import publish
from tests.hostile import readers
from tests.hostile.test_examples import EXAMPLES, data_of, load
from tests.never_wrong.loading import Loading, loading
from tests.processes import environment

SECONDS = 12
drawn = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=8),
    st.sampled_from([0, 1, -1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, "", "..", "F32", "ready", "0123456789abcdef" * 2]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
seeds = [(load(path)["what"], load(path)) for path in EXAMPLES if "document" in load(path)]


def mutate(document: Any, path: list[float], value: Any) -> Any:
    """The document with one value replaced, at a place that the fractions of `path` lead to."""
    if not path or not isinstance(document, (dict, list)) or not document:
        return value
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = keys[int(path[0] * len(keys))]
    document[key] = mutate(document[key], path[1:], value)
    return document


@pytest.fixture(scope="module", autouse=True)
def page_goes() -> Iterator[None]:
    yield
    readers.forget_page()


def bounded(read: Callable[[bytes], None], data: bytes) -> None:
    tracemalloc.start()
    try:
        try:
            read(data)
        except readers.REFUSALS as refusal:
            assert "\n" not in str(refusal)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data) + (4 << 20)
    finally:
        tracemalloc.stop()


@given(st.sampled_from(seeds), st.lists(st.tuples(st.lists(st.floats(0, 0.999), max_size=5), values), min_size=1, max_size=3))
@drawn
def test_documents_with_other_values(seed: tuple[str, dict[str, Any]], changes: list[tuple[list[float], Any]]) -> None:
    what, example = seed
    example = copy.deepcopy(example)
    for path, value in changes:
        example["document"] = mutate(example["document"], path, value)
    data = json.dumps(example["document"]).encode()
    if what == "header":
        bounded(lambda header: readers.header_of(header, example["data"]), data)
    else:
        bounded(readers.READERS[what], data)


@given(st.sampled_from(sorted(readers.READERS)), st.binary(max_size=400))
@drawn
def test_any_bytes(reader: str, data: bytes) -> None:
    bounded(readers.READERS[reader], data)


@given(st.sampled_from(seeds), st.integers(0, 1 << 16), st.binary(max_size=6), st.integers(0, 40))
@drawn
def test_bytes_in_the_midst_of_sound_ones(seed: tuple[str, dict[str, Any]], at: int, new: bytes, gone: int) -> None:
    what, example = seed
    data = data_of(example)
    at %= len(data) + 1
    data = data[:at] + new + data[at + gone :]
    if what == "header":
        bounded(lambda header: readers.header_of(header, example["data"]), data)
    else:
        bounded(readers.READERS[what], data)


# What an engine publishes


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loading]:
    with loading(PoolPaths("p", tmp_path_factory.mktemp("pool"))) as filled:
        yield filled


@given(st.lists(st.tuples(st.lists(st.floats(0, 0.999), max_size=5), values), max_size=2), st.integers(0, 3), st.booleans())
@settings(parent=drawn, max_examples=60)
def test_publications(crowded: Loading, changes: list[tuple[list[float], Any]], damage: int, cut: bool) -> None:
    """It becomes a generation that keeps every rule, or is refused; and nothing of it is left lying about."""
    paths = crowded.paths
    identifier = publish(paths, "m", "key", 5000)
    place = paths.publication(identifier)
    document = json.loads(place.read_bytes()[manifest._HEADER.size :])
    for path, value in changes:
        document = mutate(document, path, value)
    place.unlink()
    fd = posix.create(place)
    posix.write_exactly(fd, readers.sealed(json.dumps(document).encode()), 0, place)
    os.close(fd)
    segment = paths.publication_segment(identifier, 0)
    if damage == 1:
        os.chmod(segment, 0o600)
        os.truncate(segment, 100)
    if damage == 2:
        segment.unlink()
    if damage == 3:
        os.chmod(segment, 0o666)
    before = {g.number for g in crowded.pool.catalog.generations}
    taken = crowded.pool.adopt_publication(identifier)
    assert not crowded.pool.publications()
    new = [g for g in crowded.pool.catalog.generations if g.number not in before]
    assert all(g.state == (READY if taken else FAILED) for g in new)
    for generation in new:
        if taken:
            assert damage == 0
            contents = manifest.read(paths.manifest(generation.number))
            readers.check_manifest(contents)
            for index, size in enumerate(contents.segments):
                assert paths.segment(generation.number, index).stat().st_size == size
        crowded.pool.drop(generation.number)
    crowded.pool.sweep()
    assert [name.file for name in paths.objects() if name.kind != "ctl"] == []


@pytest.mark.parametrize(
    "change", [{"kind": "checkpoint"}, {"complete": True}, {"engine": {}}, {"engine": {"key": 1}}], ids=str
)
def test_what_an_engine_must_not_say(crowded: Loading, change: dict[str, Any]) -> None:
    """That it publishes what files hold, say, which other engines would take for the model's own weights."""
    identifier = publish(crowded.paths, "m", "key", 5000)
    place = crowded.paths.publication(identifier)
    document = {**json.loads(place.read_bytes()[manifest._HEADER.size :]), **change}
    if "complete" in change:
        document["tensors"] = [[*row[:7], "0" * 32, row[8]] for row in document["tensors"]]
    place.unlink()
    fd = posix.create(place)
    posix.write_exactly(fd, readers.sealed(json.dumps(document).encode()), 0, place)
    os.close(fd)
    assert not crowded.pool.adopt_publication(identifier)
    [said] = [g for g in crowded.pool.catalog.generations if g.state == FAILED]
    assert "is not a publication of an engine's state" in said.reason and said.kind == ENGINE
    crowded.pool.drop(said.number)
    assert not crowded.pool.publications()


# Coverage-guided


@pytest.mark.slow
def test_guided_by_coverage(tmp_path: Path) -> None:
    """A short run of what `make fuzz` does for longer."""
    pytest.importorskip("atheris", reason="atheris is not installed: pip install '.[fuzz]', or run 'make fuzz'")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz", "all", "--seconds", str(SECONDS)],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert runs and int(runs[1]) > 1000, done.stderr[-1000:]
    assert not list(tmp_path.iterdir()), "it has written down an input that fails"
