"""One start of a model, as an engine's adapter makes it: what goes wrong on the way is not published, and not loaded upon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine_shim import ladder, state, weight_files
from engine_shim.handoff.catalog import ENGINE, READY
from engine_shim.handoff.names import PoolPaths
from engine_shim.ladder import Settings
from engine_shim.start import Place, Start
from engine_shim.weight_files import OTHER
from tests.checkpoints import Checkpoint, entry
from tests.conftest import left_behind
from tests.generations.states import publish
from tests.never_wrong.loading import Loading
from tests.processes import Sidecar

COUNT = 1 << 16


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(COUNT), requires_grad=False)

    @torch.no_grad()
    def load(self) -> None:
        self.one.fill_(1)


@pytest.fixture
def served(pool_name: str, tmp_path: Path) -> Iterator[tuple[Sidecar, Path]]:
    folder = tmp_path / "model"
    folder.mkdir()
    Checkpoint({"x": entry("F32", (COUNT,))}).write(folder / "model.safetensors")
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        yield sidecar, folder
        sidecar.interrupt()


def begin(paths: PoolPaths, folder: Path) -> Start:
    pool = ladder.pool(paths)
    if any(folder.glob("*.safetensors")):
        weights = weight_files.of_files(folder, map(str, folder.glob("*.safetensors")), False, None, pool)
    else:
        weights = weight_files.of_pool(folder, False, "model", pool)
    settings = Settings(paths.pool, None, "auto", 5, True)
    return Start(settings, "Mine", weights, {"version": "1", "checkpoint": weights.digest}, Place(), paths)


def run(begun: Start, model: Model, load: Callable[[], None]) -> None:
    begun.weights(model, load)
    begun.loaded(model)
    begun.end(model)
    for thread in threading.enumerate():
        if thread.name == "ballast-publish":
            thread.join(30)


def test_from_one_start_to_the_next(served: tuple[Sidecar, Path]) -> None:
    sidecar, folder = served
    first, model = begin(sidecar.paths, folder), Model()
    run(first, model, model.load)
    assert first.found is None
    sidecar.says("adopted")
    second, model = begin(sidecar.paths, folder), Model()
    run(second, model, model.load)
    assert second.found is not None and bool((model.one == 1).all())


@pytest.mark.parametrize("has_files", [True, False])
def test_files_that_are_exchanged_while_they_are_read(
    served: tuple[Sidecar, Path], tmp_path: Path, has_files: bool
) -> None:
    """By an engine that has them, and by one that is told the model's name."""
    sidecar, folder = served
    before = sidecar.catalog.generations[0].number
    begun, model = begin(sidecar.paths, folder if has_files else tmp_path / "nothing"), Model()

    def load() -> None:
        Checkpoint({"x": entry("F32", (COUNT,), 7)}).write(folder / "new")
        (folder / "new").replace(folder / "model.safetensors")
        deadline = time.monotonic() + 30
        while not has_files and max(g.number for g in sidecar.catalog.of_model("model", READY)) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        model.load()

    run(begun, model, load)
    assert bool((model.one == 1).all())
    assert not state.exists(begun.digest, sidecar.paths)
    assert [o.file for o in sidecar.paths.objects() if o.kind == "publication"] == []


def test_a_sidecar_that_dies_meanwhile(served: tuple[Sidecar, Path]) -> None:
    sidecar, folder = served
    begun, model = begin(sidecar.paths, folder), Model()

    def load() -> None:
        sidecar.kill()
        model.load()

    run(begun, model, load)
    assert bool((model.one == 1).all())
    assert [name for name in left_behind(sidecar.paths.pool) if ".in." in name] == []
    with Sidecar(sidecar.paths.pool, folder) as successor:
        successor.ready("model")
        successor.interrupt()


class Stubborn(torch.nn.Parameter):
    """As some engines have: what lies behind it cannot be exchanged."""

    @property  # type: ignore[override]  # what cannot be set is the point of it
    def data(self) -> torch.Tensor:
        raise ValueError("it is not one tensor")


class Odd(Model):
    def __init__(self) -> None:
        super().__init__()
        self.two = Stubborn(torch.zeros(4), requires_grad=False)


def test_what_was_bound_half_is_not_loaded_upon(served: tuple[Sidecar, Path]) -> None:
    sidecar, folder = served
    first, model = begin(sidecar.paths, folder), Odd()
    run(first, model, model.load)
    sidecar.says("adopted")
    second, model = begin(sidecar.paths, folder), Odd()
    called: list[bool] = []
    with pytest.raises(AttributeError):
        second.weights(model, lambda: called.append(True))
    assert second.touched and not called
    second.close()


def test_what_the_sidecar_refuses(pool_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine says why its own state is not there, not another's; and does not wait for it any longer."""
    folder = tmp_path / "model"
    folder.mkdir()
    Checkpoint({"x": entry("F32", (COUNT,))}).write(folder / "model.safetensors")
    with Sidecar(pool_name, folder, args=["--max-bytes", "3M", "--pin", "model"]) as sidecar:
        sidecar.ready("model")
        for other in ("another", "zebra"):  # one is before and one behind it, whatever the order
            publish(sidecar.paths, other, "k")
            sidecar.says(f"a publication is refused: '{other}' needs")
        begun, model = begin(sidecar.paths, folder), Model()
        run(begun, model, model.load)
        for thread in threading.enumerate():
            if thread.name == "ballast-follow":
                thread.join(30)
                assert not thread.is_alive()
        [line] = [text for text in caplog.messages if "the sidecar refused the publication" in text]  # another test's may end
        assert "'model' needs" in line
        sidecar.interrupt()


def test_weights_that_differ_where_no_sample_looks(filled: Loading, tmp_path: Path) -> None:
    """The key of their states is one, and whose state it is decides, as far as the sidecar knows the engine's files."""
    folder, aside = tmp_path / "model", tmp_path / "aside"
    for place in (folder, aside):
        place.mkdir()
    Checkpoint({"x": entry("BF16", (4000, 512))}).write(folder / "model.safetensors")
    filled.load(folder, "model")
    first = started(filled, folder)
    assert first.found is None and first.content == filled.pool.ready("model")[0].content
    assert started(filled, folder).found is not None

    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-777 * 1024] ^= 1
    (aside / "model.safetensors").write_bytes(data)
    assert started(filled, aside).found is not None, "a copy, as far as samples tell"
    (aside / "model.safetensors").rename(folder / "model.safetensors")
    early = begin(filled.paths, folder)  # before the sidecar has looked
    assert early.digest == first.digest and early.content == OTHER and early.found is None
    filled.load(folder, "model")
    assert started(filled, folder).found is None
    [state_of_new] = filled.pool.ready("model", ENGINE)
    assert state_of_new.content == filled.pool.ready("model")[0].content
    assert started(filled, folder).found is not None


def started(filled: Loading, folder: Path) -> Start:
    """One start, and what it published is adopted."""
    begun, model = begin(filled.paths, folder), Model()
    run(begun, model, model.load)
    for identifier in filled.pool.publications():
        assert filled.pool.adopt_publication(identifier)
    return begun


def test_a_state_belongs_to_what_its_engine_read(filled: Loading, tmp_path: Path) -> None:
    """Not to what was newest when it was adopted."""
    folder = tmp_path / "model"
    folder.mkdir()
    Checkpoint({"x": entry("F32", (COUNT,))}).write(folder / "model.safetensors")
    filled.load(folder, "model")
    begun, model = begin(filled.paths, folder), Model()
    run(begun, model, model.load)
    old = filled.pool.ready("model")[0].content
    for seed in (2, 3):
        Checkpoint({"x": entry("F32", (COUNT,), seed)}).write(folder / "new")
        (folder / "new").rename(folder / "model.safetensors")
        filled.load(folder, "model")
        for identifier in filled.pool.publications():
            assert filled.pool.adopt_publication(identifier)
            assert [g.content for g in filled.pool.ready("model", ENGINE)] == [old]
    assert not filled.pool.ready("model", ENGINE)
