"""What the doctor asks of torch. As a program it prints one JSON object: what `torch_compat.probes` finds, and what bfloat16 costs here."""

import json
import sys

import torch

from port_planner.exactness.half_products import cost_of_software, in_software
from port_planner.torch_compat.probes import parts_report


def main() -> None:
    """Print what was found; `bfloat16` is null where the processor has instructions for it."""
    cost = cost_of_software(torch.bfloat16) if in_software(torch.bfloat16) else None
    sys.stdout.write(json.dumps({**parts_report(), "bfloat16": cost}) + "\n")


if __name__ == "__main__":
    main()
