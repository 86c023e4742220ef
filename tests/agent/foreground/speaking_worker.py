"""A worker that is a few lines of a test: what it says, hears and ends with."""

import subprocess
import sys

from port_agent.foreground.run import ForegroundRun
from port_agent.worker.start import start_worker

_BEGIN = """
import os, signal, socket, sys
from port_agent.worker.protocol import *
line = socket.socket(fileno=int(sys.argv[-1]))
say = lambda *events: line.sendall(b"".join(map(encode_message, events)))
hear = lambda: [type(decode_command(text)) for text in line.recv(4096).splitlines()]
READY = WorkerReady(pid=0, step=0, total_steps=2)
STEP = StepDone(step=1, epoch=0, loss=None, wall_s=1.0, cpu_s=1.0, phases_s={})
"""


def run_of(program: str, resident_bytes: int | None = None) -> ForegroundRun:
    """Return the run of a worker that executes `program` with `say`, `hear`, `READY` and `STEP`."""
    worker = start_worker([sys.executable, "-c", _BEGIN + program], limit_bytes=1 << 30, stderr=subprocess.DEVNULL)
    return ForegroundRun(worker, resident_bytes)
