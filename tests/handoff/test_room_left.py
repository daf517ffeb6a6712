"""How much fits: the file system, every memory cgroup above us (v1 and v2), the machine; the least of them counts."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.handoff import room as module
from engine_shim.handoff.errors import NoRoom
from engine_shim.handoff.room import Room, gib, room

MIB = 1 << 20
Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Sets what /proc and /sys/fs/cgroup say: `fake("0::/a/b", a=..., meminfo=...)`."""
    proc: dict[str, str] = {}
    real = builtins.open

    def opened(path: Any, *args: Any) -> Any:
        if str(path).startswith("/proc/"):
            if str(path) not in proc:
                raise FileNotFoundError(path)
            return io.StringIO(proc[str(path)])
        return real(path, *args)

    def arrange(cgroup: str | None, groups: dict[str, dict[str, str]], meminfo: str | None = None) -> None:
        if cgroup is not None:
            proc["/proc/self/cgroup"] = cgroup
        if meminfo is not None:
            proc["/proc/meminfo"] = meminfo
        for folder, files in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / folder / name).write_text(text)

    monkeypatch.setattr(module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(module, "open", opened, raising=False)
    return arrange


def v2(limit: int | str, used: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n", "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file {active}\nshmem 9\n",
    }  # fmt: skip


def v1(limit: int, used: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        # no limit anywhere
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b": v2("max", 5), "a": v2("max", 9)}, None),
        # one limit, at any height
        ("0::/a/b\n", {"a/b": v2(100, 30)}, 70),
        ("0::/a/b\n", {"a/b": v2("max", 30), "a": v2(100, 40)}, 60),
        ("0::/a/b/c\n", {".": v2(50, 1), "a/b": v2(1000, 1)}, 49),
        # the least room wins, not the lowest limit and not the nearest group
        ("0::/a/b\n", {"a/b": v2(100, 0), "a": v2(1000, 950)}, 50),
        ("0::/a/b\n", {"a/b": v2(100, 80), "a": v2(1000, 0)}, 20),
        # page cache can go, shared memory cannot
        ("0::/a\n", {"a": v2(100, 90, inactive=20, active=15)}, 45),
        # already above the limit
        ("0::/a\n", {"a": v2(100, 130)}, 0),
        # in a container with its own mount the path is another world's: the mount itself is ours
        ("0::/../../docker/abc\n", {".": v2(100, 10)}, 90),
        ("0::/system.slice/docker-abc.scope\n", {".": v2(100, 10)}, 90),
        # v1: own file names, the controller among others, "no limit" as a huge number
        ("5:cpu,cpuacct:/x\n4:memory:/d/e\n0::/\n", {"memory/d/e": v1(100, 25)}, 75),
        ("4:memory:/d/e\n", {"memory/d/e": v1(9223372036854771712, 25), "memory": v1(200, 120)}, 80),
        ("4:memory:/d\n", {"memory/d": v1(9223372036854771712, 25)}, None),
        ("4:memory:/d\n", {"memory/d": v1(100, 90, inactive=10, active=20)}, 40),
        ("9:hugetlb,memory:/d\n", {"memory/d": v1(100, 1)}, 99),
        ("4:cpu:/d\n", {"memory/d": v1(100, 1), "d": v2(100, 1)}, None),
        ("1:name=systemd:/memory\n", {"memory": v1(100, 1)}, None),
        # hybrid: both
        ("4:memory:/d\n0::/u\n", {"memory/d": v1(100, 10), "u": v2(100, 60)}, 40),
        # what makes no sense is no limit
        ("0::/a\n", {"a": {"memory.max": "100\n"}}, None),
        ("0::/a\n", {"a": {"memory.max": "lots\n", "memory.current": "1\n"}}, None),
        ("0::/a\n", {"a": {"memory.max": "100\n", "memory.current": "10\n"}}, 90),
        ("0::/a:b\n", {"a:b": v2(100, 10)}, 90),
    ],
)  # fmt: skip
def test_the_cgroups_limit(
    fake: Fake, tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]], expected: int | None
) -> None:
    fake(cgroup, groups)
    assert room(tmp_path).cgroup == expected


def test_without_proc_there_is_the_file_system(fake: Fake, tmp_path: Path) -> None:
    found = room(tmp_path)
    assert (found.cgroup, found.machine) == (None, None)
    usage = os.statvfs(tmp_path)
    assert abs(found.bytes - usage.f_bavail * usage.f_frsize) < 1 << 30


def test_the_machines_memory(fake: Fake, tmp_path: Path) -> None:
    fake(None, {}, "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    42 kB\n")
    assert room(tmp_path).machine == 42 * 1024
    assert room(tmp_path).bytes == 42 * 1024


def test_a_kernel_that_does_not_say_what_is_available(fake: Fake, tmp_path: Path) -> None:
    """Before Linux 3.14, and where /proc is a container runtime's own."""
    fake(None, {}, "MemTotal:       100 kB\nMemFree:         10 kB\n")
    assert room(tmp_path).machine is None


def test_this_machine() -> None:
    found = room(Path("/dev/shm"))
    assert found.machine is not None
    assert 0 <= found.bytes <= found.machine
    found.require(0, "nothing")


@given(st.integers(0, 1 << 50), *[st.none() | st.integers(0, 1 << 50)] * 2, st.integers(0, 1 << 51))
def test_the_smallest_answer_counts(file_system: int, cgroup: int | None, machine: int | None, needed: int) -> None:
    found = Room(Path("/shm"), file_system, cgroup, machine)
    limits = [limit for limit in (file_system, cgroup, machine) if limit is not None]
    assert found.bytes == min(limits)
    if needed <= min(limits):
        found.require(needed, "x")
    else:
        with pytest.raises(NoRoom):
            found.require(needed, "x")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((10 * MIB, None, None), ["in /shm", "--shm-size", "shm_size", "sizeLimit"]),
        ((1 << 40, 10 * MIB, 1 << 40), ["memory limit", "--memory", "resources.limits.memory"]),
        ((1 << 40, None, 10 * MIB), ["machine's memory"]),
    ],
)
def test_who_is_to_blame_and_what_to_do(limits: tuple[int, int | None, int | None], words: list[str]) -> None:
    with pytest.raises(NoRoom) as caught:
        Room(Path("/shm"), *limits).require(11 * MIB, "'llama'")
    for word in [*words, "'llama' needs 11.00 MiB", "10.00 MiB are free"]:
        assert word in str(caught.value)


def test_sizes_as_people_read_them() -> None:
    assert [gib(size) for size in (0, 1023, 1024, 3 << 19, 5 << 30, 1 << 41)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "5.00 GiB", "2.00 TiB"
    ]  # fmt: skip
