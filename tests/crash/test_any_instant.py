"""kill -9 at every single change that a process makes to shared memory: nobody is ever served anything torn, and the next
sidecar comes through and leaves nothing over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_shim
from engine_shim.handoff import attachment, manifest
from engine_shim.handoff.catalog import FAILED, READY
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.publication import Publication
from engine_shim.modules import TensorStorage
from sidecar.pool import purge
from tests.checkpoints import Checkpoint, entry
from tests.crash import dying
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Died, Engine
from tests.never_wrong.loading import Loading, loading
from tests.never_wrong.logs import Lines, forget_pools

pytestmark = pytest.mark.usefixtures("here")


def write(folder: Path, seed: int) -> Path:
    folder.mkdir()
    for number in range(2):
        Checkpoint({f"{number}.w": entry("F32", (300,), seed + number), f"{number}.b": entry("U8", (3,), seed)}).write(
            folder / f"{number}.safetensors"
        )
    return folder


@pytest.fixture
def here(pool_paths: PoolPaths, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process looks at the pool of the test."""
    monkeypatch.setenv("BALLAST_POOL", pool_paths.pool)
    yield
    forget_pools()


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Three versions of one model: alike but for their content."""
    return [write(tmp_path / f"v{number}", 10 * number) for number in range(3)]


def content(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(engine_side.fingerprints(engine_side.by_safe_open(str(path))))
    return found


def served() -> dict[str, str] | None:
    """What an engine that starts now gets of the model, or None."""
    try:
        with engine_shim.open("m", wait=0) as model:
            return engine_side.fingerprints(model.tensors)
    except HandoffError:
        return None


def in_order(paths: PoolPaths, pool: Loading) -> None:
    """Every object belongs to a generation of the catalog that is ready, and each of those is whole."""
    expected = {paths.control.name}
    for generation in pool.pool.catalog.generations:
        if generation.state == FAILED:
            continue
        assert generation.state == READY
        expected.add(paths.manifest(generation.number).name)
        count = len(manifest.read(paths.manifest(generation.number)).segments)
        expected |= {paths.segment(generation.number, index).name for index in range(count)}
    found = {name.file for name in paths.objects() if name.kind != "attachment"}
    assert found == expected


def killed(function: Callable[..., Any], count: int, *args: Any) -> bool:
    """Runs it in a process that dies at its `count`-th change; False if it has less of them."""
    with Engine() as process:
        process.start(function, count, *args)
        try:
            process.result()
        except Died:
            return True
        return False


Scenario = tuple[Callable[..., Any], int, int, int]
SCENARIOS: dict[str, Scenario] = {
    # what dies, how many versions the pool holds before, which it is to serve, and how many changes that takes at least
    "the first start": (dying.load, 0, 0, 35),
    "an update": (dying.load, 1, 1, 35),
    "an update that frees the oldest": (dying.load, 2, 2, 35),
    "adopting": (dying.load, 1, 0, 3),
    "removing": (dying.remove, 1, 0, 8),
    "purging": (dying.purge, 2, 1, 8),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_sidecar_is_killed(pool_paths: PoolPaths, versions: list[Path], name: str) -> None:
    function, held, wanted, instants = SCENARIOS[name]
    contents = [content(folder) for folder in versions]
    now = versions[wanted]
    place = (str(pool_paths.dir), pool_paths.pool, str(now))
    count = 0
    while True:
        count += 1
        with loading(pool_paths, remove=False) as pool:
            for folder in versions[:held]:
                pool.load(folder)
        if not held:
            purge(pool_paths)
        if not killed(function, count, *place):
            break
        assert served() in [None, *contents[:held], contents[wanted]]
        with loading(pool_paths) as pool:
            if not pool.adopt(now):
                pool.load(now)
            pool.pool.collect()
            in_order(pool_paths, pool)
            assert served() == contents[wanted]
        assert not pool_paths.objects()
        forget_pools()
    with loading(pool_paths):
        pass
    assert instants <= count < 200, "fewer changes than there are: nothing was tested"


# Engines


def objects(paths: PoolPaths, kind: str) -> list[str]:
    return [name.file for name in paths.objects() if name.kind == kind]


def test_an_engine_is_killed_while_attaching(pool_paths: PoolPaths, versions: list[Path]) -> None:
    with loading(pool_paths) as pool:
        pool.load(versions[0])
        before = sorted(name.file for name in pool_paths.objects())
        count = 0
        while True:
            count += 1
            with Engine(pool_paths.pool) as engine:
                engine.start(dying.attach, count)
                try:
                    assert engine.result() == 1
                except Died:
                    pass
                else:
                    break
            assert not list(attachment.alive(pool_paths))  # nobody holds anything, and nothing is waited for
            pool.pool.sweep()
            assert sorted(name.file for name in pool_paths.objects()) == before
        assert count >= 4
        pool.pool.retire(1)
        assert pool.pool.collect() > 0


def test_a_publisher_is_killed(pool_paths: PoolPaths, versions: list[Path]) -> None:
    """Half a publication is never adopted; a whole one is, also when its publisher died right after."""
    with loading(pool_paths) as pool:
        pool.load(versions[0])
        before = sorted(name.file for name in pool_paths.objects())
        count = adopted = 0
        while True:
            count += 1
            with Engine(pool_paths.pool) as engine:
                engine.start(dying.publish, count, 5)
                try:
                    engine.result()
                    ended = True
                except Died:
                    ended = False
            found = pool.pool.publications()
            for identifier in found:
                assert pool.pool.adopt_publication(identifier)
                adopted += 1
                module = dying.module(6)
                engine_shim.attach(module, "published")
                check_published(module)
                del module
                for generation in pool.pool.ready("published", "engine"):
                    pool.pool.drop(generation.number)
            pool.pool.sweep()
            assert sorted(name.file for name in pool_paths.objects()) == before
            if ended:
                assert found
                break
        assert count >= 10 and adopted >= 1


def check_published(module: Any) -> None:
    expected = dying.module(5)
    assert torch.equal(module.weight, expected.weight)
    assert torch.equal(module.bias, expected.bias)
    assert torch.equal(module.cache, expected.cache)


def test_a_living_publisher_is_left_alone(pool_paths: PoolPaths, versions: list[Path]) -> None:
    """A sweep in the middle of a publication takes nothing away."""
    with loading(pool_paths) as pool, Publication(pool_paths, "published") as publication:
        pool.load(versions[0])
        for _ in range(3):
            publication.add(TensorStorage(torch.rand(5000).untyped_storage()))
            files = objects(pool_paths, "publication")
            assert files
            assert pool.pool.sweep() == 0
            assert objects(pool_paths, "publication") == files


def test_a_sidecar_is_killed_while_adopting_a_publication(pool_paths: PoolPaths, versions: list[Path]) -> None:
    place = (str(pool_paths.dir), pool_paths.pool, str(versions[0]))
    count = kept = 0
    with loading(pool_paths, remove=False) as pool:
        pool.load(versions[0])
    while True:
        count += 1
        with loading(pool_paths, remove=False) as pool:
            assert pool.adopt(versions[0])
            engine_shim.publish(dying.module(5), "published")
        if not killed(dying.adopt_publications, count, *place):
            break
        with loading(pool_paths, remove=False) as pool:
            assert pool.adopt(versions[0])
            for identifier in pool.pool.publications():
                pool.pool.adopt_publication(identifier)
            pool.pool.sweep()
            in_order(pool_paths, pool)
            assert served() == content(versions[0])
            for generation in pool.pool.ready("published", "engine"):
                module = dying.module(6)
                engine_shim.attach(module, "published")
                check_published(module)
                kept += 1
                del module
                pool.pool.drop(generation.number)
            pool.pool.forget_failures("published")
    assert count >= 15 and kept >= 5
    purge(pool_paths, force=True)
