#!/usr/bin/python3
"""Run shell commands for the test on the other side of a virtio-serial port, one JSON line each way."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

OUTPUT_LIMIT = 200_000
"""Characters kept of a command's output; a test reads the end of it."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one request: exit code and merged output, 124 after the time limit."""
    try:
        done = subprocess.run(
            request["cmd"],
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=request.get("timeout", 120),
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, late.stdout or b""
    return {"id": request["id"], "rc": code, "out": output.decode("utf-8", "replace")[-OUTPUT_LIMIT:]}


def write_all(port: int, data: bytes) -> None:
    """Write everything; a virtio port takes short writes."""
    while data:
        data = data[os.write(port, data) :]


def main() -> None:
    """Serve until the machine ends."""
    while not (ports := sorted(Path("/dev").glob("vport*p1"))):
        time.sleep(0.05)
    port = os.open(ports[0], os.O_RDWR)
    write_all(port, b'{"hello": 1}\n')
    pending = b""
    while True:
        data = os.read(port, 65536)
        if not data:
            time.sleep(0.2)
            continue
        pending += data
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            write_all(port, json.dumps(answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
