"""New weights beside the old: engines keep what they have, new ones get the new, nothing piles up; and the way back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import engine_shim
from engine_shim import ladder
from engine_shim.handoff import attachment, request
from engine_shim.handoff.catalog import CHECKPOINT, ENGINE, FAILED, READY, RETIRED
from engine_shim.handoff.errors import HandoffError, NotFound
from engine_shim.handoff.names import PoolPaths
from sidecar import history, serve
from sidecar.pool import PoolWriter
from sidecar.scrub import Scrubber
from tests.generations.parts import checkpoint
from tests.generations.states import content, publish
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.never_wrong.loading import Loading, loading
from tests.processes import Sidecar, ballast

SIZE = 300_000


def held(model: str = "m") -> bytes:
    with engine_shim.open(model) as opened:
        return bytes(opened.tensors["t"].numpy().tobytes())


def shared_bytes(paths: PoolPaths) -> int:
    inodes = {}
    for name in paths.objects():
        status = os.stat(paths.dir / name.file)
        inodes[status.st_ino] = status.st_blocks * 512
    return sum(inodes.values())


def test_ten_updates_under_running_engines_leak_nothing(filled: Loading, tmp_path: Path) -> None:
    first = filled.load(checkpoint(tmp_path / "m", 0, SIZE))
    with Engine(filled.paths.pool) as engine:
        old = engine(engine_side.load, "open", "m", "first")
        filled.load(checkpoint(tmp_path / "m", 1, SIZE))
        baseline, descriptors = 0, 0
        for turn in range(2, 12):
            number = filled.load(checkpoint(tmp_path / "m", turn, SIZE)).number
            filled.pool.collect()
            filled.pool.sweep()
            assert held() == content(turn, SIZE), "a new engine gets the new weights"
            assert engine(engine_side.kept, "first") == old, "a running one keeps its own"
            ready = [g.number for g in filled.pool.ready("m")]
            assert ready == [number, number - 1]
            if turn == 2:
                baseline, descriptors = shared_bytes(filled.paths), len(os.listdir("/proc/self/fd"))
        assert shared_bytes(filled.paths) == baseline
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        kept = [g.number for g in filled.pool.catalog.generations if g.state == RETIRED]
        assert kept == [first.number], "the one that is held, and no other"
        view = ladder.pool()
        assert len(view._manifests) <= 3 and len(view._leases) <= 3, "nor does this process remember more"
    filled.pool.collect()
    assert not [g for g in filled.pool.catalog.generations if g.state == RETIRED]
    assert not list(attachment.alive(filled.paths))


def test_back_and_forward(filled: Loading, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    with pytest.raises(NotFound, match=r"only generation 1 of 'm' is there, so there is nothing to go back to"):
        history.rollback(filled.pool, "m")
    filled.load(checkpoint(folder, 2, SIZE))
    before = shared_bytes(filled.paths)
    with Engine(filled.paths.pool) as engine:
        mine = engine(engine_side.load, "open", "m", "mine")
        for wanted in (1, 2, 1, 2):
            history.rollback(filled.pool, "m")
            filled.pool.collect()
            assert held() == content(wanted, SIZE)
            assert engine(engine_side.kept, "mine") == mine
            assert len(filled.pool.ready("m")) == 2
            # One manifest, one record more or less; the weights are not copied.
            assert abs(shared_bytes(filled.paths) - before) < 64 << 10
    filled.pool.sweep()
    assert ballast("verify", "--pool", filled.paths.pool).returncode == 0


def test_who_opens_files_gets_what_the_files_hold(filled: Loading, tmp_path: Path) -> None:
    """A rollback is by name. The files on disk are still the new ones, and an engine was told to load them."""
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    filled.load(checkpoint(folder, 2, SIZE))
    history.rollback(filled.pool, "m")
    with Engine(filled.paths.pool, BALLAST_MODE="require") as engine:
        by_file = engine(engine_side.load, "safe_open", str(folder / "model.safetensors"), "file")
        assert engine(engine_side.segments), "out of memory all the same: the generation is kept"
        by_name = engine(engine_side.load, "open", "m")
    assert by_file != by_name
    assert held() == content(1, SIZE)


@pytest.mark.slow
def test_a_rollback_outlives_the_sidecar_and_ends_with_new_files(pool_paths: PoolPaths, tmp_path: Path) -> None:
    pool = pool_paths.pool
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    os.environ["BALLAST_POOL"] = pool
    try:
        with Sidecar(pool, folder) as sidecar:
            sidecar.ready("m")
            shutil.copytree(folder, tmp_path / "older")
            checkpoint(folder, 2, SIZE)
            sidecar.ready("m", above=1)
            done = ballast("rollback", "m", "--pool", pool)
            assert done.returncode == 0, done.stderr
            assert "generation 3, which holds what generation 1 held" in done.stdout
            assert held() == content(1, SIZE)
            sidecar.terminate()
        with Sidecar(pool, folder) as sidecar:
            # The files are still the new ones. That was so when somebody decided to go back.
            assert sidecar.says("adopted m, generation 3")
            assert held() == content(1, SIZE)
            shutil.copy(tmp_path / "older" / "model.safetensors", folder / "copy")
            (folder / "copy").rename(folder / "model.safetensors")
            assert sidecar.says("touched but not changed: generation 3 stays")
            checkpoint(folder, 4, SIZE)
            assert sidecar.ready("m", above=3)
            assert held() == content(4, SIZE)
    finally:
        del os.environ["BALLAST_POOL"]


def gone_back(filled: Loading, folder: Path) -> Path:
    """`m` leads to version 2, whose weights were rolled back from to those of version 1. Returns the link."""
    for seed in (1, 2, 3):
        checkpoint(folder / f"v{seed}", seed, SIZE)
    link = folder / "m"
    for version in (1, 2):
        lead(link, version)
        filled.load(link)
    assert history.rollback(filled.pool, "m").number == 3
    return link


def lead(link: Path, version: int) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(link.with_name(f"v{version}"))


def evicted(pool: PoolWriter) -> None:
    pool.retire(2)
    pool.collect()


def damaged(pool: PoolWriter) -> None:
    path = pool.paths.segment(2, 0)
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.write(b"another byte or two")
    path.chmod(0o400)
    assert Scrubber(pool, 1.0, lambda _: None).round() == 1


def lost(pool: PoolWriter) -> None:
    pool.paths.segment(2, 0).unlink()


@pytest.mark.parametrize("touched", [False, True], ids=["as_they_were", "touched"])
@pytest.mark.parametrize("deed", [evicted, damaged, lost])
def test_what_was_rolled_back_from_does_not_come_back(
    filled: Loading, tmp_path: Path, deed: Callable[[PoolWriter], None], touched: bool
) -> None:
    """Whatever becomes of the generation itself, its files do not undo the rollback, now or with the next sidecar."""
    link = gone_back(filled, tmp_path)
    deed(filled.pool)
    if touched:
        os.utime(link / "model.safetensors")
        model = serve.Model(link, "m")
        for _ in range(2):  # once they were read, their state is known
            if filled.look(model).generation is None:
                filled.see_to(model)
        assert model.generation == 3
    assert filled.adopt(link)
    assert held() == content(1, SIZE)
    assert filled.pool.ready("m")[0].number == 3


@pytest.mark.parametrize("between", [1, 3])
def test_a_rollback_ends_with_other_files(filled: Loading, tmp_path: Path, between: int) -> None:
    """Those that it went back to, too: after that the others are a new deployment."""
    link = gone_back(filled, tmp_path)
    for version in (between, 2):
        lead(link, version)
        filled.see_to(serve.Model(link, "m"))
        assert held() == content(version, SIZE)


def test_forward_again_is_no_rollback(filled: Loading, tmp_path: Path) -> None:
    link = gone_back(filled, tmp_path)
    assert history.rollback(filled.pool, "m").over == 0, "what the files hold is served"
    for version in (2, 1):
        lead(link, version)
        filled.see_to(serve.Model(link, "m"))
        assert held() == content(version, SIZE)


def test_files_that_are_put_back_are_not_loaded_again(filled: Loading, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    os.link(folder / "model.safetensors", tmp_path / "aside")
    filled.load(checkpoint(folder, 2, SIZE))
    segment = os.stat(filled.paths.segment(1, 0)).st_ino
    (tmp_path / "aside").rename(folder / "model.safetensors")
    back = filled.load(folder)
    assert back.number > 2 and held() == content(1, SIZE)
    assert os.stat(filled.paths.segment(back.number, 0)).st_ino == segment


def test_a_failure_is_over_once_the_files_are_back(filled: Loading, tmp_path: Path) -> None:
    """A sidecar that serves what it had does not go on saying that it cannot."""
    checkpoint(tmp_path / "v1", 1, SIZE)
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "model.safetensors").write_bytes(b"not a header")
    link = tmp_path / "m"
    link.symlink_to("v1")
    filled.load(link)
    link.unlink()
    link.symlink_to("v2")
    model = serve.Model(link, "m")
    assert filled.look(model).found is None
    assert [g.state for g in filled.pool.catalog.generations] == [READY, FAILED]
    link.unlink()
    link.symlink_to("v1")
    assert filled.look(model).generation == 1
    assert [g.state for g in filled.pool.catalog.generations] == [READY]


def test_what_differs_where_no_sample_looks_is_not_the_same(filled: Loading, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    path = folder / "model.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    for data in (bytes(changed), path.read_bytes(), bytes(changed)):
        (folder / "new").write_bytes(data)
        (folder / "new").rename(path)
        number = filled.load(folder).number
        assert held() == data[-SIZE:], number


def test_rollback_says_why_not(pool_name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("m")
        done = ballast("rollback", "m", "--pool", pool_name)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "nothing to go back to" in done.stderr
        done = ballast("rollback", "other", "--pool", pool_name)
        assert done.returncode == 1 and "does not serve 'other': it serves m" in done.stderr
        sidecar.terminate()
        done = ballast("rollback", "m", "--pool", pool_name)
        assert done.returncode == 3 and "no living sidecar" in done.stderr
        assert not [name for name in sidecar.paths.objects() if name.kind in ("request", "answer")]
    assert ballast("purge", "--pool", pool_name).returncode == 0
    assert ballast("rollback", "m", "--pool", pool_name).returncode == 3


def test_a_rollback_is_done_once_however_late_its_answer(
    filled: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        folder = checkpoint(tmp_path / "m", seed, SIZE)
        filled.load(folder)
    sidecar = filled._sidecar
    sidecar.models["m"] = serve.Model(folder, "m", generation=2)
    tried: list[request.Request] = []
    really = request.answer

    def answer(paths: PoolPaths, asked: request.Request, done: bool, text: str) -> None:
        tried.append(asked)
        if len(tried) < 3:
            raise HandoffError("too many open files")
        really(paths, asked, done, text)

    monkeypatch.setattr(request, "answer", answer)
    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(request.ask, filled.paths, request.ROLLBACK, "m")
        while not asking.done():
            sidecar._answer()
    assert "m serves generation 3, which holds what generation 1 held" in asking.result()
    assert [(g.number, g.over) for g in filled.pool.ready("m")] == [(3, 2), (2, 0)] and len(set(tried)) == 1
    sidecar._answer()
    assert not sidecar._answers


def test_only_what_is_there_is_gone_back_to(filled: Loading, tmp_path: Path) -> None:
    """One that was retired, freed, or lost a file in the same moment: a refusal, and the catalog as it was."""
    for seed in (1, 2, 3):
        filled.load(checkpoint(tmp_path / "m", seed, SIZE))
    pool, paths = filled.pool, filled.paths
    before = pool.catalog
    assert before.of_model("m", RETIRED)[0].number == 1
    with pytest.raises(NotFound, match="generation 1 is not there any more: see 'ballast status'"):
        pool.again(1)
    pool.collect()
    with pytest.raises(NotFound, match="generation 1 is not there any more"):
        pool.again(1)
    paths.segment(2, 0).rename(paths.dir / "ballast-away")
    with pytest.raises(NotFound, match=r"g2\.w0 is not there"):
        history.rollback(pool, "m")
    (paths.dir / "ballast-away").rename(paths.segment(2, 0))
    assert [g.number for g in pool.ready("m")] == [3, 2]
    assert history.rollback(pool, "m").over == 3


def test_states_go_with_their_weights(filled: Loading, tmp_path: Path) -> None:
    """An engine's state belongs to the weights that were newest when it came; it stays as long as they are kept."""
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    pool = filled.pool

    def states() -> list[str]:
        pool.collect()
        return sorted(g.key for g in pool.ready("m", ENGINE))

    filled.load(folder)
    assert pool.adopt_publication(publish(filled.paths, "m", "of-1"))
    assert pool.adopt_publication(publish(filled.paths, "other", "stranger"))
    filled.load(checkpoint(folder, 2, SIZE))
    assert pool.adopt_publication(publish(filled.paths, "m", "of-2"))
    assert states() == ["of-1", "of-2"], "both contents are kept"
    history.rollback(pool, "m")  # generation 1 under another number
    assert states() == ["of-1", "of-2"]
    filled.load(checkpoint(folder, 3, SIZE))
    assert states() == ["of-1"], "1 is kept as the one before 3, and 2 is not"
    filled.load(checkpoint(folder, 4, SIZE))
    assert states() == []
    assert [g.key for g in pool.ready("other", ENGINE)] == ["stranger"], "of files that the pool does not hold it knows nothing"


def test_a_state_that_an_engine_holds_stays_until_it_leaves(filled: Loading, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    filled.load(folder)
    assert filled.pool.adopt_publication(publish(filled.paths, "m", "k"))
    [state] = filled.pool.ready("m", ENGINE)
    token = attachment.Token.take(filled.paths, state.number, "m")
    for seed in (2, 3):
        filled.load(checkpoint(folder, seed, SIZE))
    filled.pool.collect()
    assert filled.paths.segment(state.number, 0).exists()
    token.release()
    filled.pool.collect()
    assert not filled.paths.segment(state.number, 0).exists()


def test_states_go_with_a_previous_generation_that_goes_first(filled: Loading, tmp_path: Path) -> None:
    """For room, for damage, or since the next sidecar finds it in pieces. With the newest they stay: it is loaded again."""
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    pool = filled.pool

    def states() -> list[str]:
        return sorted(g.key for g in pool.ready("m", ENGINE))

    for seed in (1, 2, 3):
        filled.load(checkpoint(folder, seed, SIZE))
        assert pool.adopt_publication(publish(filled.paths, "m", f"of-{seed}"))
    newest, previous = pool.ready("m")
    pool.retire(newest.number)
    assert states() == ["of-2", "of-3"]
    filled.load(folder)
    pool.retire(previous.number)
    assert states() == ["of-3"]
    filled.load(checkpoint(folder, 4, SIZE))
    filled.paths.segment(pool.ready("m")[1].number, 0).unlink()
    assert filled.adopt(folder)
    assert states() == []


def test_a_failure_is_over_once_another_publication_is_adopted(filled: Loading, tmp_path: Path) -> None:
    filled.load(checkpoint(tmp_path / "m", 1, SIZE))
    filled.pool.fail("m", "it was too large", kind=ENGINE)
    assert filled.pool.adopt_publication(publish(filled.paths, "m", "k"))
    assert [g.state for g in filled.pool.catalog.generations] == [READY, READY]


def test_one_name_in_two_pools(pool_name: str, tmp_path: Path) -> None:
    paths = [PoolPaths(f"{pool_name}-{end}") for end in "ab"]
    with loading(paths[0]) as one, loading(paths[1]) as two:
        one.load(checkpoint(tmp_path / "a", 1, SIZE))
        two.load(checkpoint(tmp_path / "b", 2, SIZE))
        for where, seed in zip(paths, (1, 2), strict=True):
            with engine_shim.open("m", pool=where.pool) as opened:
                assert bytes(opened.tensors["t"].numpy().tobytes()) == content(seed, SIZE)
        for seed in (3, 4):
            one.load(checkpoint(tmp_path / "a", seed, SIZE))
            one.pool.collect()
        with engine_shim.open("m", pool=paths[1].pool) as opened:
            assert bytes(opened.tensors["t"].numpy().tobytes()) == content(2, SIZE)
        assert [g.kind for g in two.pool.ready("m")] == [CHECKPOINT]
        assert all(g.state == READY for g in two.pool.catalog.generations)
