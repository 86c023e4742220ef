"""Collect what the doctor reports about torch.

Run as a program, it prints one JSON object: the result of `torch_compat.probes`, and the cost of bfloat16 here.
"""

import json
import sys

import torch

from port_planner.exactness.half_products import cost_of_software, in_software
from port_planner.torch_compat.probes import parts_report


def main() -> None:
    """Print the findings; `bfloat16` is null if the processor has instructions for it."""
    cost = cost_of_software(torch.bfloat16) if in_software(torch.bfloat16) else None
    sys.stdout.write(json.dumps({**parts_report(), "bfloat16": cost}) + "\n")


if __name__ == "__main__":
    main()
