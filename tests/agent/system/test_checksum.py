"""Checksums: the same however the bytes come, another for every flipped bit."""

from pathlib import Path

from port_agent.system.checksum import RunningChecksum, bytes_checksum, file_checksum, values_checksum


def test_bytes_chunks_and_a_file_have_one_checksum(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8200  # more than one chunk of a file
    running = RunningChecksum()
    for start in range(0, len(content), 100_000):
        running.update(memoryview(content)[start : start + 100_000])
    path = tmp_path / "file"
    path.write_bytes(content)
    assert running.text() == bytes_checksum(content) == file_checksum(path)
    assert bytes_checksum(b"123456789") == "cbf43926"  # the check value of CRC-32 (ISO 3309)


def test_every_flipped_bit_is_seen() -> None:
    content = b"weights of a model"
    flipped = {
        bytes_checksum((int.from_bytes(content) ^ 1 << bit).to_bytes(len(content))) for bit in range(8 * len(content))
    }
    assert len(flipped) == 8 * len(content) and bytes_checksum(content) not in flipped


def test_values_have_a_checksum_whatever_the_order_of_their_keys() -> None:
    assert values_checksum({"a": 1, "b": [2.5, None]}) == values_checksum({"b": [2.5, None], "a": 1})
    assert values_checksum({"a": 1}) != values_checksum({"a": "1"})
