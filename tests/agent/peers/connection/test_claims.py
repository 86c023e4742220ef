"""Who claims the id of this device has to hold its key."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from port_agent.peers.connection import claims
from port_agent.peers.connection.claims import where_key_is
from port_agent.peers.connection.tls import listening_context
from tests.agent.peers.devices import identity, listening


def test_a_copy_of_the_key_is_told_from_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, stranger, paired = (identity(tmp_path / name) for name in ("own", "stranger", "paired"))

    async def work() -> tuple[str, str, str, str]:
        async with (
            listening(listening_context(own, [paired.certificate])) as (copy, _),
            listening(listening_context(stranger, [own.certificate])) as (other, _),
        ):
            itself = await where_key_is(own, ["127.0.0.1"], copy)
            monkeypatch.setattr(claims, "foreign", _all)
            proved, claimed = (
                await where_key_is(own, ["127.0.0.1"], copy),
                await where_key_is(own, ["127.0.0.1"], other),
            )
            return itself, proved, claimed, await where_key_is(own, ["127.0.0.1"], 0)

    assert asyncio.run(work()) == ("", "127.0.0.1", "", ""), "its own port proves nothing"


def _all(addresses: Sequence[str]) -> tuple[str, ...]:
    return tuple(addresses)
