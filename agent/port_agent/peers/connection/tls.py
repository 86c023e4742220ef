"""TLS 1.3 between paired devices, without sockets: bytes in, bytes out.

Each side shows its certificate and has the other's stored: the only authorities of a connection are the certificates of
the paired devices. There are no names, no tickets (a resumed session would outlive `unpair`) and no older versions.
asyncio's own TLS keeps 256 KiB for each connection; this module keeps only data in transit.
"""

import contextlib
import hashlib
import sys
from collections.abc import Iterable

if sys.modules.get("ssl", sys) is None:
    del sys.modules["ssl"]  # the daemon does not load it until a device is paired (port_agent.cli.daemon)
import ssl

from port_agent.peers.identity.device_id import DeviceId
from port_agent.peers.identity.keys import Identity, certificate_pem
from port_planner.base.errors import PortError

PROTOCOL_NAME = "port-agent/1"
"""Name in ALPN; a client with another protocol at this port is rejected in the handshake."""
_PLAIN_BYTES = 16 << 10
"""Largest plaintext in bytes of a TLS record."""


class TlsError(PortError):
    """The other end is not the expected device, or does not use TLS 1.3."""


def check_certificate(der: bytes) -> None:
    """Raise TlsError if TLS cannot use these bytes as the only certificate (DER) of a device."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate_pem(der))
    except ssl.SSLError as error:
        raise TlsError(f"{len(der)} bytes that are not a certificate: {_reason(error)}") from error


def listening_context(own: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    """Return the context of a listener that only accepts devices with these certificates (DER).

    Raises OSError, ssl.SSLError among them, for a key that cannot be read.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, own, trusted)
    context.num_tickets = 0
    return context


def dialing_context(own: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    """Return the context for calling a device with one of these certificates (DER); raises OSError."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, own, trusted)


def _context(protocol: int, own: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # devices have no names that prove anything; the certificate itself is compared
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([PROTOCOL_NAME])
    context.load_cert_chain(own.file)
    for certificate in trusted:
        context.load_verify_locations(cadata=certificate_pem(certificate))
    return context


class TlsEngine:
    """One end of a TLS connection."""

    def __init__(self, context: ssl.SSLContext, *, listens: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self.is_ready = False
        """Whether the handshake is done, so that this end has seen the other's certificate."""

    def begin(self) -> None:
        """Queue the first handshake message for sending."""
        self.receive(b"")

    def receive(self, data: bytes) -> bytes:
        """Decrypt bytes from the network.

        Raises TlsError if they are not TLS 1.3 or from the wrong device; the queued alert then tells the other end.
        """
        self._incoming.write(data)
        plain = bytearray()
        try:
            if not self.is_ready:
                self._object.do_handshake()
                self._check_protocol()
                self.is_ready = True
            while chunk := self._object.read(_PLAIN_BYTES):
                plain += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the other end closed in good order; the stream's end follows
            pass
        except (ssl.SSLError, ValueError) as error:  # ValueError: a certificate that OpenSSL cannot read
            raise TlsError(_reason(error)) from error
        return bytes(plain)

    def send(self, plain: bytes) -> None:
        """Encrypt bytes for sending; raises TlsError before the handshake and after the end."""
        try:
            self._object.write(plain)
        except ssl.SSLError as error:
            raise TlsError(_reason(error)) from error

    def end(self) -> None:
        """Queue the closing alert for sending."""
        with contextlib.suppress(ssl.SSLError, ValueError):
            self._object.unwrap()

    def to_send(self) -> bytes:
        """Return the bytes to send to the network now."""
        return self._outgoing.read()

    def peer_id(self) -> DeviceId:
        """Return the other end's id; raises TlsError before the handshake is done."""
        certificate = self._object.getpeercert(binary_form=True) if self.is_ready else None
        if not certificate:
            raise TlsError("the handshake is not done")
        return DeviceId(hashlib.sha256(certificate).digest())

    def _check_protocol(self) -> None:
        if self._object.selected_alpn_protocol() != PROTOCOL_NAME:
            raise ssl.SSLError(0, f"the other end does not speak {PROTOCOL_NAME}")


def _reason(error: ssl.SSLError | ValueError) -> str:
    """Return OpenSSL's reason in words."""
    reason = getattr(error, "verify_message", None) or getattr(error, "reason", None) or str(error)
    return str(reason).replace("_", " ").lower()
