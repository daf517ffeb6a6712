"""The digest of a tensor's bytes: xxh3-128 over blocks, so that many threads can work on one tensor.

A tensor of up to one block has the digest of its bytes; a larger one the digest of its blocks' digests, joined. It finds
accidents (a flipped bit, a torn write), at memory speed; it is no defence against somebody who may write to the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

BLOCK = 4 << 20  # bytes; a unit of reading as well: large enough for any disk, small enough to stay in a CPU's cache


def block(data: bytes | memoryview) -> bytes:
    """Sixteen bytes for up to BLOCK bytes."""
    return xxhash.xxh3_128_digest(data)


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each block of a tensor; one empty block for an empty tensor."""
    for offset in range(0, max(nbytes, 1), BLOCK):
        yield offset, min(BLOCK, nbytes - offset)


def join(digests: Sequence[bytes]) -> str:
    """A tensor's digest, in hexadecimal, from those of its blocks in order."""
    return (digests[0] if len(digests) == 1 else block(b"".join(digests))).hex()
