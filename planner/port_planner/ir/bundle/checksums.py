"""Checksums of a bundle's uncompressed contents: of each tensor, and of a data set by blocks of rows.

XXH3, at the speed of memory (20 GB/s where SHA-256 does 0.9), so that everything is checked wherever it is read. They
detect corruption, not forgery.
"""

import hashlib
from collections.abc import Iterable, Mapping

import xxhash

SUM_BYTES = 8
"""Bytes of one block's checksum."""
_BLOCK_BYTES = 4096
"""One page, the kernel's minimum read: checking all rows of a block needs no additional reads."""


def tensor_hasher() -> xxhash.xxh3_64:
    """Return a hasher that takes a tensor's bytes piece by piece and gives their checksum in hexadecimal."""
    return xxhash.xxh3_64()


def rows_per_block(row_bytes: int) -> int:
    """Return how many rows of a data set share one checksum."""
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


def block_sum(block: bytes) -> bytes:
    """Return the checksum of one block of rows."""
    return xxhash.xxh3_64_digest(block)


def block_sums(row_bytes: int, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the concatenated checksums of a data set's blocks; the last block may be short."""
    whole = row_bytes * rows_per_block(row_bytes)
    sums, block, missing = bytearray(), xxhash.xxh3_64(), whole
    for tile in pieces:
        rest = memoryview(tile)
        while len(rest):
            part, rest = rest[:missing], rest[missing:]
            block.update(part)
            missing -= len(part)
            if not missing:
                sums += block.digest()
                block.reset()
                missing = whole
    if missing < whole:
        sums += block.digest()
    return bytes(sums)


def columns_digest(sums: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the columns' block checksums and names: it identifies the data wherever it lies."""
    digest = hashlib.sha256()
    for key in sorted(sums):
        digest.update(f"{key} {len(sums[key])} ".encode())
        digest.update(sums[key])
    return digest.hexdigest()
