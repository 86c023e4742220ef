"""Start a worker with the environment that it needs, and follow its events. Does not import torch."""

import resource
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from port_agent.malloc import preload_environment
from port_agent.system.python_process import module_environment, threads_environment
from port_agent.worker.channel import Channel
from port_agent.worker.protocol import Command, Event
from port_agent.worker.worker_options import TORCH_WORKER, TorchOptions


@dataclass(slots=True)
class Worker:
    """A running worker process, and the connection to it."""

    process: "subprocess.Popen[bytes]"
    channel: Channel

    def events(self) -> Iterator[Event]:
        """Yield its events until it closes the connection, then wait for its end."""
        yield from self.channel.events()
        self.process.wait()

    def send(self, command: Command) -> None:
        """Send it a command."""
        self.channel.send(command)


def torch_worker(options: TorchOptions) -> list[str]:
    """Return the command line of a torch worker; `start_worker` adds its control descriptor."""
    return [*TORCH_WORKER, *options.words()]


def start_worker(
    command: Sequence[str],
    *,
    limit_bytes: int,
    threads: int = 1,
    data_limit_bytes: int | None = None,
    stderr: int | None = None,
) -> Worker:
    """Start a worker.

    `limit_bytes`: limit of the allocator's cache; `data_limit_bytes`: a hard RLIMIT_DATA, for tests.
    """
    ours, theirs = socket.socketpair()
    environment = {**module_environment(), **preload_environment(limit_bytes), **threads_environment(threads)}

    def limit() -> None:
        if data_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit_bytes, data_limit_bytes))

    process = subprocess.Popen(
        [*command, "--control-fd", str(theirs.fileno())],
        env=environment,
        pass_fds=[theirs.fileno()],
        preexec_fn=limit if data_limit_bytes is not None else None,
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    theirs.close()
    return Worker(process, Channel(ours.detach()))
