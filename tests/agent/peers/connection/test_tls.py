"""TLS between devices: only those whose certificates are known, only 1.3, and strangers learn nothing."""

import contextlib
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.peers.connection.tls import PROTOCOL_NAME, TlsEngine, TlsError, dialing_context, listening_context
from tests.agent.peers.devices import engines, identity, shake


def test_both_know_each_other_and_say_what_they_say(tmp_path: Path) -> None:
    caller, listener = engines(tmp_path)
    shake(caller, listener)
    assert caller.is_ready and listener.is_ready and caller.peer_id() != listener.peer_id()
    caller.send(b"hello")
    assert listener.receive(caller.to_send()) == b"hello"
    listener.send(b"x" * 100_000)
    assert caller.receive(listener.to_send()) == b"x" * 100_000
    caller.end()
    assert listener.receive(caller.to_send()) == b""


def test_each_sees_the_certificate_that_it_was_told(tmp_path: Path) -> None:
    one, two = identity(tmp_path / "1"), identity(tmp_path / "2")
    crowd = [identity(tmp_path / f"crowd{number}").certificate for number in range(3)]
    caller = TlsEngine(dialing_context(one, [*crowd, two.certificate]), listens=False)
    listener = TlsEngine(listening_context(two, [*crowd, one.certificate]), listens=True)
    shake(caller, listener)
    assert (caller.peer_id(), listener.peer_id()) == (two.id, one.id)


@pytest.mark.parametrize("stranger", ["caller", "listener"])
def test_a_device_that_is_not_paired_is_refused_by_either_end(tmp_path: Path, stranger: str) -> None:
    one, two, other = (identity(tmp_path / name) for name in ("one", "two", "other"))
    caller = TlsEngine(
        dialing_context(one, [other.certificate if stranger == "listener" else two.certificate]), listens=False
    )
    listener = TlsEngine(
        listening_context(two, [other.certificate if stranger == "caller" else one.certificate]), listens=True
    )
    with pytest.raises(TlsError, match=r"self.signed"):
        shake(caller, listener)
    refused = listener if stranger == "caller" else caller
    assert not refused.is_ready
    with pytest.raises(TlsError):
        refused.peer_id()
    with pytest.raises(TlsError):
        refused.send(b"secret")


def stranger(**changes: object) -> ssl.SSLContext:
    """Return a client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in changes.items():
        setattr(context, name, value)
    return context


def talk(context: ssl.SSLContext, listener: TlsEngine) -> tuple[bytes, ssl.SSLObject]:
    """Let a stranger shake hands and read; returns what it reads and its connection; raises what either raises."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    for _ in range(4):
        try:
            client.do_handshake()
            client.write(b"\x00\x00\x00\x01a")
        except ssl.SSLWantReadError:
            pass
        try:
            listener.receive(outgoing.read())
        finally:
            incoming.write(listener.to_send())
    return client.read(1000), client


def test_without_a_certificate_there_is_an_alert_and_nothing_else(tmp_path: Path) -> None:
    two = identity(tmp_path / "two")
    listener = TlsEngine(listening_context(two, [identity(tmp_path / "one").certificate]), listens=True)
    context = stranger()
    context.set_alpn_protocols([PROTOCOL_NAME])
    with pytest.raises(TlsError, match="did not return a certificate"):
        talk(context, listener)
    assert not listener.is_ready


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1])
def test_no_older_tls(tmp_path: Path, version: ssl.TLSVersion) -> None:
    caller, listener = engines(tmp_path)
    context = stranger(minimum_version=version)
    context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((TlsError, ssl.SSLError), match=r"protocol|version"):
        talk(context, listener)
    assert not listener.is_ready and not caller.is_ready


def test_another_protocol_at_this_port_is_turned_away(tmp_path: Path) -> None:
    one, two = identity(tmp_path / "one"), identity(tmp_path / "two")
    listener = TlsEngine(listening_context(two, [one.certificate]), listens=True)
    context = stranger()
    context.load_cert_chain(one.file)
    with pytest.raises(TlsError, match="does not speak port-agent/1"):
        talk(context, listener)


def test_no_session_is_kept_that_would_outlive_unpairing(tmp_path: Path) -> None:
    one, two = identity(tmp_path / "one"), identity(tmp_path / "two")
    context = stranger()
    context.load_cert_chain(one.file)
    context.set_alpn_protocols([PROTOCOL_NAME])
    listener = TlsEngine(listening_context(two, [one.certificate]), listens=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    while not listener.is_ready:
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        listener.receive(outgoing.read())
        incoming.write(listener.to_send())
    with pytest.raises(ssl.SSLWantReadError):
        client.read(100)
    assert client.session is None or not client.session.has_ticket


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00" + bytes(512), b"\x00" * 100]
)
def test_junk_in_place_of_a_handshake(tmp_path: Path, junk: bytes) -> None:
    _, listener = engines(tmp_path)
    with pytest.raises(TlsError):
        listener.receive(junk)


@pytest.mark.process
def test_a_daemon_that_did_without_tls_can_still_load_it() -> None:
    program = "import sys; sys.modules['ssl'] = None; import asyncio; import port_agent.peers.connection.tls as t; print(t.ssl.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ssl"]
