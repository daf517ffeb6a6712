"""Limits on real processes: control groups of memory, and what a process takes from itself."""

from __future__ import annotations

import json
import os
import resource
import secrets
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
ADDRESS_SPACE = 420 << 20  # bytes; an idle sidecar has some 100 MiB, and each thread takes 8 and more


@dataclass(frozen=True)
class MemoryGroup:
    """A memory control group of this test, version 1 or 2."""

    path: Path
    v1: bool

    @classmethod
    def make(cls) -> MemoryGroup | None:
        for root, v1 in ((ROOT / "memory", True), (ROOT, False)):
            path = root / f"ballast-test-{secrets.token_hex(4)}"
            try:
                path.mkdir()
            except OSError:
                continue
            group = cls(path, v1)
            if (path / group._limit).exists():
                return group
            path.rmdir()
        return None

    @property
    def _limit(self) -> str:
        return "memory.limit_in_bytes" if self.v1 else "memory.max"

    def limit(self, size: int) -> None:
        (self.path / self._limit).write_text(str(size))

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def prefix(self) -> tuple[str, ...]:
        """Before a command: it begins in this group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh")

    def eat(self, size: int) -> subprocess.Popen[bytes]:
        """A neighbour that fills this much memory, piece by piece."""
        code = f"import time\nheld = []\nfor _ in range({size >> 20}): held.append(bytes([1]) * (1 << 20)); time.sleep(0.002)\n"
        code += "time.sleep(60)"
        return subprocess.Popen([*self.prefix(), sys.executable, "-c", code])

    def remove(self) -> None:
        for _ in range(100):
            for pid in (self.path / "cgroup.procs").read_text().split():
                (self.path.parent / "cgroup.procs").write_text(pid)
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{self.path} cannot be removed")


def sparse(path: Path, size: int) -> None:
    """A checkpoint file whose data is a hole."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


def few_descriptors(free: int) -> bool:
    """Leaves this process room for so many more."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    for _ in range(highest + 1):  # fill what is free below
        fd = os.open("/dev/null", os.O_RDONLY)
        if fd > highest:
            os.close(fd)
            break
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return True


def lower(name: str, value: int) -> None:
    limit = getattr(resource, name)
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1] if value else value))


def no_more_address_space(spare: int) -> None:
    """Leaves this process so many bytes of address space."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
