"""kill -9 at every step of every sequence; the steps are found in the code, so that a new one is not forgotten.

`steps.txt` lists them. When a change of the code adds a step, or a way to one, `test_the_steps_are_known` fails until the
list is written anew, which is one command, and shows in the change what has to survive a kill from now on:

    python -m tests.crash.test_every_step

Every step of the list is died at by the tests below, without anything to be written for it. A call that no sequence makes is
in UNREACHED with the reason, or fails `test_every_call_is_met`: then a sequence for it belongs into `sequences.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from engine_shim.handoff.names import DEFAULT_DIR
from tests.crash import exercise
from tests.crash.points import Step, sites
from tests.crash.sequences import SEQUENCES, write_versions
from tests.never_wrong.forked import Engine, engines

LIST = Path(__file__).with_name("steps.txt")

# Calls that no sequence makes.
UNREACHED = {
    "engine_shim/handoff/attachment.py _remove_members: posix.remove": "where a pool is shared with a group: tests/ownership",
    "sidecar/pool.py _share: posix.share": "where a pool is shared with a group that it was not shared with before: the same",
    "engine_shim/handoff/semaphores.py _Semaphore.acquire: semaphore.acquire": "where the C library has no sem_clockwait",
    "engine_shim/handoff/publication.py Publication.leave: maps.make_private": "in a forked child, whose map alone it changes",
}


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of a checkpoint, old enough for their times to mean something."""
    folder = tmp_path_factory.mktemp("versions")
    write_versions(folder)
    time.sleep(0.2)
    return folder


def own(versions: Path, folder: Path) -> str:
    """A folder for one process, which leads to the same versions."""
    folder.mkdir()
    for path in versions.glob("v*"):
        (folder / path.name).symlink_to(path)
    return str(folder)


Recorded = dict[str, tuple[Counter[Step], set[str]]]


def record_all(pool: str, versions: Path, folder: Path) -> Recorded:
    found: Recorded = {}
    with engines(None, 2) as processes:
        for number in range(2):
            own(versions, folder / str(number))
        names = list(SEQUENCES)
        for pair in (names[at : at + 2] for at in range(0, len(names), 2)):
            for number, name in enumerate(pair):
                place = str(folder / str(number))
                processes[number].start(exercise.record, DEFAULT_DIR, f"{pool}-{number}", place, name)
            for number, name in enumerate(pair):
                found[name] = processes[number].result()
    return found


@pytest.fixture(scope="module")
def recorded(versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_all("t-steps", versions, tmp_path_factory.mktemp("recording"))


def listed(found: Recorded) -> list[str]:
    lines = []
    for name, (steps, _) in found.items():
        lines.append(f"== {name}")
        lines += sorted(line for line in map(str, steps) if not exercise.sometimes(name, line))
    return lines


def test_the_steps_are_known(recorded: Recorded) -> None:
    known = LIST.read_text().splitlines()
    now = listed(recorded)
    new = [line for line in now if line not in known]
    gone = [line for line in known if line not in now]
    assert now == known, (
        f"{len(new)} steps are new and {len(gone)} gone; look at them, then run python -m tests.crash.test_every_step:\n"
        + "\n".join([f"+ {line}" for line in new] + [f"- {line}" for line in gone])
    )


def test_every_call_is_met(recorded: Recorded) -> None:
    met = {site for _, found in recorded.values() for site in found}
    every = {str(site) for site in sites()}
    assert every - met - set(UNREACHED) == set(), "no sequence makes these calls: extend one, or say why it need not"
    assert set(UNREACHED) & met == set(), "these are met after all"
    assert set(UNREACHED) <= every, "these are not in the code any more"


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds where nothing else runs; but what else runs is not ours to say
@pytest.mark.parametrize("name", SEQUENCES)
def test_dying_at_each(name: str, pool_name: str, versions: Path, tmp_path: Path) -> None:
    """Before and in the middle of each step, the first two times that it comes."""
    died = 0
    with engines(None, 2) as processes:
        for number, engine in enumerate(processes):
            place = own(versions, tmp_path / str(number))
            pool = f"{pool_name}-{number}"
            engine.start(exercise.exercise, DEFAULT_DIR, pool, place, name, 2, (number, 2))
        for engine in processes:
            count, wrong, longest = engine.result(850)
            assert not wrong, "\n".join(wrong)
            assert max(longest.values()) < exercise.BOUND
            died += count
    known = LIST.read_text().split(f"== {name}\n")[1].split("==")[0].splitlines()
    assert died > len(known)


def test_dying_at_some(pool_name: str, versions: Path, tmp_path: Path) -> None:
    """The same, at a few steps of each sequence; other ones in each run."""
    with Engine() as engine:
        place = own(versions, tmp_path / "0")
        for name in SEQUENCES:
            engine.start(exercise.exercise, DEFAULT_DIR, pool_name, place, name, 1, (0, 1), 2)
            died, wrong, _ = engine.result(120)
            assert died == 2 and not wrong, "\n".join(wrong)


def _main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_versions(folder / "versions")
        time.sleep(0.2)
        found = record_all("t-steps", folder / "versions", folder)
    LIST.write_text("\n".join(listed(found)) + "\n")
    met = {site for _, some in found.values() for site in some}
    print(f"{sum(len(steps) for steps, _ in found.values())} steps; calls that no sequence makes:")
    print("\n".join(str(site) for site in sites() if str(site) not in met))


if __name__ == "__main__":
    _main()
