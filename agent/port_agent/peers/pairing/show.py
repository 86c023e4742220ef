"""Show a code and wait for the device at which it is typed:
`python -m port_agent.peers.pairing.show`, in a separate process.

It listens only while it runs: for minutes, until a device pairs or the tries are used up. Its request is `ShowCode`;
its events are the code, wrong tries, disturbing hosts, and finally the device or why there is none.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from port_agent.peers.identity.keys import own_identity
from port_agent.peers.pairing.callers import Callers
from port_agent.peers.pairing.code import new_code, read_code
from port_agent.peers.pairing.exchange import PairingPartner
from port_agent.peers.pairing.protocol import CodeShown, JoinDevice, LastEvent, PairingEvent, PairingFailed, ShowCode
from port_agent.system.helper_process import requests, send_event
from port_planner.base.errors import PortError

_LOOK_S = 1.0
"""Seconds after which a code ends once the agent that shows it has ended, for whatever reason."""


def show_code(
    own: PairingPartner, listener: socket.socket, end_s: float, send: Callable[[PairingEvent], None]
) -> LastEvent:
    """Wait for the other device until `end_s` of the monotonic clock; return the last event."""
    code, agent = new_code(), os.getppid()
    send(CodeShown(code, listener.getsockname()[1], end_s - time.monotonic()))
    callers = Callers(own, read_code(code), end_s, send)
    threading.Thread(target=callers.accept, args=(listener,), daemon=True).start()
    try:
        while (left_s := end_s - time.monotonic()) > 0 and os.getppid() == agent:
            with contextlib.suppress(queue.Empty):
                return callers.outcome.get(timeout=min(left_s, _LOOK_S))
        return PairingFailed("nobody typed the code in time; show a new one")
    finally:
        callers.close(listener)


def listen_on(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this device, IPv4 and IPv6; raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def run_pairing(request: ShowCode | JoinDevice, place: str, pair: Callable[[PairingPartner], LastEvent]) -> int:
    """Run `pair` for the request, with this device's identity for its partner, and send the last event.

    Returns the exit code. A system error is reported for `place`.
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
    """Show a code; return the exit code."""
    request = next(requests(msgspec.json.Decoder(ShowCode)))

    def pair(own: PairingPartner) -> LastEvent:
        with listen_on(request.port) as listener:
            return show_code(own, listener, time.monotonic() + request.lifetime_s, send_event)

    return run_pairing(request, f"port {request.port}", pair)


if __name__ == "__main__":
    raise SystemExit(main())
