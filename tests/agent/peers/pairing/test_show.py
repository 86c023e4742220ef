"""A device that shows a code: one pairs, three wrong codes end it, whoever disturbs does not."""

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from port_agent.peers.identity.keys import certificate_in
from port_agent.peers.identity.make import new_key_and_certificate
from port_agent.peers.pairing import callers, show
from port_agent.peers.pairing.code import TRIES
from port_agent.peers.pairing.exchange import PairingError, PairingPartner
from port_agent.peers.pairing.join import join_device
from port_agent.peers.pairing.protocol import (
    CallersTurnedAway,
    CodeShown,
    NewPartner,
    PairingEvent,
    PairingFailed,
    PairingPlace,
    ShowCode,
    WrongCode,
)
from port_agent.peers.pairing.show import listen_on, main, show_code
from tests.agent.peers.devices import identity
from tests.waiting import until


def partner(name: str, port: int) -> PairingPartner:
    return PairingPartner(certificate_in(new_key_and_certificate()[0].decode()), name, port)


SHOWER, JOINER = partner("attic", 9478), partner("cellar", 9500)


@pytest.fixture(autouse=True)
def without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "_AFTER_WRONG_S", 0.0)


@contextmanager
def shown(lifetime_s: float = 60.0) -> Iterator[tuple[int, list[PairingEvent], threading.Thread]]:
    """Show a code in a thread; gives the port, what is told, and the thread."""
    told: list[PairingEvent] = []
    with listen_on(0) as listener:
        end_s = time.monotonic() + lifetime_s
        thread = threading.Thread(target=lambda: told.append(show_code(SHOWER, listener, end_s, told.append)))
        thread.start()
        until(lambda: bool(told))
        try:
            yield listener.getsockname()[1], told, thread
        finally:
            thread.join(60.0)


def join(port: int, digits: str, host: str = "127.0.0.1") -> NewPartner:
    return join_device(JOINER, digits, [host], port)


def refused(port: int, digits: str) -> str:
    with pytest.raises(PairingError) as raised:
        join(port, digits)
    return str(raised.value)


def code_of(told: list[PairingEvent]) -> str:
    assert isinstance(told[0], CodeShown)
    return told[0].code


def other_code(code: str) -> str:
    return f"{(int(code.replace('-', '')) + 1) % 10**9:09d}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_knows_the_code_pairs_over_ipv4_and_ipv6(host: str) -> None:
    with shown() as (port, told, thread):
        answer = join(port, code_of(told).replace("-", ""), host)
        thread.join(60.0)
        assert told[-1] == NewPartner(JOINER.certificate, "cellar", (host, 9500))
        assert answer == NewPartner(SHOWER.certificate, "attic", (host, 9478))


def test_after_so_many_wrong_codes_the_right_one_is_refused_too() -> None:
    with shown() as (port, told, thread):
        code = code_of(told)
        reasons = [refused(port, other_code(code)) for _ in range(TRIES)]
        assert reasons == [
            "the other device refused: the code is wrong; 2 more of 3 tries",
            "the other device refused: the code is wrong; 1 more of 3 tries",
            "the other device refused: the code is wrong; no more tries",
        ]
        thread.join(60.0)
        assert [event.tries_left for event in told if isinstance(event, WrongCode)] == [2, 1, 0]
        assert told[-1] == PairingFailed("a wrong code was typed 3 times; show a new one")
    assert "no device shows a code" in refused(port, code.replace("-", ""))


def test_whoever_only_disturbs_costs_no_try_and_hears_nothing_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MAX_OF_HOST", 4)
    with shown() as (port, told, _):
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05junk!"):
            received = b""
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(junk)
                sock.shutdown(socket.SHUT_WR)
                received = sock.recv(100)  # what was not read to the end resets the connection
            assert received == b""
        join(port, code_of(told).replace("-", ""))
        until(lambda: isinstance(told[-1], NewPartner), lambda: told)
        assert told[1:-1] == [], "no try is lost"


def test_a_code_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(lifetime_s=0.05) as (_, told, thread):
        thread.join(60.0)
        assert told[-1] == PairingFailed("nobody typed the code in time; show a new one")


def test_a_code_ends_with_the_agent_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "_LOOK_S", 0.01)
    with shown(lifetime_s=3600.0) as (_, told, thread):
        monkeypatch.setattr(os, "getppid", lambda: 1 << 22)  # as for a process whose parent was killed
        thread.join(60.0)
        assert not thread.is_alive() and isinstance(told[-1], PairingFailed)


def test_silent_connections_keep_nobody_from_pairing_and_are_told() -> None:
    with shown() as (port, told, thread), contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        for turned_away in silent[callers.MAX_OF_HOST :]:
            assert turned_away.recv(1) == b""
        join(port, code_of(told).replace("-", ""), "::1")
        thread.join(60.0)
        assert [type(event) for event in told] == [CodeShown, CallersTurnedAway, NewPartner]
        assert told[1] == CallersTurnedAway("127.0.0.1")


def test_of_many_callers_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MAX_AT_ONCE", 1)
    with shown() as (port, told, _), socket.create_connection(("127.0.0.1", port)) as silent:
        join(port, code_of(told).replace("-", ""), "::1")
        assert silent.recv(1) == b"" and isinstance(told[-1], NewPartner | CodeShown)


def test_parallel_guesses_have_the_tries_of_one_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MAX_OF_HOST", 12)
    with shown() as (port, told, thread):
        wrong = other_code(code_of(told))
        guesses = [threading.Thread(target=refused, args=(port, wrong)) for _ in range(12)]
        for guess in guesses:
            guess.start()
        for guess in guesses:
            guess.join(60.0)
        thread.join(60.0)
        assert [event.tries_left for event in told if isinstance(event, WrongCode)] == [2, 1, 0]


@pytest.mark.parametrize("certificate", [b"not a certificate", b"0\x03abc"])
def test_what_is_no_certificate_is_not_taken_from_who_knows_the_code(certificate: bytes) -> None:
    with shown() as (port, told, _):
        digits = code_of(told).replace("-", "")
        with pytest.raises(PairingError, match="bytes that are not a certificate"):
            join_device(PairingPartner(certificate, "evil", 1), digits, ["127.0.0.1"], port)
        assert join(port, digits).name == "attic", "the code stays valid"


def test_a_port_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity(tmp_path)
    with listen_on(0) as taken:
        port = taken.getsockname()[1]
        request = ShowCode(PairingPlace(str(tmp_path), "attic", 9478), port, 5.0)
        monkeypatch.setattr("sys.stdin", io.StringIO(msgspec.json.encode(request).decode()))
        assert main() == 1
    failed = {"event": "failed", "reason": f"port {port}: Address already in use"}
    assert json.loads(capsys.readouterr().out) == failed
