"""Callers while a code is shown: several at once, few from one address; all together share the code's tries."""

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from port_agent.peers.connection.tls import TlsError, check_certificate
from port_agent.peers.pairing.code import TRIES
from port_agent.peers.pairing.exchange import (
    PairingError,
    PairingExchange,
    PairingPartner,
    PairingSide,
    WrongCodeError,
    refusal,
)
from port_agent.peers.pairing.protocol import (
    CallersTurnedAway,
    LastEvent,
    NewPartner,
    PairingEvent,
    PairingFailed,
    WrongCode,
)
from port_agent.peers.pairing.stream import PairingStream

CALLER_S = 10.0
"""Seconds for a caller; one try takes 0.2 s, on a slow board 1 s."""
MAX_AT_ONCE, MAX_OF_HOST = 16, 2
"""Largest numbers of callers that are answered at once.

Beyond the first, the oldest makes way; beyond the second, a host's next one is rejected.
"""
_AFTER_WRONG_S = 1.0


@dataclass(frozen=True, slots=True)
class _Caller:
    """A connection."""

    socket: socket.socket
    host: str


class Callers:
    """Answers callers until one pairs or the tries are used up; then `outcome` has the last event."""

    def __init__(self, own: PairingPartner, digits: str, end_s: float, send: Callable[[PairingEvent], None]) -> None:
        self._own, self._digits, self._end_s, self._send = own, digits, end_s, send
        self.outcome: queue.SimpleQueue[LastEvent] = queue.SimpleQueue()
        self._tries = TRIES
        self._proving = threading.Lock()
        """Lock that allows one proof at a time, because each uses up a try before the next is examined."""
        self._lock = threading.Lock()
        """Lock that protects the fields below, and sending."""
        self._callers: list[_Caller] = []
        self._turned_away: set[str] = set()

    def accept(self, listener: socket.socket) -> None:
        """Accept callers until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                sock, address = listener.accept()
                caller = _Caller(sock, plain_host(address[0]))
                if self._admit(caller):
                    threading.Thread(target=self._serve, args=(caller,), daemon=True).start()
                else:
                    sock.close()

    def close(self, listener: socket.socket) -> None:
        """Stop accepting callers, and disconnect the current ones."""
        _hang_up(listener)
        with self._lock:
            for caller in self._callers:
                _hang_up(caller.socket)

    def _admit(self, caller: _Caller) -> bool:
        with self._lock:
            if Counter(one.host for one in self._callers)[caller.host] >= MAX_OF_HOST:
                if caller.host not in self._turned_away and len(self._turned_away) < MAX_AT_ONCE:
                    self._turned_away.add(caller.host)
                    self._send(CallersTurnedAway(caller.host))
                return False
            if len(self._callers) >= MAX_AT_ONCE:
                _hang_up(self._callers.pop(0).socket)
            self._callers.append(caller)
            return True

    def _serve(self, caller: _Caller) -> None:
        with caller.socket:
            stream = PairingStream(caller.socket, min(self._end_s, time.monotonic() + CALLER_S))
            with contextlib.suppress(PairingError):  # a caller that does not pair costs no try
                self._answer(stream, caller.host)
        with self._lock, contextlib.suppress(ValueError):  # it gave way
            self._callers.remove(caller)

    def _answer(self, stream: PairingStream, host: str) -> None:
        """Handle one try; raises PairingError if no device is paired by it."""
        exchange = PairingExchange(PairingSide.SHOWER, self._digits, self._own)
        exchange.take_start(stream.receive())
        stream.send(exchange.start())
        proof = stream.receive()
        with self._proving:
            if self._tries == 0:
                raise PairingError("the tries are used up")
            try:
                partner = exchange.take_proof(proof)
                check_certificate(partner.certificate)
            except WrongCodeError:
                self._tries -= 1
                with self._lock:
                    self._send(WrongCode(host, self._tries))
                _refuse(stream, f"the code is wrong; {_tries_left(self._tries)}")
                if self._tries == 0:
                    self.outcome.put(PairingFailed(f"a wrong code was typed {TRIES} times; show a new one"))
                time.sleep(_AFTER_WRONG_S)
                return
            except TlsError as error:
                _refuse(stream, f"it sent {error}")
                raise PairingError(str(error)) from error
            stream.send(exchange.proof())
            self._tries = 0
        self.outcome.put(new_partner(partner, host))


def _tries_left(tries: int) -> str:
    return f"{tries} more of {TRIES} tries" if tries else "no more tries"


def _refuse(stream: PairingStream, reason: str) -> None:
    with contextlib.suppress(PairingError):  # it is gone
        stream.send(refusal(reason))


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone
        sock.shutdown(socket.SHUT_RDWR)


def new_partner(partner: PairingPartner, host: str) -> NewPartner:
    """Return a paired device with the address at which it was met."""
    return NewPartner(partner.certificate, partner.name, (plain_host(host), partner.port))


def plain_host(host: str) -> str:
    """Return an address as people write it: an IPv4 address from an IPv6 socket without its prefix."""
    return host.removeprefix("::ffff:")
