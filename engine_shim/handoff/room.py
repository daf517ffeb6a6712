"""How much shared memory can still be filled: the file system's room, the memory limit around us, the machine's memory.

Filling a tmpfs fails cleanly (ENOSPC). Passing the *memory cgroup's* limit does not: the kernel kills somebody. So both
are asked before anything is allocated, and the smaller answer counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from engine_shim.handoff.errors import NoRoom
from engine_shim.handoff.posix import ancestors, read_number

_CGROUPS = Path("/sys/fs/cgroup")
# Where engines have channels between their own processes.
_SHARED_MEMORY = Path("/dev/shm")
# What a publication leaves free there: vLLM wants 160 MiB for its channels and does not start without. An engine's start must
# not fail for what an earlier start has published.
_SPARE = 256 << 20
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True)
class Room:
    """Bytes that can still be allocated, by what limits them; None where nothing does."""

    directory: Path
    file_system: int
    cgroup: Optional[int]
    machine: Optional[int]

    @property
    def bytes(self) -> int:
        return min(limit for limit in (self.file_system, self.cgroup, self.machine) if limit is not None)

    def require(self, needed: int, what: str, spare: int = 0) -> None:
        """Raises NoRoom, with numbers and the remedy, unless `needed` bytes fit and leave `spare` in the file system."""
        if needed <= self.bytes and needed + spare <= self.file_system:
            return
        left = f", with {gib(spare)} left for engines' own use," if spare else ""
        if needed <= self.bytes or self.bytes == self.file_system:
            need = f"{what} needs {gib(needed)}{left} and only {gib(self.file_system)} are free"
            raise NoRoom(
                f"{need} in {self.directory}: make it larger (docker and compose: shm_size or --shm-size; podman: "
                "--shm-size; Kubernetes: sizeLimit of the memory emptyDir at /dev/shm; host: mount -o remount,size=)"
            )
        need = f"{what} needs {gib(needed)} and only {gib(self.bytes)} are free"
        if self.bytes == self.cgroup:
            raise NoRoom(
                f"{need} under the container's memory limit, which shared memory counts against: raise it (docker and "
                "podman: --memory; compose: mem_limit; Kubernetes: resources.limits.memory)"
            )
        raise NoRoom(f"{need} in the machine's memory: use a larger machine or serve fewer models")


def gib(count: int) -> str:
    """A count of bytes as people read it."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def room(directory: Path) -> Room:
    """What can be allocated in `directory` now. Reads /proc and /sys/fs/cgroup (v1 and v2)."""
    usage = os.statvfs(directory)
    return Room(directory, usage.f_bavail * usage.f_frsize, _cgroup_room(), _machine_room())


def spare(directory: Path) -> int:
    """What is to be left free by whoever puts something into `directory` that an engine could do without."""
    try:
        return _SPARE if os.stat(directory).st_dev == os.stat(_SHARED_MEMORY).st_dev else 0
    except OSError:
        return 0


def _machine_room() -> Optional[int]:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_room() -> Optional[int]:
    """The least room up the tree of memory cgroups. Page cache that can be dropped counts as room."""
    try:
        rows = [line.strip().split(":", 2) for line in open("/proc/self/cgroup")]
    except OSError:
        return None
    least: Optional[int] = None
    for _, controllers, path in rows:
        if controllers and "memory" not in controllers.split(","):
            continue
        v1 = bool(controllers)
        root = _CGROUPS / "memory" if v1 else _CGROUPS
        limit_file, used_file = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
        )
        # Inside a container the path may not exist below the mount; the mount itself is then our own cgroup.
        for group in [root / part.relative_to("/") for part in ancestors(Path(path))] + [root]:
            limit, used = read_number(group / limit_file), read_number(group / used_file)
            if limit is None or used is None or limit > _UNLIMITED:
                continue
            free = max(0, limit - used + _droppable(group, v1))
            least = free if least is None else min(least, free)
    return least


def _droppable(group: Path, v1: bool) -> int:
    wanted = ("total_inactive_file", "total_active_file") if v1 else ("inactive_file", "active_file")
    total = 0
    try:
        for line in open(group / "memory.stat"):
            key, value = line.split()
            if key in wanted:
                total += int(value)
    except (OSError, ValueError):
        pass
    return total
