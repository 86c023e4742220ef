"""A link over a real socket: greeting, messages, bounds, and every way to end."""

import asyncio
import random
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from port_agent.peers.connection import link as link_module
from port_agent.peers.connection.framing import framed
from port_agent.peers.connection.link import MAX_WAITING, UNSENT_BYTES, WAITING_MESSAGES, LinkClosedError, PeerLink
from port_agent.peers.connection.messages import PEER_MESSAGES, PeerHello
from port_agent.peers.connection.tls import dialing_context, listening_context
from tests.agent.peers.devices import HEARTBEAT, call, identity, linked, listening

PATIENCE_S = 60.0


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def closed(link: PeerLink) -> LinkClosedError:
    """Return why a link ended, once it has."""
    with pytest.raises(LinkClosedError) as caught:
        while True:
            await link.receive()
    return caught.value


def test_greeting_messages_and_a_goodbye(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            await caller.send(HEARTBEAT)
            assert await listener.receive() == HEARTBEAT
            assert listener.send_soon(HEARTBEAT) and await caller.receive() == HEARTBEAT
            caller.close("that was all\x1b[31m")
            end = await closed(listener)
            assert end.reason == "the other agent ended it: that was all[31m" and not end.offends
            assert not caller.send_soon(HEARTBEAT)
            with pytest.raises(LinkClosedError, match="that was all"):
                await caller.send(HEARTBEAT)

    run(work())


def test_each_learns_who_the_other_is_and_what_it_runs(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = identity(tmp_path / "one"), identity(tmp_path / "two")
        async with listening(listening_context(two, [one.certificate])) as (port, arrived):
            caller = await call(port, dialing_context(one, [two.certificate]))
            listener = await arrived.get()
            (who, hello), (other, _) = await asyncio.gather(caller.greet("1.0"), listener.greet("2.0"))
            assert (who, other, hello.software) == (two.id, one.id, "2.0")
            caller.close("")

    run(work())


async def refused(tmp_path: Path, first: bytes) -> LinkClosedError:
    """Return how a listener ends a connection whose first message is `first`."""
    one, two = identity(tmp_path / "one"), identity(tmp_path / "two")
    async with listening(listening_context(two, [one.certificate])) as (port, arrived):
        caller = await call(port, dialing_context(one, [two.certificate]))
        await caller._until(lambda: caller._engine.is_ready)
        caller._engine.send(first)
        caller._flush()
        with pytest.raises(LinkClosedError) as caught:
            await (await arrived.get()).greet("1")
        return caught.value


@pytest.mark.parametrize(
    ("first", "reason", "offends"),
    [
        (framed(PEER_MESSAGES.encode(HEARTBEAT)), "not a greeting", True),
        (framed(PEER_MESSAGES.encode(PeerHello(oldest=7, newest=9))), "7 to 9 there; update this agent", False),
        (framed(b"junk"), "not a message of this protocol", True),
        (b"\xff\xff\xff\xff", "a frame has 4294967295 bytes", True),
    ],
)
def test_greetings_that_are_none(tmp_path: Path, first: bytes, reason: str, offends: bool) -> None:
    async def work() -> None:
        end = await refused(tmp_path, first)
        assert reason in end.reason and end.offends is offends

    run(work())


def test_who_is_silent_in_the_greeting_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "GREETING_S", 0.1)

    async def work() -> None:
        two = identity(tmp_path / "two")
        async with listening(listening_context(two, [two.certificate])) as (port, arrived):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(LinkClosedError, match="no greeting within"):
                await (await arrived.get()).greet("1")
            assert await reader.read() == b"", "not a byte for who says nothing"
            writer.close()

    run(work())


def test_an_unpaired_caller_learns_of_its_refusal_and_nothing_else(tmp_path: Path) -> None:
    async def work() -> None:
        one, two, other = (identity(tmp_path / name) for name in ("one", "two", "other"))
        async with listening(listening_context(two, [other.certificate])) as (port, arrived):
            caller = await call(port, dialing_context(one, [two.certificate]))
            listener = await arrived.get()
            ends = await asyncio.gather(caller.greet("1"), listener.greet("1"), return_exceptions=True)
            assert all(isinstance(end, LinkClosedError) for end in ends)
            assert "alert" in str(ends[0]) and "self" in str(ends[1])

    run(work())


@pytest.mark.slow
def test_who_does_not_read_holds_back_the_sender_and_takes_no_memory(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            assert caller._transport is not None and listener._transport is not None
            listener._transport.pause_reading()
            while caller.send_soon(HEARTBEAT):
                pass
            assert UNSENT_BYTES <= caller._transport.get_write_buffer_size() < UNSENT_BYTES + 1000
            waits = asyncio.create_task(caller.send(HEARTBEAT))
            await asyncio.sleep(0)
            assert not waits.done() and caller.end is None
            caller.close("enough")
            with pytest.raises(LinkClosedError, match="enough"):
                await waits

    run(work())


def _has_waiting(link: PeerLink, count: int) -> bool:
    return len(link._messages) == count


def test_what_nobody_takes_is_not_read_from_the_socket(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            for number in range(1, WAITING_MESSAGES + 1):
                assert caller.send_soon(HEARTBEAT)
                await listener._until(partial(_has_waiting, listener, number))
            assert listener._transport is not None and not listener._transport.is_reading()
            assert await listener.receive() == HEARTBEAT
            assert listener._transport.is_reading()

    run(work())


def test_a_flood_in_one_breath_is_an_offence(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            caller._engine.send(framed(PEER_MESSAGES.encode(HEARTBEAT)) * (2 * MAX_WAITING))
            caller._flush()
            await listener._until(lambda: len(listener._messages) >= MAX_WAITING or listener.end is not None)
            end = await closed(listener)
            assert end.offends and "messages are waiting" in end.reason

    run(work())


def test_a_message_of_no_kind_after_the_greeting_is_an_offence(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            caller._engine.send(framed(msgspec.msgpack.encode({"kind": "obey", "command": "rm"})))
            caller._flush()
            assert (await closed(listener)).offends
            assert "obey" in (await closed(caller)).reason, "the other end is told why"

    run(work())


def test_an_end_without_a_word(tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (caller, listener):
            assert caller._transport is not None
            caller._transport.abort()
            end = await closed(listener)
            assert not end.offends and end.reason

    run(work())


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_at_any_moment_end_the_connection_and_nothing_else(tmp_path: Path, seed: int) -> None:
    async def work() -> None:
        random_ = random.Random(seed)
        async with linked(tmp_path) as (caller, listener):
            assert caller._transport is not None
            in_the_clear = bool(seed % 2)
            if in_the_clear:
                caller._transport.write(random_.randbytes(random_.randrange(5, 5000)))
            else:
                caller._engine.send(framed(random_.randbytes(random_.randrange(1, 5000))))
                caller._flush()
            end = await closed(listener)
            assert end.offends is not in_the_clear, "what anybody on the way can send is nobody's offence"

    run(work())
