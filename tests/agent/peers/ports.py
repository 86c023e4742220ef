"""Ports of this machine that are free, and stay so until a test listens there."""

import itertools
import random
import socket

_OURS = range(16_384, 32_768)
"""Below the ports that Linux and macOS give to outgoing connections: one of those may be taken a moment later."""
_DRAWN = itertools.cycle(random.SystemRandom().sample(_OURS, len(_OURS)))
"""No two of a process are the same."""


def free_port() -> int:
    """Return one."""
    for port in itertools.islice(_DRAWN, len(_OURS)):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port from {_OURS.start} to {_OURS.stop - 1} is free")
