"""Names: what is refused, what comes back from a directory listing, and that no pool ever sees another's objects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.handoff import names
from engine_shim.handoff.errors import NameRefused
from engine_shim.handoff.names import PoolPaths, check_model, check_pool, new_id, pools, temporary

pool_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
numbers = st.integers(0, 10**9 - 1)
identifiers = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)


@given(pool_names, numbers, numbers, identifiers, st.booleans())
def test_every_object_is_recognised_by_its_file_name(
    pool: str, generation: int, index: int, identifier: str, tmp: bool
) -> None:
    paths = PoolPaths(pool)
    for path, kind, number in (
        (paths.control, "ctl", None),
        (paths.manifest(generation), "manifest", generation),
        (paths.segment(generation, index), "segment", generation),
        (paths.attachment(identifier), "attachment", None),
        (paths.publication(identifier), "publication", None),
        (paths.publication_segment(identifier, index), "publication", None),
    ):
        if tmp:
            path = temporary(path)
        found = paths.parse(path.name)
        assert found is not None
        assert (found.file, found.kind, found.generation, found.tmp) == (path.name, kind, number, tmp)
        assert path.parent == paths.dir


@given(pool_names, pool_names, numbers)
def test_no_object_belongs_to_two_pools(one: str, other: str, number: int) -> None:
    for path in (PoolPaths(one).control, PoolPaths(one).manifest(number), PoolPaths(one).segment(number, number)):
        assert (PoolPaths(other).parse(path.name) is not None) == (one == other)
    for semaphore in (PoolPaths(one).guard, PoolPaths(one).bell):
        assert PoolPaths(one).parse(semaphore.lstrip("/")) is None  # or a sweep of files would meet them
        assert PoolPaths(one).parse(f"sem.{semaphore.lstrip('/')}") is None


@given(st.text(max_size=40))
def test_strange_files_are_nobodys(text: str) -> None:
    found = PoolPaths("p").parse(text)
    assert found is None or text.startswith("ballast-p.")


@pytest.mark.parametrize(
    "rest",
    ["", "x", "ctl ", "ctl\n", "ctl.x", "CTL", "g.manifest", "g1", "g1.manifest.bak", "g-1.manifest", "g1.w", "g1.w-1",
     "g1.wx", "gx.w1", f"g{'9' * 19}.manifest", "g\u0661.manifest", "a.", "a.0123", "a.0123456789ABCDEF", "a.0123456789abcdef0",
     "in.0123456789abcdef.w", "in.0123456789abcdef.manifest", "guard", "bell", "g1.w1.tmp.tmp", "g1.w1.0123.tmp"],
)  # fmt: skip
def test_near_misses_are_nobodys(rest: str) -> None:
    assert PoolPaths("p").parse(f"ballast-p.{rest}") is None


@given(st.text(max_size=80))
def test_a_pool_is_called_by_what_can_be_in_a_file_name(text: str) -> None:
    try:
        check_pool(text)
    except NameRefused as error:
        assert repr(text) in str(error)
        return
    assert text.isascii() and "." not in text and "/" not in text and 0 < len(text) <= 64
    assert len(PoolPaths(text).segment(10**9, 10**9).name) < 255


@pytest.mark.parametrize(
    "name", ["", ".", "a.b", "a/b", "../a", "a b", "-a", "_a", "a\n", "a\0", "ä", "a" * 65, "\u0661"]
)
def test_odd_pool_names_are_refused(name: str) -> None:
    with pytest.raises(NameRefused, match="letters, digits"):
        PoolPaths(name)


@given(st.text(st.sampled_from("aZ0._-/ \n\0é"), max_size=20) | st.text(max_size=300))
def test_a_model_is_called_by_what_is_safe_to_print_and_to_join(text: str) -> None:
    try:
        check_model(text)
    except NameRefused as error:
        assert repr(text) in str(error)
        return
    assert text.isascii() and text.isprintable() and " " not in text
    assert not text.startswith(("/", ".", "-")) and not text.endswith("/")
    assert "//" not in text and ".." not in text and len(text) <= 256


def test_names_that_people_use_are_accepted() -> None:
    for name in ("llama", "meta-llama/Llama-3.1-8B", "a", "0", "org/team/model_v1.0", "x" * 256):
        assert check_model(name) == name
    for name in ("main", "a", "0", "Team_1-a", "x" * 64):
        assert check_pool(name) == name


def test_the_environment_names_the_pool(tmp_path: Path) -> None:
    assert PoolPaths.from_environment({}) == PoolPaths("main", Path("/dev/shm"))
    environ = {"BALLAST_POOL": "p", "BALLAST_DIR": str(tmp_path)}
    assert PoolPaths.from_environment(environ) == PoolPaths("p", tmp_path)
    assert PoolPaths.from_environment(environ, pool="q") == PoolPaths("q", tmp_path)
    with pytest.raises(NameRefused):
        PoolPaths.from_environment({"BALLAST_POOL": "../p"})


def test_a_directory_lists_what_is_ours(tmp_path: Path) -> None:
    one, two = PoolPaths("one", tmp_path), PoolPaths("two-2", tmp_path)
    made = [one.control, one.manifest(1), temporary(one.segment(1, 0)), one.attachment(new_id())]
    for path in [*made, two.segment(7, 3), tmp_path / "ballast-one.x", tmp_path / "ballast-three", tmp_path / "other"]:
        path.touch()
    (tmp_path / "ballast-four.x").touch()
    assert {name.file for name in one.objects()} == {path.name for path in made}
    assert [name.file for name in two.objects()] == [two.segment(7, 3).name]
    assert pools(tmp_path) == ["one", "two-2"]
    assert pools(tmp_path / "absent") == []
    assert PoolPaths("one", tmp_path / "absent").objects() == []


def test_identifiers_do_not_repeat() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000
    assert temporary(Path("/x/y")) != temporary(Path("/x/y"))
    assert names.TMP == ".tmp"
