"""--max-bytes: nobody's models go, the least recently used first; what is held or pinned stays; otherwise a no with numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import attachment
from engine_shim.handoff.catalog import ENGINE, READY, Generation
from engine_shim.handoff.errors import NameRefused, NoRoom
from sidecar.budget import Budget, Postponed, parse_size
from sidecar.scrub import Scrubber
from tests.generations.parts import checkpoint
from tests.generations.states import publish
from tests.never_wrong.loading import Loading
from tests.processes import Sidecar, ballast

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [("40G", 40 << 30), ("40GiB", 40 << 30), ("40 gb", 40 << 30), ("1.5T", 3 << 39), ("512m", 1 << 29), ("7k", 7168), ("8", 8)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "40X", "4 0", "1e9", "40iB", "nan", "٤G", "40GG"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(NameRefused, match="is not a size: write it like"):
        parse_size(text)


class Shelf:
    """Models of 6 MiB in a pool with a budget."""

    def __init__(self, filled: Loading, folder: Path, limit: int | None, pinned: tuple[str, ...] = ()) -> None:
        self.filled = filled
        self.folder = folder
        self.gone: list[str] = []
        self.budget = filled._sidecar._budget = Budget(limit, pinned)

    def load(self, name: str, seed: int = 1) -> Generation:
        """As if it had been asked for."""
        self.room(name)
        return self.filled.load(checkpoint(self.folder / name, seed), name)

    def room(self, name: str, **more: Any) -> None:
        self.budget.make_room(self.filled.pool, name, 6 * MIB, lambda g: self.gone.append(g.model), **more)


@pytest.fixture
def shelf(filled: Loading, tmp_path: Path) -> Shelf:
    return Shelf(filled, tmp_path, 21 * MIB)


def test_the_least_recently_used_goes(shelf: Shelf) -> None:
    first = shelf.load("a")
    for name in "bc":
        shelf.load(name)
    with_a = attachment.Token.take(shelf.filled.paths, first.number, "a")
    shelf.budget.look(shelf.filled.pool)
    with_a.release()
    shelf.load("d")
    assert shelf.gone == ["b"], "a was used after it"
    assert not shelf.filled.paths.segment(2, 0).exists()
    shelf.load("e")
    assert shelf.gone == ["b", "c"]


def test_the_scrubber_is_no_user(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads goes like anything else; it lets go after a block, and is waited for, so that the room is there."""
    for name in "abc":
        shelf.load(name)
    pool = shelf.filled.pool
    last = [shelf.budget.last_used(generation) for generation in pool.catalog.generations]
    scrubber = Scrubber(pool, 0.01, lambda _: None, rate=16 * MIB)  # a third of a second for each
    scrubber.start()
    try:
        deadline = time.monotonic() + 10
        while pool.held() != {1}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shelf.budget.look(pool)
        assert [shelf.budget.last_used(generation) for generation in pool.catalog.generations] == last
        shelf.room("d")
        assert shelf.gone == ["a"] and not shelf.filled.paths.segment(1, 0).exists()
        assert [g.state for g in pool.catalog.generations] == [READY, READY], "and it has taken nothing for damaged"
    finally:
        assert scrubber.stop(5)


def test_attached_and_pinned_ones_stay(filled: Loading, tmp_path: Path) -> None:
    shelf = Shelf(filled, tmp_path, 21 * MIB, ("a",))
    for name in "abc":
        shelf.load(name)
    [b] = filled.pool.ready("b")
    token = attachment.Token.take(filled.paths, b.number, "b")
    shelf.load("d")
    assert shelf.gone == ["c"]
    other = attachment.Token.take(filled.paths, filled.pool.ready("d")[0].number, "d")
    with pytest.raises(NoRoom) as caught:
        shelf.room("e")
    for part in (
        "'e' needs 6.00 MiB, and of --max-bytes 21.00 MiB the pool holds 18.5", "a 1 (6.00 MiB, pinned)",
        "b 2 (6.00 MiB, attached)", "d 4 (6.00 MiB, attached)", "raise it, stop an engine, or pin less",
    ):  # fmt: skip
        assert part in str(caught.value), caught.value
    assert {g.model for g in filled.pool.catalog.generations} == {"a", "b", "d"}, "nothing went in vain"
    token.release()
    other.release()


def test_nothing_goes_in_vain(shelf: Shelf) -> None:
    for name in "abc":
        shelf.load(name)
    tokens = [attachment.Token.take(shelf.filled.paths, number, "x") for number in (1, 2)]
    with pytest.raises(NoRoom, match=r"c 3 \(6.00 MiB, would go\)"):
        shelf.budget.make_room(shelf.filled.pool, "d", 12 * MIB, lambda g: shelf.gone.append(g.model))
    assert not shelf.gone and shelf.filled.pool.ready("c")
    for token in tokens:
        token.release()


def test_previous_generations_go_before_anybodys_newest(shelf: Shelf) -> None:
    shelf.load("a")
    shelf.load("a", 2)
    shelf.load("b")
    shelf.room("c")
    assert not shelf.gone
    assert [g.number for g in shelf.filled.pool.ready("a")] == [2]


def test_more_than_the_whole_budget(shelf: Shelf) -> None:
    shelf.load("a")
    with pytest.raises(NoRoom, match=r"'big' needs 40.00 MiB and --max-bytes allows the whole pool 21.00 MiB: raise it"):
        shelf.budget.make_room(shelf.filled.pool, "big", 40 * MIB, lambda g: shelf.gone.append(g.model))
    assert not shelf.gone


def test_who_was_not_asked_for_pushes_nobody_out(shelf: Shelf) -> None:
    for name in "abc":
        shelf.load(name)
    with pytest.raises(Postponed, match=r"waits to be asked for, to keep the pool within --max-bytes 21.00 MiB"):
        shelf.room("d", others=False)
    assert not shelf.gone


def test_a_rollbacks_segments_count_once(shelf: Shelf) -> None:
    from sidecar import history

    shelf.load("a")
    shelf.load("a", 2)
    history.rollback(shelf.filled.pool, "a")
    shelf.filled.pool.collect()
    shelf.load("b")  # 6 + 6 + 6 MiB: with the linked one counted twice it would not fit
    assert not shelf.gone and len(shelf.filled.pool.ready("a")) == 2


def test_what_is_evicted_leaves_nothing_older_in_its_place(shelf: Shelf) -> None:
    """An engine that is attached to older weights keeps them; who asks for the model by name does not get them."""
    pool = shelf.filled.pool
    held = attachment.Token.take(shelf.filled.paths, shelf.load("a").number, "a")
    shelf.load("a", 2)
    pinned = attachment.Token.take(shelf.filled.paths, shelf.load("b").number, "b")
    shelf.room("c")
    assert shelf.gone == ["a"]
    assert not pool.ready("a")
    assert shelf.filled.paths.segment(1, 0).exists()
    for token in (held, pinned):
        token.release()
    pool.collect()
    assert not shelf.filled.paths.segment(1, 0).exists()


def test_what_was_rolled_back_to_is_not_evicted(shelf: Shelf) -> None:
    """It is on no disk any more: what would be loaded in its place is what somebody went back from."""
    from sidecar import history

    for seed in (1, 2):
        shelf.load("a", seed)
    history.rollback(shelf.filled.pool, "a")
    shelf.load("b")
    for name in "cd":
        shelf.load(name)
    assert shelf.gone == ["b"], "after generation 2 of a, which nobody serves"
    assert [g.number for g in shelf.filled.pool.ready("a")] == [3]


def test_what_engines_publish_is_within_the_budget(filled: Loading, tmp_path: Path) -> None:
    shelf = Shelf(filled, tmp_path, 21 * MIB, ("a",))
    filled.pool.admit = filled._sidecar._admit
    shelf.load("a")
    shelf.load("b")
    assert filled.pool.adopt_publication(publish(filled.paths, "a", "k1", 6 * MIB))
    assert filled.pool.ready("b")
    assert filled.pool.adopt_publication(publish(filled.paths, "a", "k2", 6 * MIB))
    assert not filled.pool.ready("b"), "nobody uses it"
    assert not filled.pool.adopt_publication(publish(filled.paths, "a", "k3", 12 * MIB))
    [refused] = filled.pool.catalog.of_model("a", "failed")
    assert "'a' needs 12.00 MiB, and of --max-bytes 21.00 MiB" in refused.reason
    assert len(filled.pool.ready("a", ENGINE)) == 2
    assert not filled.pool.publications(), "its bytes are gone again"


@pytest.mark.slow
def test_a_sidecar_with_more_models_than_memory(pool_name: str, tmp_path: Path) -> None:
    """The first ones are loaded, the others when somebody asks; who is pushed out can be asked for again."""
    folders = [checkpoint(tmp_path / name, seed) for seed, name in enumerate("abc")]
    with Sidecar(pool_name, *folders, args=["--max-bytes", "14M", "--pin", "a"]) as sidecar:
        sidecar.ready("a")
        sidecar.ready("b")
        sidecar.ready("c", "failed")
        assert [g.model for g in sidecar.catalog.generations if g.evicted] == ["c"]
        done = ballast("wait", "--pool", pool_name, "--timeout", "0")
        assert done.returncode == 0, "ready as far as it can be"
        done = ballast("wait", "c", "--pool", pool_name, "--timeout", "0")
        assert done.returncode == 3 and "'ballast wait c' has it loaded" in done.stderr
        assert ballast("wait", "c", "--pool", pool_name).returncode == 0
        assert [g.model for g in sidecar.catalog.generations if g.evicted] == ["b"]
        assert ballast("wait", "b", "--pool", pool_name).returncode == 0
        assert {g.model for g in sidecar.catalog.generations if g.state == "ready"} == {"a", "b"}
        token = attachment.Token.take(sidecar.paths, sidecar.ready("b").number, "b")
        done = ballast("wait", "c", "--pool", pool_name)
        assert done.returncode == 1 and "attached" in done.stderr and "14.00 MiB" in done.stderr
        token.release()


@pytest.mark.parametrize(
    ("args", "words"), [(["--max-bytes", "lots"], "is not a size"), (["--pin", "nobody"], "serves no such model but a")]
)
def test_bad_usage(args: list[str], words: str, pool_name: str, tmp_path: Path) -> None:
    done = ballast("serve", str(checkpoint(tmp_path / "a", 1)), "--pool", pool_name, *args)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
