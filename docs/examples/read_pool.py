"""Reads a pool with nothing but the standard library, by docs/protocol.md alone; imports nothing of Ballast.

    python docs/examples/read_pool.py POOL                 the catalog
    python docs/examples/read_pool.py POOL MODEL           the tensors of the model's newest ready generation
    python docs/examples/read_pool.py POOL MODEL TENSOR    the first bytes of one tensor, and a digest of all of them

The directory is BALLAST_DIR, or /dev/shm. While it reads a tensor it holds an attachment, as an engine does.
"""

import fcntl
import hashlib
import json
import mmap
import os
import secrets
import stat
import struct
import sys
import time

DIR = os.environ.get("BALLAST_DIR") or "/dev/shm"
OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)


def open_object(path):
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        sys.exit(f"{path} is not to be trusted")
    return fd


def read_slot(fd, start, size):
    """(sequence, payload); None if it was never written, False if it is torn."""
    sequence, length, digest = struct.unpack("<QQ32s", os.pread(fd, 48, start))
    if not sequence or length > size - 48:
        return False if sequence else None
    payload = os.pread(fd, length, start + 48)
    signed = struct.pack("<QQ", sequence, length) + payload
    return (sequence, payload) if digest == hashlib.blake2b(signed, digest_size=32).digest() else False


def read_catalog(fd):
    magic, layout, order, offset, size = struct.unpack("<8sIIQQ", os.pread(fd, 32, 0))
    if (magic, layout, order, offset, size) != (b"BALLAST\x01", 1, 0x01020304, 4096, 262144):
        sys.exit("this is not a control page of layout 1")
    places = (offset, offset + size)
    for _ in range(100):
        slots = [read_slot(fd, place, size) for place in places]
        newest = max((slot for slot in slots if slot), default=None)
        # Beside a torn slot the other one counts only if it is still what it was.
        if newest and (False not in slots or read_slot(fd, places[slots.index(newest)], size) == newest):
            return json.loads(newest[1])
        time.sleep(0.01)
    sys.exit("no slot is whole: the pool is just being made, or it is damaged")


def read_manifest(path):
    fd = open_object(path)
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    magic, version, _, length, digest = struct.unpack("<8sIIQ32s", data[:56])
    body = data[56:]
    if (magic, version, length) != (b"BALLASTM", 1, len(body)) or digest != hashlib.blake2b(
        body, digest_size=32
    ).digest():
        sys.exit(f"{path} is damaged")
    return json.loads(body)


def attach(prefix, generation, model):
    """A record with a kernel lock on its first byte; it counts for as long as the returned descriptor is open."""
    identifier = secrets.token_hex(8)
    path = f"{prefix}a.{identifier}"
    fd = os.open(path + ".tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(fd, 0o600)
    fcntl.fcntl(fd, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    record = {"generation": generation, "model": model, "engine": "read_pool", "pid": os.getpid(), "since": time.time()}
    os.pwrite(fd, json.dumps({**record, "identifier": identifier}).encode(), 0)
    os.rename(path + ".tmp", path)
    return fd, path


def main(pool, model=None, tensor=None):
    prefix = os.path.join(DIR, f"ballast-{pool}.")
    control = open_object(prefix + "ctl")
    catalog = read_catalog(control)
    if model is None:
        for g in catalog["generations"]:
            print(g["number"], g["model"], g["kind"], g["state"], g["total"])
        return
    ready = [g for g in catalog["generations"] if (g["model"], g["state"]) == (model, "ready")]
    if not ready:
        sys.exit(f"{model} is not ready")
    number = max(g["number"] for g in ready)
    fd, record = attach(prefix, number, model)
    try:
        if not any((g["number"], g["state"]) == (number, "ready") for g in read_catalog(control)["generations"]):
            sys.exit("retired just now: look again")
        manifest = read_manifest(f"{prefix}g{number}.manifest")
        for name, dtype, shape, _, segment, offset, nbytes, digest, _ in manifest["tensors"]:
            if tensor is None:
                print(name, dtype, shape, f"w{segment}", offset, nbytes, digest)
            elif tensor == name:
                with mmap.mmap(
                    open_object(f"{prefix}g{number}.w{segment}"), manifest["segments"][segment], prot=mmap.PROT_READ
                ) as segment_bytes:
                    data = segment_bytes[offset : offset + nbytes]
                print(name, dtype, shape, data[:64].hex(), hashlib.blake2b(data, digest_size=16).hexdigest())
    finally:
        os.unlink(record)
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
