"""What the numbers were measured on. No host name, no path: a description, not an address."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def describe(cache: Path) -> dict[str, object]:
    return {
        "cpu": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_total() / (1 << 30), 1),
        "kernel": platform.release().split("-")[0],
        "system": _first(r'PRETTY_NAME="(.+)"', "/etc/os-release"),
        "virtual": "hypervisor" in _text("/proc/cpuinfo"),
        "disk_file_system": file_system(cache),
        "shm_huge_pages": "huge=" + (_first(r" /dev/shm tmpfs \S*huge=(\w+)", "/proc/mounts") or "never"),
        "transparent_huge_pages": _first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "safetensors", "xxhash", "orjson", "posix-ipc")},
        "commit": _commit(),
    }


def file_system(path: Path) -> str:
    """The type of the file system that `path`, or what exists of it, is on."""
    path = path.resolve()
    best, found = "", "unknown"
    for line in _text("/proc/mounts").splitlines():
        _, point, kind, *_ = line.split()
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, found = point, kind
    return found


def memory_available() -> int:
    """Bytes that can be allocated without swapping; the page cache counts as free."""
    return int(_first(r"MemAvailable:\s*(\d+)", "/proc/meminfo") or 0) * 1024


def memory_free() -> int:
    """Bytes that nothing uses, not even the page cache."""
    return int(_first(r"MemFree:\s*(\d+)", "/proc/meminfo") or 0) * 1024


def memory_total() -> int:
    return int(_first(r"MemTotal:\s*(\d+)", "/proc/meminfo") or 0) * 1024


def load_average() -> float:
    return os.getloadavg()[0]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first(pattern: str, path: str) -> str | None:
    found = re.search(pattern, _text(path))
    return found[1].strip() if found else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit measured, with `+` where the tree has changes."""
    root = Path(__file__).parent.parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


PYTHON = sys.executable
