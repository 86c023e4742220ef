"""The worker process: it trains one bundle, reports to its supervisor, and pauses and leaves on command.

`python -m port_agent.training.worker --bundle job.port --state-dir DIR ...`; started by the supervisor and by
`port-agent train` (see `port_agent.worker.start`), which prepare its malloc. Its exit codes:
`port_planner.base.errors.ExitCode`.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from port_agent.system.torch_loading import load_torch
from port_agent.worker.control import Control, Emit
from port_agent.worker.serve import serve
from port_agent.worker.worker_options import TorchOptions
from port_planner.base.errors import ExitCode

_STACK_BYTES = 1 << 20
"""Stack in bytes of the page thread and the update thread; the system's 8 MiB each would count against RLIMIT_DATA."""


def main(words: Sequence[str] | None = None) -> ExitCode:
    """Run the worker and return its exit code."""
    options = TorchOptions.parse(words, program="port_agent.training.worker")
    return run(options.control_fd, lambda _: options)


def run(control_fd: int | None, options_of: Callable[[Control], TorchOptions]) -> ExitCode:
    """Load torch, train with the options that `options_of` then returns, and return the exit code."""
    threading.stack_size(_STACK_BYTES)

    def work(control: Control, emit: Emit) -> None:
        load_torch()
        from port_agent.training.run import train

        train(options_of(control), control, emit)

    return serve(control_fd, work)


def end(code: ExitCode) -> NoReturn:
    """End the process at once, because torch's own teardown takes longer than the second allowed for leaving."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
