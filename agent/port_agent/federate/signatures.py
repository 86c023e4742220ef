"""Signatures of devices in secure aggregation, with the keys of their pairing."""

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_der_x509_certificate

from port_agent.peers.federation_requests import node_number
from port_agent.peers.fleet.paired import PairedDevices
from port_agent.peers.identity.keys import Identity, own_identity
from port_planner.base.errors import PortError

_ALGORITHM = ec.ECDSA(hashes.SHA256())


class SignatureError(PortError):
    """A message was not signed by the device from which it claims to come."""


class DeviceSignatures:
    """Signs for this device and verifies signatures of its paired devices, by their numbers among Flower's nodes."""

    def __init__(self, state_dir: Path) -> None:
        """Read keys and certificates; raises PortError for damaged ones, OSError."""
        self._own: Identity = own_identity(state_dir)
        paired = PairedDevices(state_dir)
        paired.load()
        known = {str(device.id): device.certificate for device in paired.all()}
        self._certificates = {node_number(name): der for name, der in known.items()}

    def sign(self, content: bytes) -> bytes:
        """Return this device's signature of `content`; raises SignatureError for a key of another kind."""
        key = load_pem_private_key(self._own.file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SignatureError("this device's key is of an unsupported kind")
        return key.sign(content, _ALGORITHM)

    def check(self, node: int, content: bytes, signature: bytes) -> None:
        """Raise SignatureError unless `content` was signed by the device of this number."""
        certificate = self._certificates.get(node)
        if certificate is None:
            raise SignatureError("an unpaired device takes part; pair all devices with each other")
        key = load_der_x509_certificate(certificate).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise SignatureError("a device has a key of an unsupported kind")
        try:
            key.verify(signature, content, _ALGORITHM)
        except InvalidSignature as error:
            raise SignatureError(
                "a device did not sign the keys, weights and ranges of this round as they arrived here"
            ) from error
