"""Show a code and wait for the device where it is typed: `python -m port_agent.peers.pairing.show`, a process of its own.

It listens only while it runs: minutes, until a device pairs or the tries are used up. One caller at a time, each for
seconds. Its request is `ShowCode`; its events are the code, wrong tries, and at last the device or why there is none.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from port_agent.peers.identity.keys import own_identity
from port_agent.peers.pairing.code import TRIES, new_code, read_code
from port_agent.peers.pairing.exchange import (
    PairingError,
    PairingExchange,
    PairingPartner,
    PairingSide,
    WrongCodeError,
    refusal,
)
from port_agent.peers.pairing.protocol import (
    CodeShown,
    JoinDevice,
    LastEvent,
    NewPartner,
    PairingEvent,
    PairingFailed,
    ShowCode,
    WrongCode,
)
from port_agent.peers.pairing.stream import PairingStream
from port_agent.system.helper_process import requests, send_event
from port_planner.base.errors import PortError

CALLER_S = 10.0
"""One try takes 0.2 s, on a slow board 1 s."""
MAX_CALLERS = 50
"""Who calls more often does not pair."""
_AFTER_WRONG_S = 1.0
_LOOK_S = 1.0
"""How soon a code ends with the agent that shows it, however that ended."""


def show_code(
    own: PairingPartner, listener: socket.socket, end_s: float, send: Callable[[PairingEvent], None]
) -> LastEvent:
    """Wait for the other device until `end_s` of the monotonic clock; returns the last event."""
    code, agent = new_code(), os.getppid()
    send(CodeShown(code, listener.getsockname()[1], end_s - time.monotonic()))
    tries = TRIES
    for _ in range(MAX_CALLERS):
        called = _next_caller(listener, end_s, agent)
        if called is None:
            return PairingFailed("nobody typed the code in time; show a new one")
        sock, address = called
        with sock:
            stream = PairingStream(sock, min(end_s, time.monotonic() + CALLER_S))
            try:
                partner = _answer(stream, read_code(code), own, tries)
            except WrongCodeError:
                tries -= 1
                send(WrongCode(plain_host(address[0]), tries))
                if tries == 0:
                    return PairingFailed(f"a wrong code was typed {TRIES} times; show a new one")
                time.sleep(_AFTER_WRONG_S)
            except PairingError:
                continue  # who does not pair costs no try
            else:
                return new_partner(partner, address[0])
    return PairingFailed(f"{MAX_CALLERS} callers and none paired; somebody disturbs it")


def _next_caller(listener: socket.socket, end_s: float, agent: int) -> tuple[socket.socket, tuple[str, int]] | None:
    """Return the next connection and where it comes from, or None: time is over, or the agent whose code it is has ended."""
    while (left_s := end_s - time.monotonic()) > 0 and os.getppid() == agent:
        listener.settimeout(min(left_s, _LOOK_S))
        with contextlib.suppress(TimeoutError):
            sock, address = listener.accept()
            return sock, address
    return None


def _answer(stream: PairingStream, digits: str, own: PairingPartner, tries: int) -> PairingPartner:
    exchange = PairingExchange(PairingSide.SHOWER, digits, own)
    exchange.take_start(stream.receive())
    stream.send(exchange.start())
    try:
        partner = exchange.take_proof(stream.receive())
    except WrongCodeError:
        left = tries - 1
        stream.send(
            refusal(f"the code is wrong; {left} more of {TRIES} tries" if left else "the code is wrong; no more tries")
        )
        raise
    stream.send(exchange.proof())
    return partner


def new_partner(partner: PairingPartner, host: str) -> NewPartner:
    """Return a paired device with the address that it was met at."""
    return NewPartner(partner.certificate, partner.name, (plain_host(host), partner.port))


def plain_host(host: str) -> str:
    """Return an address as people write it: an IPv4 one that came over an IPv6 socket without its prefix."""
    return host.removeprefix("::ffff:")


def listen_on(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this device, IPv4 and IPv6; raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def run_pairing(request: ShowCode | JoinDevice, place: str, pair: Callable[[PairingPartner], LastEvent]) -> int:
    """Have `pair` do what was requested, given this device as its partner will know it, and send the last event.

    Returns the exit code. What the system refuses is told of `place`.
    """
    own = request.place
    try:
        outcome = pair(PairingPartner(own_identity(Path(own.state_dir)).certificate, own.name, own.fleet_port))
    except PortError as error:
        outcome = PairingFailed(str(error))
    except OSError as error:
        outcome = PairingFailed(f"{place}: {os.strerror(error.errno or 0)}")
    send_event(outcome)
    return int(isinstance(outcome, PairingFailed))


def main() -> int:
    """Show a code; returns the exit code."""
    request = next(requests(msgspec.json.Decoder(ShowCode)))

    def pair(own: PairingPartner) -> LastEvent:
        with listen_on(request.port) as listener:
            return show_code(own, listener, time.monotonic() + request.lifetime_s, send_event)

    return run_pairing(request, f"port {request.port}", pair)


if __name__ == "__main__":
    raise SystemExit(main())
