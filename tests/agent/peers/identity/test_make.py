"""What certificates are made of: nothing of the device, any clock, both ends of a connection, not a third one."""

import hashlib
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from port_agent.peers.identity.keys import certificate_in, read_identity
from port_agent.peers.identity.make import main, new_key_and_certificate


def test_a_certificate_tells_nothing_and_never_ends() -> None:
    pem, digest = new_key_and_certificate()
    der = certificate_in(pem.decode())
    assert hashlib.sha256(der).digest() == digest
    made = x509.load_der_x509_certificate(der)
    assert made.subject == made.issuer
    common, serial = made.subject
    mark = x509.SubjectKeyIdentifier.from_public_key(made.public_key()).digest
    assert (common.value, serial.value) == ("port-agent", mark.hex())
    assert made.not_valid_before_utc == datetime(1970, 1, 1, tzinfo=UTC), "boards without a clock battery"
    assert made.not_valid_after_utc.year == 9999
    key = made.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert new_key_and_certificate()[1] != digest


def test_the_file_is_what_tls_loads(tmp_path: Path) -> None:
    file = tmp_path / "identity.pem"
    assert main([str(file)]) == 0
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file)
    assert read_identity(file).file == file


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere/identity.pem")]) == 1
    assert capsys.readouterr().err == "No such file or directory\n"
