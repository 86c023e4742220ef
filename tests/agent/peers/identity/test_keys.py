"""The key file: made once, private, never silently made again."""

import hashlib
import threading
from pathlib import Path

import pytest

from port_agent.peers.identity import keys
from port_agent.peers.identity.keys import (
    FILE_NAME,
    IdentityError,
    certificate_in,
    certificate_pem,
    key_file,
    own_identity,
    read_identity,
)


@pytest.mark.process
def test_made_once_for_its_owner_alone_and_known_by_the_hash_of_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "device-id").write_text("of an older agent")
    made = own_identity(tmp_path)
    assert made.id.digest == hashlib.sha256(made.certificate).digest()
    assert own_identity(tmp_path) == made
    assert made.file.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
    other = tmp_path / "other"
    other.mkdir()
    assert own_identity(other).id != made.id


@pytest.mark.process
def test_two_that_need_the_first_key_at_once_get_the_same(tmp_path: Path) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(own_identity(tmp_path).id)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]


@pytest.mark.long
def test_no_flipped_bit_makes_another_key_or_goes_unseen(tmp_path: Path) -> None:
    own_identity(tmp_path)
    file = tmp_path / FILE_NAME
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(IdentityError, match="pair this device again"):
            own_identity(tmp_path)
        assert file.read_bytes() == flipped


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"# A 0\n", b"\xff" * 99, b"-----BEGIN CERTIFICATE-----", b"#" * 99999]
)
def test_what_is_no_key_file_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(IdentityError, match="is damaged"):
        own_identity(tmp_path)


def test_a_certificate_without_an_end_under_a_right_checksum(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(key_file(b"-----BEGIN CERTIFICATE-----\nAAAA\n", bytes(32)))
    with pytest.raises(IdentityError, match="no certificate"):
        read_identity(tmp_path / FILE_NAME)
    with pytest.raises(ValueError, match="31 bytes"):
        key_file(b"", bytes(31))


def test_a_certificate_survives_its_text() -> None:
    for der in (b"", b"\x30" * 47, bytes(range(256))):
        assert certificate_in(certificate_pem(der)) == der


@pytest.mark.process
def test_a_directory_that_is_not_there_and_a_maker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IdentityError, match="cannot be created: No such file"):
        own_identity(tmp_path / "nowhere")
    monkeypatch.setattr(keys, "_MAKING_PATIENCE_S", 0.0)
    with pytest.raises(IdentityError, match="within 0 s"):
        own_identity(tmp_path)
