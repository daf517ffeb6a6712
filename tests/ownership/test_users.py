"""Who may do what to a pool, tried by real other users on a real file system."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff import semaphores
from engine_shim.handoff.names import PoolPaths
from tests.generations.parts import checkpoint as make
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.ownership import actors
from tests.ownership.actors import GROUP, MEMBER, OTHER_MEMBER, OWNER, STRANGER
from tests.processes import ballast, environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users: run the tests as root")

POOL = "p"
SIZE = 50_000


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that other users may look into; pytest's own are root's alone."""
    with tempfile.TemporaryDirectory(prefix="ballast-users-") as place:
        os.chmod(place, 0o755)
        yield Path(place)


@pytest.fixture(params=["sticky", "open"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The pool's directory: as /dev/shm is on a host (1777), and as a memory volume of Kubernetes is (0777)."""
    return _place(tmp_path, 0o1777 if request.param == "sticky" else 0o777)


def _place(tmp_path: Path, mode: int) -> Path:
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(mode)
    return place


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make(tmp_path / "m", 1, SIZE)


class People:
    """Processes of other users, ended with the test."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self.owner: Engine  # of the shared pool

    def user(self, number: int, groups: tuple[int, ...] = (), directory: Path | None = None, **environ: str) -> Engine:
        if directory is not None:
            environ.update(BALLAST_DIR=str(directory), BALLAST_POOL=POOL)
        engine = Engine(None, **environ)
        self._engines.append(engine)
        engine(actors.become, number, list(groups))
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
            engine.__exit__(None, None, None)


@pytest.fixture
def people(tmp_path: Path) -> Iterator[People]:
    found = People()
    yield found
    found.close()


def test_a_stranger_reads_and_replaces_nothing(place: Path, checkpoint: Path, people: People) -> None:
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    assert set(actors.modes(str(place)).values()) == {(0o600, OWNER, OWNER), (0o400, OWNER, OWNER)}
    done = people.user(STRANGER)(actors.harm, str(place), POOL)
    for deed in done:
        verb = deed.split()[0]
        assert verb not in ("read", "write", "truncate", "chmod"), done
        if place.stat().st_mode & 0o1000:
            assert verb == "refused", done
    engine = people.user(OWNER, directory=place)
    name, text = engine(engine_side.attempt, "open", "m") or ("", "")
    if place.stat().st_mode & 0o1000:
        assert not name, text
    else:  # it is gone, or his: an engine says so and reads its files
        assert name in ("NotFound", "Foreign"), text


def test_an_engine_that_gives_up_its_privileges_lets_go(checkpoint: Path, tmp_path: Path, people: People) -> None:
    """Its record is root's, and stays until the sidecar sweeps; but nobody holds it any more."""
    place = _place(tmp_path, 0o1777)
    owner = people.user(0)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    engine = people.user(0, directory=place)
    engine(engine_side.load, "open", "m", "kept")
    assert owner(actors.held) == [1]
    engine(actors.become, STRANGER, [])
    engine(engine_side.forget, "kept")
    assert not engine.log.count("Traceback"), engine.log
    assert owner(actors.held) == []
    assert owner(actors.sweep) == 1


@pytest.mark.parametrize("name", ["g1.w0", "g1.manifest", "ctl"])
def test_nothing_of_a_strangers_is_believed(place: Path, checkpoint: Path, people: People, name: str) -> None:
    """Where he can take our file away he can put one of his in its place, with any mode. It is his, and so refused."""
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    target = place / f"ballast-{POOL}.{name}"
    if place.stat().st_mode & 0o1000:
        target.unlink()  # as if it had not been there: only root can do that for him here
    else:
        assert people.user(STRANGER)(actors.move, str(target), str(place / "away")) == "done"
    people.user(STRANGER)(actors.plant, str(target), "file")
    os.chmod(target, 0o444)
    engine = people.user(OWNER, directory=place)
    kind, text = engine(engine_side.attempt, "open", "m")
    assert kind == "Foreign" and f"belongs to user {STRANGER} and this process is user {OWNER}" in text


@pytest.mark.parametrize("kind", ["file", "symlink", "dangling", "fifo", "directory"])
@pytest.mark.parametrize("name", ["ctl", "g1.w0", "g1.manifest", "a.0123456789abcdef", "do.0123456789abcdef"])
def test_names_taken_before_the_sidecar(tmp_path: Path, checkpoint: Path, people: People, name: str, kind: str) -> None:
    """Squatting: the sidecar goes round it, or says who is in the way; it follows nothing and never hangs."""
    place = _place(tmp_path, 0o1777)
    target = place / f"ballast-{POOL}.{name}"
    people.user(STRANGER)(actors.plant, str(target), kind)
    owner = people.user(OWNER)
    owner.start(actors.serve, POOL, str(place), str(checkpoint), None)
    if name == "ctl":
        with pytest.raises(Exception, match=r"belongs to user|symbolic link|plain file|directory|another user"):
            owner.result(20)
    else:
        assert owner.result(20) == (2 if name.startswith("g1") else 1)
        engine = people.user(OWNER, directory=place)
        assert engine(engine_side.load, "open", "m")
        owner(actors.sweep)
    assert os.path.lexists(target), "what is another's is left alone"
    assert not (place / "made-by-the-victim").exists()


def test_segments_cannot_be_exchanged(tmp_path: Path, checkpoint: Path, people: People) -> None:
    """In a directory without a sticky bit a stranger may rename our own files: right owner, right mode, wrong place."""
    place = _place(tmp_path, 0o777)
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    owner(actors.serve, POOL, str(place), str(make(tmp_path / "m", 2, SIZE)), None)
    stranger = people.user(STRANGER)
    first, second = (str(place / f"ballast-{POOL}.g{number}.w0") for number in (1, 2))
    assert stranger(actors.move, first, str(place / "t")) == "done"
    assert stranger(actors.move, second, first) == "done"
    assert stranger(actors.move, str(place / "t"), second) == "done"
    engine = people.user(OWNER, directory=place)
    kind, text = engine(engine_side.attempt, "open", "m")
    assert kind == "Damaged" and "is another file than the one that was published" in text
    owner(actors.stop)
    assert not people.user(OWNER)(actors.adopt, POOL, str(place), str(checkpoint), None), "nor does a sidecar take it over"


def test_a_page_cannot_be_lent_to_another_pool(tmp_path: Path, checkpoint: Path, people: People) -> None:
    """By a hard link, where the kernel lets everybody make one (fs.protected_hardlinks=0), or by a rename."""
    place = _place(tmp_path, 0o777)
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    stranger = people.user(STRANGER)
    source, target = str(place / f"ballast-{POOL}.ctl"), str(place / "ballast-other.ctl")
    if stranger(actors.hard_link, source, target) != "done":
        assert stranger(actors.move, source, target) == "done"
    engine = people.user(OWNER, directory=place)
    engine(actors.look_at, "other")
    kind, text = engine(engine_side.attempt, "open", "m")
    assert kind == "Damaged" and "is the control page of pool 'p'" in text


@pytest.mark.parametrize("kind", ["guard", "bell"])
def test_a_strangers_semaphore_is_not_used(tmp_path: Path, pool_paths: PoolPaths, people: People, kind: str) -> None:
    """It decides nothing, but it is a map of his file: he makes that shorter, and whoever looks there is killed (SIGBUS)."""
    if not Path("/dev/shm/.").stat().st_mode & 0o002:
        pytest.skip("other users may make nothing in /dev/shm here")
    name = getattr(pool_paths, kind)
    stranger = people.user(STRANGER)
    stranger(actors.plant_semaphore, name)
    owner = people.user(OWNER)
    try:
        assert owner(actors.wait_and_ring, pool_paths.pool, str(_place(tmp_path, 0o1777))) == "done"
        stranger(actors.cut_semaphore, name)
        assert owner(actors.use_semaphores) == "done"
    finally:
        semaphores.unlink(pool_paths)


def test_root_removes_another_users_pool_when_told_to(tmp_path: Path, checkpoint: Path, people: People) -> None:
    place = _place(tmp_path, 0o1777)
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    purging = ("purge", "--pool", POOL, "--dir", str(place))
    done = ballast(*purging)
    assert done.returncode == 1 and f"belongs to user {OWNER}" in done.stderr and "as root, use --force" in done.stderr
    living = ballast(*purging, "--force")
    assert living.returncode == 1 and "is running: stop it first" in living.stderr, "not even by force"
    owner.kill()
    assert list(place.iterdir())
    done = ballast(*purging, "--force")
    assert (done.returncode, done.stderr) == (0, "") and not list(place.iterdir()), done
    people.user(STRANGER)(actors.plant, str(place / f"ballast-{POOL}.ctl"), "symlink")
    assert ballast(*purging).returncode == 1
    assert ballast(*purging, "--force").returncode == 0 and not list(place.iterdir())


# Groups


@pytest.fixture
def shared(tmp_path: Path, checkpoint: Path, people: People) -> Path:
    """A pool that OWNER shares with GROUP."""
    place = _place(tmp_path, 0o1777)
    people.owner = people.user(OWNER, (GROUP,))
    people.owner(actors.serve, POOL, str(place), str(checkpoint), GROUP)
    return place


def test_a_member_attaches_and_is_counted(shared: Path, people: People) -> None:
    owner: Engine = people.owner
    assert set(actors.modes(str(shared)).values()) == {(0o640, OWNER, GROUP), (0o440, OWNER, GROUP)}
    member = people.user(MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    with Engine(None) as plain:
        expected = plain(engine_side.load, "safe_open", str(shared.parent / "m" / "model.safetensors"))
    assert member(engine_side.load, "open", "m", "mine") == expected
    assert owner(actors.held) == [1]
    assert owner(actors.retire, 1) == 0, "it is held"
    assert member(engine_side.kept, "mine") == expected
    member.kill()
    assert owner(actors.held) == []
    owner(actors.collect)
    assert not (shared / f"ballast-{POOL}.g1.w0").exists()


def test_without_trust_a_member_does_not_attach(shared: Path, people: People) -> None:
    for environ in ({}, {"BALLAST_TRUST": f"{OTHER_MEMBER},nobody-of-this-name"}):
        kind, text = people.user(MEMBER, (GROUP,), shared, **environ)(engine_side.attempt, "open", "m")
        assert kind == "Foreign" and f"belongs to user {OWNER}" in text and "share the pool with a group" in text


def test_nobody_else_attaches(shared: Path, people: People) -> None:
    kind, text = people.user(STRANGER, (), shared, BALLAST_TRUST=str(OWNER))(engine_side.attempt, "open", "m")
    assert kind == "Foreign" and "belongs to another user" in text


def test_a_member_changes_nothing(shared: Path, people: People) -> None:
    done = people.user(MEMBER, (GROUP,))(actors.harm, str(shared), POOL)
    assert {deed.split()[0] for deed in done} == {"refused", "read"}, done
    other = people.user(OTHER_MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    assert other(engine_side.load, "open", "m")


def test_a_member_publishes_nothing(shared: Path, people: People) -> None:
    member = people.user(MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    with pytest.raises(Exception, match="belongs to another user, who alone publishes to it"):
        member(actors.publish, POOL, str(shared))
    # Nor one who does not ask our library: what he puts there is his, and is not taken.
    member(actors.plant, str(shared / f"ballast-{POOL}.in.0123456789abcdef"), "file")
    owner: Engine = people.owner
    assert owner(actors.publications) == [False]


def test_a_member_asks_for_nothing(shared: Path, people: People) -> None:
    from engine_shim.handoff import request
    from engine_shim.handoff.names import PoolPaths

    member = people.user(MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    member.start(actors.ask, POOL, str(shared))
    owner: Engine = people.owner
    deadline = 20
    while not any(name.kind == "request" for name in PoolPaths(POOL, shared).objects()) and deadline:
        deadline -= member.busy(0.1)
    assert owner(actors.asked) == []
    assert request.pending(PoolPaths(POOL, shared)) == [], "not even root takes it for its own"
    with pytest.raises(Exception, match="has not answered"):
        member.result()


def test_members_do_not_forge_for_members(tmp_path: Path, people: People, checkpoint: Path) -> None:
    """Trust is in a user, not in the group: what another member serves under that name is not believed."""
    place = _place(tmp_path, 0o1777)
    people.user(OTHER_MEMBER, (GROUP,))(actors.serve, POOL, str(place), str(checkpoint), GROUP)
    kind, text = people.user(MEMBER, (GROUP,), place, BALLAST_TRUST=str(OWNER))(engine_side.attempt, "open", "m")
    assert kind == "Foreign" and f"belongs to user {OTHER_MEMBER}" in text


def test_records_of_dead_members_go(shared: Path, people: People) -> None:
    """In a sticky directory only a process of the same user can remove them: the next one that attaches."""

    def records() -> int:
        return len([name for name in os.listdir(shared) if ".a." in name])

    owner: Engine = people.owner
    member = people.user(MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    member(actors.hold, POOL, str(shared))
    assert (owner(actors.held), owner(actors.sweep), records()) == ([1], 0, 1)
    member.kill()
    assert (owner(actors.held), owner(actors.sweep), records()) == ([], 0, 1)
    again = people.user(MEMBER, (GROUP,), shared, BALLAST_TRUST=str(OWNER))
    again(actors.hold, POOL, str(shared))
    assert records() == 1
    again.kill()
    os.chown(shared, OWNER, GROUP)  # a directory of the pool's own
    assert (owner(actors.sweep), records()) == (1, 0)


def test_sharing_begins_and_ends_with_a_restart(shared: Path, people: People) -> None:
    owner: Engine = people.owner
    owner(actors.stop)
    checkpoint = str(shared.parent / "m")
    alone = people.user(OWNER, (GROUP,))
    assert alone(actors.adopt, POOL, str(shared), checkpoint, None)
    assert {mode for mode, *_ in actors.modes(str(shared)).values()} == {0o600, 0o400}
    alone(actors.stop)
    together = people.user(OWNER, (GROUP,))
    assert together(actors.adopt, POOL, str(shared), checkpoint, GROUP)
    assert set(actors.modes(str(shared)).values()) == {(0o640, OWNER, GROUP), (0o440, OWNER, GROUP)}


# The command


def test_serve_for_a_group(tmp_path: Path, checkpoint: Path, people: People) -> None:
    place = _place(tmp_path, 0o1777)
    done = ballast("serve", str(checkpoint), "--dir", str(place), "--group", "no-such-group")
    assert done.returncode == 2 and "there is no group 'no-such-group'" in done.stderr
    serving = subprocess.run(
        ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups", "--", *_serve(checkpoint, place, GROUP)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert serving.returncode == 1 and f"nothing can be given to group {GROUP}" in serving.stderr, serving.stderr
    assert "Traceback" not in serving.stderr


def _serve(checkpoint: Path, place: Path, group: int) -> list[str]:
    command = [sys.executable, "-m", "sidecar", "serve", str(checkpoint), "--dir", str(place)]
    return [*command, "--pool", POOL, "--group", str(group), "--on-exit", "remove"]


def test_a_directory_in_which_others_may_remove_files_is_spoken_of(place: Path, checkpoint: Path, people: People) -> None:
    owner = people.user(OWNER)
    owner(actors.serve, POOL, str(place), str(checkpoint), None)
    assert ("has no sticky bit" in owner.log) == (not place.stat().st_mode & 0o1000)


@pytest.mark.parametrize("links", [0, 1])
def test_whatever_the_kernel_protects(tmp_path: Path, checkpoint: Path, people: People, links: int) -> None:
    """fs.protected_hardlinks, as it is here and as it is by default elsewhere: our side does not rest on it."""
    switch = Path("/proc/sys/fs/protected_hardlinks")
    before = switch.read_text()
    try:
        switch.write_text(str(links))
    except OSError:
        pytest.skip("fs.protected_hardlinks cannot be changed here")
    try:
        place = _place(tmp_path, 0o1777)
        owner = people.user(OWNER)
        owner(actors.serve, POOL, str(place), str(checkpoint), None)
        stranger = people.user(STRANGER)
        said = stranger(actors.hard_link, str(place / f"ballast-{POOL}.g1.w0"), str(place / f"ballast-{POOL}.g2.w0"))
        assert (said == "done") == (links == 0)
        assert owner(actors.serve, POOL, str(place), str(checkpoint), None) == 1, "unchanged: it stays"
        owner(actors.sweep)
        assert not (place / f"ballast-{POOL}.g2.w0").exists(), "ours by owner, listed by nobody"
        assert people.user(OWNER, directory=place)(engine_side.load, "open", "m")
    finally:
        switch.write_text(before)
