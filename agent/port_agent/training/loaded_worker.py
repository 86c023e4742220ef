"""A worker that loads torch while its bundle is still being made.

`python -m port_agent.training.loaded_worker --control-fd FD`: once torch is loaded, it waits for a `TakeWork`, and then
acts as `port_agent.training.worker` with those arguments.
"""

import argparse

from port_agent.training.worker import end, run
from port_agent.worker.worker_options import TorchOptions
from port_planner.base.errors import ExitCode

_PROGRAM = "port_agent.training.loaded_worker"


def main() -> ExitCode:
    """Run the worker and return its exit code."""
    parser = argparse.ArgumentParser(prog=_PROGRAM)
    parser.add_argument(
        "--control-fd", type=int, required=True, help="inherited descriptor of the connection to the supervisor"
    )
    control_fd = parser.parse_args().control_fd
    return run(control_fd, lambda control: TorchOptions.parse(control.take_work(), program=_PROGRAM))


if __name__ == "__main__":
    end(main())
