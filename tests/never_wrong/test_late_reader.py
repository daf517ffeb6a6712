"""A worker that is late must not write into the segment of another model."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidecar import checkpoint, digest, loader
from sidecar.checkpoint import CheckpointError
from tests.checkpoints import write


def test_a_failed_load_waits_for_its_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8 * digest.BLOCK
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {"t": ("U8", (size,), name.encode() * size)})
    really = os.preadv
    late = threading.Event()

    def read(fd: int, buffers: Sequence[memoryview], position: int) -> int:
        """File a: the beginning cannot be read, the rest takes its time."""
        if Path(f"/proc/self/fd/{fd}").readlink().name != "a.safetensors":
            return really(fd, buffers, position)
        if position < 4 * digest.BLOCK:
            late.wait(10)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = really(fd, buffers, position)
        late.set()
        time.sleep(1)
        return count

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(loader, "_read", vars(loader._read)["__wrapped__"])  # one attempt: no time for the late to come
    stop, buffers = threading.Event(), threading.local()
    with ThreadPoolExecutor(4) as executor:

        def load(name: str) -> bytes:
            shard = checkpoint.read_header(tmp_path / f"{name}.safetensors")
            placed, length = loader.place(shard)
            segment = tmp_path / f"segment-{name}"
            fd = loader.create_segment(segment, placed, length)
            try:
                loader.ShardLoader(shard, placed, fd, segment, stop, lambda _: None).load(executor, buffers)
                time.sleep(2)  # long enough for whoever is late
            finally:
                os.close(fd)
            return segment.read_bytes()[:size]

        with pytest.raises(CheckpointError):
            load("a")
        assert load("b") == b"b" * size
