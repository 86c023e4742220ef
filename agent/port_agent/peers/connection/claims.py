"""Whether a device that announces this one's id also holds its key: anybody on the network can claim a name."""

import asyncio
import contextlib
from collections.abc import Sequence

from port_agent.peers.connection.tls import dialing_context
from port_agent.peers.identity.keys import Identity
from port_agent.peers.interfaces import foreign

PROOF_S = 4.0
"""Seconds for a proof; devices of the local network complete a handshake within milliseconds."""


async def where_key_is(own: Identity, addresses: Sequence[str], port: int) -> str:
    """Return the first of these addresses, none of them this device's, at which somebody proves to hold this
    device's key; "" if nobody does.

    In TLS 1.3, the listening side signs the handshake before it learns who calls. Raises OSError if this
    device's own key cannot be read.
    """
    context = dialing_context(own, [own.certificate])
    for address in foreign(addresses) if port else ():
        with contextlib.suppress(OSError, TimeoutError):  # nobody there, or another key
            async with asyncio.timeout(PROOF_S):
                _, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname="")
            writer.close()
            return address
    return ""
