"""Pair with a device that shows a code: `python -m port_agent.peers.pairing.join`, a process of its own; the code comes by stdin."""

import argparse
import socket
import sys
import time

from port_agent.peers.pairing.code import read_code
from port_agent.peers.pairing.exchange import PairingError, PairingExchange, PairingPartner, PairingSide, WrongCodeError
from port_agent.peers.pairing.show import CALLER_S, Tell, add_own_arguments, own_partner, paired_line, tell_line
from port_agent.peers.pairing.stream import PairingStream
from port_planner.base.errors import PortError

_CONNECT_S = 5.0


def join_device(own: PairingPartner, digits: str, host: str, port: int, tell: Tell) -> int:
    """Pair with the device at `host`; returns the exit code."""
    try:
        sock = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError as error:
        tell({"failed": f"no device shows a code at {host} port {port} ({error.strerror or error})"})
        return 1
    with sock:
        stream = PairingStream(sock, time.monotonic() + CALLER_S)
        exchange = PairingExchange(PairingSide.JOINER, digits, own)
        try:
            stream.send(exchange.start())
            exchange.take_start(stream.receive())
            stream.send(exchange.proof())
            partner = exchange.take_proof(stream.receive())
        except WrongCodeError:
            tell({"failed": f"the device at {host} does not know this code; is it the one that shows it?"})
            return 1
        except PairingError as error:
            tell({"failed": str(error)})
            return 1
        tell(paired_line(partner, sock.getpeername()[0]))
        return 0


def main(argv: list[str]) -> int:
    """Join; returns the exit code."""
    parser = argparse.ArgumentParser()
    add_own_arguments(parser)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args(argv)
    try:
        digits = read_code(sys.stdin.readline())
        return join_device(own_partner(arguments), digits, arguments.host, arguments.port, tell_line)
    except PortError as error:
        tell_line({"failed": str(error)})
    except OSError as error:
        tell_line({"failed": f"{arguments.state_dir}: {error.strerror or error}"})
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
