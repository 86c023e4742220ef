"""Solve a planning problem of another device, in a separate process: `python -m port_planner.search.solve_problem`.

Reads the problem from standard input and writes the answer to standard output. For invalid input, it exits with a line
on standard error. The parent process sets its limits.
"""

import sys

from port_planner.base.errors import PortError
from port_planner.search.plan_problem import pack_answer, unpack_problem


def main() -> int:
    """Solve one problem; returns the exit code."""
    try:
        answer = pack_answer(unpack_problem(sys.stdin.buffer.read()).solved())
    except PortError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
