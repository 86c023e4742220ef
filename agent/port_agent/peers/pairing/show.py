"""Show a code and wait for the device where it is typed: `python -m port_agent.peers.pairing.show`, a process of its own.

It listens only while it runs: minutes, until a device pairs or the tries are used up. One caller at a time, each for
seconds. It writes lines of JSON: the code, wrong tries, and at last the device or why there is none.
"""

import argparse
import base64
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
from port_agent.peers.pairing.stream import PairingStream
from port_planner.base.errors import PortError

CALLER_S = 10.0
"""One try takes 0.2 s, on a slow board 1 s."""
MOST_CALLERS = 50
"""Who calls more often does not pair."""
_AFTER_WRONG_S = 1.0
_LOOK_S = 1.0
"""How soon a code ends with the agent that shows it, however that ended."""

Tell = Callable[[dict[str, object]], None]


def show_code(own: PairingPartner, listener: socket.socket, end_s: float, tell: Tell) -> int:
    """Wait for the other device until `end_s` of the monotonic clock; returns the exit code."""
    code, agent = new_code(), os.getppid()
    tell({"code": code, "port": listener.getsockname()[1], "left_s": end_s - time.monotonic()})
    tries = TRIES
    for _ in range(MOST_CALLERS):
        called = _next_caller(listener, end_s, agent)
        if called is None:
            tell({"failed": "nobody typed the code in time; show a new one"})
            return 1
        sock, address = called
        with sock:
            stream = PairingStream(sock, min(end_s, time.monotonic() + CALLER_S))
            try:
                partner = _answer(stream, read_code(code), own, tries)
            except WrongCodeError:
                tries -= 1
                tell({"wrong": plain_host(address[0]), "tries_left": tries})
                if tries == 0:
                    tell({"failed": f"a wrong code was typed {TRIES} times; show a new one"})
                    return 1
                time.sleep(_AFTER_WRONG_S)
            except PairingError as error:
                tell({"caller": plain_host(address[0]), "trouble": str(error)})
            else:
                tell(paired_line(partner, address[0]))
                return 0
    tell({"failed": f"{MOST_CALLERS} callers and none paired; somebody disturbs it"})
    return 1


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


def paired_line(partner: PairingPartner, host: str) -> dict[str, object]:
    """Return a paired device as a line of JSON, with the address that it was met at."""
    certificate = base64.b64encode(partner.certificate).decode()
    return {"paired": {"certificate": certificate, "name": partner.name, "address": [plain_host(host), partner.port]}}


def plain_host(host: str) -> str:
    """Return an address as people write it: an IPv4 one that came over an IPv6 socket without its prefix."""
    return host.removeprefix("::ffff:")


def tell_line(line: dict[str, object]) -> None:
    """Write a line of JSON to whoever started this process."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def listen_on(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this device, IPv4 and IPv6; raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both sides of a pairing are told about their own device."""
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("fleet_port", type=int)


def own_partner(arguments: argparse.Namespace) -> PairingPartner:
    """Return this device as its partner will know it; raises IdentityError, OSError."""
    return PairingPartner(own_identity(arguments.state_dir).certificate, arguments.name, arguments.fleet_port)


def main(argv: list[str]) -> int:
    """Show a code; returns the exit code."""
    parser = argparse.ArgumentParser()
    add_own_arguments(parser)
    parser.add_argument("pairing_port", type=int)
    parser.add_argument("lifetime_s", type=float)
    arguments = parser.parse_args(argv)
    try:
        own = own_partner(arguments)
        with listen_on(arguments.pairing_port) as listener:
            return show_code(own, listener, time.monotonic() + arguments.lifetime_s, tell_line)
    except (PortError, OSError) as error:
        tell_line(
            {
                "failed": f"port {arguments.pairing_port}: {os.strerror(error.errno or 0)}"
                if isinstance(error, OSError)
                else str(error)
            }
        )
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
