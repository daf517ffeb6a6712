"""`ballast purge` removes a dead pool, and refuses what would hurt somebody."""

from __future__ import annotations

from pathlib import Path

from engine_shim.handoff.attachment import Token
from engine_shim.handoff.names import PoolPaths
from tests.cli.conftest import Make
from tests.conftest import left_behind
from tests.processes import Sidecar, ballast


def test_refuses_while_the_sidecar_runs(served: Sidecar, pool_name: str) -> None:
    for force in ([], ["--force"]):
        done = ballast("purge", "-p", pool_name, *force)
        assert done.returncode == 1
        assert "is running: stop it first" in done.stderr
    assert ballast("verify", "-p", pool_name).returncode == 0


def test_refuses_while_engines_are_attached_unless_forced(
    served: Sidecar, pool_name: str, pool_paths: PoolPaths
) -> None:
    served.kill()
    token = Token.take(pool_paths, 1, "m")
    try:
        done = ballast("purge", "-p", pool_name)
        assert done.returncode == 1
        assert "1 engines are attached" in done.stderr and "use --force" in done.stderr
        assert left_behind(pool_name)
        done = ballast("purge", "-p", pool_name, "--force")
        assert (done.returncode, done.stderr) == (0, "")
        assert left_behind(pool_name) == []
    finally:
        token.release()


def test_removes_a_dead_pool(served: Sidecar, pool_name: str) -> None:
    served.kill()
    done = ballast("purge", "-p", pool_name)
    assert (done.returncode, done.stdout) == (0, f"removed pool {pool_name}: 3 objects\n")
    assert left_behind(pool_name) == []
    assert ballast("purge", "-p", pool_name).returncode == 3
    assert ballast("purge", "-p", pool_name, "--force").returncode == 0


def test_removes_semaphores_that_are_alone(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    served.kill()
    for name in pool_paths.objects():
        (pool_paths.dir / name.file).unlink()
    assert left_behind(pool_name)
    assert ballast("purge", "-p", pool_name).returncode == 0
    assert left_behind(pool_name) == []


def test_all_removes_the_dead_and_leaves_the_living(make: Make, tmp_path: Path, pool_name: str) -> None:
    """In a directory of its own, since --all would meet the pools of whoever else works on this machine."""
    directory = tmp_path / "memory"
    directory.mkdir()
    checkpoint = make("m")
    with Sidecar(f"{pool_name}-dead", checkpoint, directory=directory) as dead:
        dead.ready("m")
        dead.kill()
    with Sidecar(f"{pool_name}-alive", checkpoint, directory=directory) as alive:
        alive.ready("m")
        done = ballast("purge", "--all", "--dir", directory)
        assert done.returncode == 1
        assert f"removed pool {pool_name}-dead" in done.stdout
        assert f"{pool_name}-alive' is running" in done.stderr
        assert ballast("verify", "-p", f"{pool_name}-alive", "--dir", directory).returncode == 0
    assert list(directory.iterdir()) == []
    assert ballast("purge", "--all", "--dir", directory).returncode == 0


def test_leaves_what_is_not_the_pools(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    served.kill()
    stranger = pool_paths.path("something-else")
    stranger.write_text("keep me")
    try:
        assert ballast("purge", "-p", pool_name).returncode == 0
        assert left_behind(pool_name) == [stranger.name]
    finally:
        stranger.unlink()
