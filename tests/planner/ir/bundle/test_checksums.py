"""Checksums by blocks of rows do not depend on how the data comes, and tell which block changed."""

import os

import pytest

from port_planner.ir.bundle.checksums import SUM_BYTES, block_sum, block_sums, rows_per_block, tensor_hasher


@pytest.mark.parametrize("row_bytes", [1, 4, 1000, 4096, 5000, 70_000])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 999, 8])
def test_the_sums_of_blocks_whatever_the_chunks(row_bytes: int, chunk_bytes: int) -> None:
    data = os.urandom(row_bytes * (3 * rows_per_block(row_bytes) + 1))
    chunks = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]
    whole = row_bytes * rows_per_block(row_bytes)
    blocks = [data[i : i + whole] for i in range(0, len(data), whole)]
    assert block_sums(row_bytes, chunks) == b"".join(map(block_sum, blocks))
    changed = bytearray(data)
    changed[whole] ^= 1
    before, after = (block_sums(row_bytes, [d]) for d in (data, bytes(changed)))
    different = [
        i for i in range(len(blocks)) if before[i * SUM_BYTES :][:SUM_BYTES] != after[i * SUM_BYTES :][:SUM_BYTES]
    ]
    assert different == [1]


def test_rows_without_bytes_have_no_sums() -> None:
    assert block_sums(0, []) == b""


def test_the_sum_of_a_tensor_whatever_the_chunks() -> None:
    data, parts = os.urandom(1000), tensor_hasher()
    whole = tensor_hasher()
    whole.update(data)
    for i in range(0, len(data), 7):
        parts.update(data[i : i + 7])
    assert parts.hexdigest() == whole.hexdigest()
