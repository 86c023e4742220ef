"""Create a key pair and its certificate: `python -m port_agent.peers.identity.make FILE`, in a separate process.

The key is P-256, because every TLS library supports it and Flower signs with it. The certificate does not describe the
device, which is known by its hash. It is valid from 1970 without end (RFC 5280, 4.1.2.5), because boards without a
clock battery start in 1970.
"""

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from port_agent.peers.identity.keys import key_file
from port_agent.system.atomic_file import write_atomically

COMMON_NAME = "port-agent"
"""Common name of all certificates, which is not a host name.

The key's hash is appended, because OpenSSL finds a trusted certificate by its subject, and only the
first of several equal ones.
"""
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def new_key_and_certificate() -> tuple[bytes, bytes]:
    """Return a new key and its certificate as one PEM text, and the SHA-256 of the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = self_signed(key)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    digest = hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()
    return private + certificate.public_bytes(Encoding.PEM), digest


def self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return a certificate of `key` that is valid only for both ends of a TLS connection."""
    mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()
    common, serial = (NameOID.COMMON_NAME, COMMON_NAME), (NameOID.SERIAL_NUMBER, mark)
    name = x509.Name([x509.NameAttribute(*attribute) for attribute in (common, serial)])
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(both_ends, critical=True)
        .sign(key, hashes.SHA256())
    )


def main(argv: list[str]) -> int:
    """Write a key file; return the exit code."""
    (path,) = argv
    pem, digest = new_key_and_certificate()
    try:
        write_atomically(Path(path), key_file(pem, digest))
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
