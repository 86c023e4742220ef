"""The device id: made once, kept, private, made again when it is damaged."""

from pathlib import Path

import pytest

from agent.peers.identity import FILE_NAME, device_id, is_short_id, short_id


def test_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    made = device_id(tmp_path)
    assert len(bytes.fromhex(made)) == 16
    assert device_id(tmp_path) == made
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert is_short_id(short_id(made)) and not is_short_id(made)
    other = tmp_path / "other"
    other.mkdir()
    assert device_id(other) != made


@pytest.mark.parametrize("content", [b"", b"zz", b"\xff" * 32, b"0" * 31, b"0" * 33])
def test_a_damaged_one_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    made = device_id(tmp_path)
    assert made.encode() != content and device_id(tmp_path) == made


def test_no_flipped_bit_makes_another_id_that_looks_sound(tmp_path: Path) -> None:
    made = device_id(tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE_NAME).write_bytes(flipped)
        known = device_id(tmp_path)
        assert known == made or known.encode() not in flipped, bit


def test_an_id_of_an_agent_that_wrote_no_checksum_stays(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(f"{'0123456789abcdef' * 2}\n")
    assert device_id(tmp_path) == "0123456789abcdef" * 2


def test_a_state_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        device_id(tmp_path / "nowhere")
