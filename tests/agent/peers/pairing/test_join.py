"""A device where a code is typed: what it says when nothing comes of it."""

import io
import json
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from port_agent.peers.connection.framing import framed
from port_agent.peers.pairing.exchange import PairingError, PairingExchange, PairingPartner, PairingSide
from port_agent.peers.pairing.join import join_device, main
from port_agent.peers.pairing.protocol import JoinDevice, PairingPlace
from port_agent.peers.pairing.stream import PairingStream
from tests.agent.peers.devices import identity

OWN = PairingPartner(b"joiner", "cellar", 9500)


def join(port: int) -> str:
    with pytest.raises(PairingError) as raised:
        join_device(OWN, "482193059", ["127.0.0.1"], port)
    return str(raised.value)


def test_nobody_shows_a_code_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert join(port) == f"no device shows a code at 127.0.0.1 port {port} (Connection refused)"


def test_all_addresses_are_tried() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(PairingError, match=r"closed|reset"):
            join_device(OWN, "482193059", ["127.0.0.1", "127.0.0.2"], port)
        thread.join(60.0)
    with pytest.raises(PairingError, match=rf"127.0.0.1 port {port} .*, 127.0.0.2 port {port} "):
        join_device(OWN, "482193059", ["127.0.0.1", "127.0.0.2"], port)


def test_somebody_else_shows_another_code_or_junk() -> None:
    def pose(server: socket.socket, answer: bytes | None) -> None:
        sock, _ = server.accept()
        with sock:
            exchange = PairingExchange(PairingSide.SHOWER, "111111118", PairingPartner(b"x", "evil", 1))
            stream = PairingStream(sock, time.monotonic() + 60.0)
            exchange.take_start(stream.receive())
            if answer is None:
                stream.send(exchange.start())
                stream.receive()
                stream.send(exchange.proof())
            else:
                sock.sendall(answer)

    for answer, reason in (
        (None, "does not know this code"),
        (framed(b"junk"), "not a pairing message"),
        (b"", "closed"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=pose, args=(server, answer))
            thread.start()
            assert reason in join(server.getsockname()[1])
            thread.join(60.0)


def test_a_mistyped_code_calls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity(tmp_path)
    request = JoinDevice(PairingPlace(str(tmp_path), "cellar", 9478), "482-193-050", ("127.0.0.1",), 1)
    monkeypatch.setattr("sys.stdin", io.StringIO(msgspec.json.encode(request).decode()))
    assert main() == 1
    assert "mistyped" in json.loads(capsys.readouterr().out)["reason"]
