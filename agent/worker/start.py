"""Start a worker with the environment it needs, and follow what it says. Torch-free."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.malloc import preload_environment
from agent.worker.channel import Channel


@dataclass(slots=True)
class Worker:
    """A running worker process and the line to it."""

    process: "subprocess.Popen[bytes]"
    channel: Channel

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield its events until it closes the line, then wait for it to end."""
        yield from self.channel.messages()
        self.process.wait()

    def command(self, name: str, **fields: Any) -> None:
        self.channel.send({"cmd": name, **fields})


def worker_command(bundle: Path, state_dir: Path, *options: str) -> list[str]:
    """Return the command line of a worker, without its control descriptor."""
    return [
        sys.executable, "-m", "agent.train.worker", "--bundle", str(bundle), "--state-dir", str(state_dir), *options
    ]  # fmt: skip


def start_worker(
    command: Sequence[str],
    *,
    limit_bytes: int,
    threads: int = 1,
    data_limit_bytes: int | None = None,
    stderr: int | None = None,
) -> Worker:
    """Start a worker. `limit_bytes`: for the allocator's cache; `data_limit_bytes`: a hard RLIMIT_DATA, for proofs."""
    ours, theirs = socket.socketpair()
    environment = {
        **os.environ, **preload_environment(limit_bytes), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
    }  # fmt: skip

    def limit() -> None:
        if data_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit_bytes, data_limit_bytes))

    process = subprocess.Popen(
        [*command, "--control-fd", str(theirs.fileno())], env=environment, pass_fds=[theirs.fileno()],
        preexec_fn=limit if data_limit_bytes is not None else None, stdin=subprocess.DEVNULL, stderr=stderr,
    )  # fmt: skip
    theirs.close()
    return Worker(process, Channel(ours.detach()))
