"""Connections that are opened and say nothing, held while the control socket is asked."""

import contextlib
import resource
import socket
import statistics
import time
from pathlib import Path

from port_agent.control.client import ControlClient, ControlError
from tests.attack.outcome import AttackOutcome


def hold_connections(
    client: ControlClient, metrics_port: int, *, metrics: int, control: int, asked: int
) -> AttackOutcome:
    """Hold silent connections to the metrics port and to the control socket, and ask for the status meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * (metrics + control) + 100)), hard))
    seconds, harmed = [], []
    with contextlib.ExitStack() as held:
        for _ in range(metrics):
            held.enter_context(socket.create_connection(("127.0.0.1", metrics_port), timeout=10.0))
        for _ in range(control):
            held.enter_context(_silent(client.path))
        for number in range(asked):
            begin = time.perf_counter()
            try:
                client.get("/v1/status")
            except ControlError as error:
                harmed.append(f"question {number}: {error}")
            seconds.append(time.perf_counter() - begin)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    notes = (
        f"{metrics} held on the metrics port and {control} on the control socket; "
        f"answers took {1000 * statistics.median(seconds):.0f} ms, at most {1000 * max(seconds):.0f} ms"
    )
    return AttackOutcome("connections that say nothing", asked, asked - len(harmed), tuple(harmed), notes)


def _silent(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))  # blocks while the kernel's queue is full
    return sock
