"""Random kill -9 of everybody, for a short while; `make storm` does it for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from tests.conftest import left_behind
from tests.processes import ROOT, environment
from tests.storm.namespaces import reason_against

SECONDS = 20


def storm(pool: str, *more: str) -> str:
    """What a storm reports; fails with what was wrong."""
    command = [sys.executable, "-m", "tests.storm.storm", "--pool", pool, "--seconds", str(SECONDS), *more]
    with tempfile.TemporaryFile() as output:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=200
        )
        said = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
    assert ended.returncode == 0, said
    assert not left_behind(pool)
    return said


def number(said: str, before: str) -> int:
    return int(said.split(before)[1].split()[0].strip(",;"))


@pytest.mark.slow
def test_a_storm(pool_name: str) -> None:
    said = storm(pool_name)
    assert number(said, "killed:") > 40 and number(said, "attached:") > 20
    assert number(said, "calms:") >= 2 and number(said, "updates:") > 3


@pytest.mark.slow
@pytest.mark.skipif(reason_against() is not None, reason=reason_against() or "")
def test_a_storm_across_namespaces(pool_name: str) -> None:
    said = storm(pool_name, "--namespaces")
    assert number(said, "killed:") > 40 and number(said, "attached:") > 20
    assert number(said.replace("}", ""), "strangers refused: {'Foreign':") > 5


def test_a_storm_notices() -> None:
    """What is wrong ends it: bits that are no version's."""
    code = """
import sys
from tests.storm import storm
really = storm._truth
storm._truth = lambda place, number: {name: value + "?" for name, value in really(place, number).items()}
sys.argv = ["storm", "--seconds", "20", "--pool", sys.argv[1]]
sys.exit(storm.main())
"""
    pool = f"t-{os.getpid():x}-notices"
    ended = subprocess.run(
        [sys.executable, "-c", code, pool], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 1 and "WRONG" in ended.stdout, ended.stdout + ended.stderr
    assert not left_behind(pool)
