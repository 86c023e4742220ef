"""Pair with a device that shows a code: `python -m port_agent.peers.pairing.join`, in a separate process.

Its request is `JoinDevice`. The code is not an argument, because every user can list arguments.
"""

import socket
import time
from collections.abc import Sequence

import msgspec

from port_agent.peers.connection.tls import TlsError, check_certificate
from port_agent.peers.pairing.callers import CALLER_S, new_partner
from port_agent.peers.pairing.code import read_code
from port_agent.peers.pairing.exchange import PairingError, PairingExchange, PairingPartner, PairingSide, WrongCodeError
from port_agent.peers.pairing.protocol import JoinDevice, NewPartner
from port_agent.peers.pairing.show import run_pairing
from port_agent.peers.pairing.stream import PairingStream
from port_agent.system.helper_process import requests

_CONNECT_S = 5.0


def join_device(own: PairingPartner, digits: str, hosts: Sequence[str], port: int) -> NewPartner:
    """Return the device at the first of `hosts` that answers, once both have proved that they know the code.

    Raises PairingError.
    """
    failures = []
    for host in hosts:
        try:
            sock = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as error:
            failures.append(f"{host} port {port} ({error.strerror or error})")
        else:
            with sock:
                return _join(own, digits, host, sock)
    raise PairingError(f"no device shows a code at {', '.join(failures)}")


def _join(own: PairingPartner, digits: str, host: str, sock: socket.socket) -> NewPartner:
    stream = PairingStream(sock, time.monotonic() + CALLER_S)
    exchange = PairingExchange(PairingSide.JOINER, digits, own)
    try:
        stream.send(exchange.start())
        exchange.take_start(stream.receive())
        stream.send(exchange.proof())
        partner = exchange.take_proof(stream.receive())
        check_certificate(partner.certificate)
    except WrongCodeError as error:
        raise PairingError(f"the device at {host} does not know this code; is it the one that shows it?") from error
    except TlsError as error:
        raise PairingError(f"the device at {host} sent {error}") from error
    return new_partner(partner, sock.getpeername()[0])


def main() -> int:
    """Join; return the exit code."""
    request = next(requests(msgspec.json.Decoder(JoinDevice)))
    return run_pairing(
        request,
        request.place.state_dir,
        lambda own: join_device(own, read_code(request.code), request.hosts, request.port),
    )


if __name__ == "__main__":
    raise SystemExit(main())
