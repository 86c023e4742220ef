"""The worker process: trains one bundle, tells its supervisor how it goes, pauses and leaves when told.

`python -m agent.train.worker --bundle job.port --state-dir DIR --control-fd N ...`; started by the supervisor and by
`port-agent train` (see `agent.worker.start`), which prepare its malloc. Exit codes: 0 finished; 75 left on request,
resumable; 2 the job can never run as it is; 1 other failure.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.train.torch_loading import load_torch
from agent.worker.channel import Channel
from agent.worker.commands import Control, Interrupted
from planner.ir.errors import PortError

LEFT = 75
"""EX_TEMPFAIL: left on request, can be resumed."""


_STACK_BYTES = 1 << 20
"""Of the page thread and the update thread: the system's 8 MiB each would count against RLIMIT_DATA."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker and return its exit code."""
    arguments = _parser().parse_args(argv)
    threading.stack_size(_STACK_BYTES)
    channel = Channel(arguments.control_fd) if arguments.control_fd is not None else None
    control = Control(channel, abandon=lambda: os._exit(LEFT))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front end decides
    signal.signal(signal.SIGTERM, lambda *_: control.leave())
    if channel:
        channel.listen(control.handle, control.leave)

    def tell(message: dict[str, Any]) -> None:
        if channel:
            channel.send(message)

    try:
        load_torch()
        from agent.train.run import train

        return train(arguments, control, tell)
    except Interrupted:
        return LEFT
    except (PortError, OSError, RuntimeError, MemoryError) as error:
        code = error.exit_code if isinstance(error, PortError) else 1
        if channel:
            message = {"event": "failed", "code": type(error).__name__, "message": str(error), "retry": code != 2}
            channel.send(message)
        else:
            sys.stderr.write(f"port-agent worker: {error}\n")
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent.train.worker", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--page-dir", type=Path, help="where temporaries are paged to; default: the state directory")
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--plan", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="train on the .npz and .safetensors files of this directory")
    parser.add_argument("--round", type=int, default=0, help="a new number counts epochs anew, weights go on")
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--verify", type=int, default=0)
    parser.add_argument(
        "--digest", action="store_true", help="report a checksum over all persistent tensors at the end"
    )
    parser.add_argument("--read-limit", help="throttle reads to this many bytes per second")
    parser.add_argument("--write-limit", help="throttle writes to this many bytes per second")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's own teardown takes longer than the second that leaving may take
