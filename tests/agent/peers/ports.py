"""Ports of this machine that are free."""

import socket


def free_port() -> int:
    """Return one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
