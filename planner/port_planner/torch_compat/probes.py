"""Check every private part in the installed torch. As a program it prints one JSON object: version, parts, missing."""

import importlib
import json
import sys
import warnings
from dataclasses import asdict, dataclass

from port_planner.torch_compat.parts import PARTS

MODULES = ("modes", "autograd", "tensors", "optimizers", "devices", "loading")


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A part that this torch lacks in its expected form, and what breaks without it."""

    name: str
    trouble: str
    breaks: str


def missing_parts() -> list[MissingPart]:
    """Import the room's modules and return the parts that torch lacks."""
    missing = []
    for name in MODULES:
        try:
            importlib.import_module(f"port_planner.torch_compat.{name}")
        except (ImportError, AttributeError) as error:
            missing.append(MissingPart(f"torch_compat.{name}", str(error), "nothing that imports it runs"))
    with warnings.catch_warnings(action="ignore"):
        troubles = [(part, part.trouble()) for part in PARTS]
    return [*missing, *(MissingPart(part.name, trouble, part.breaks_without) for part, trouble in troubles if trouble)]


def parts_report() -> dict[str, object]:
    """Return a JSON-compatible report: torch's version, the number of parts, and the missing ones."""
    import torch

    missing = [asdict(part) for part in missing_parts()]
    return {"version": str(torch.__version__), "parts": len(PARTS), "missing": missing}


def main() -> None:
    """Print the report."""
    sys.stdout.write(json.dumps(parts_report()) + "\n")


if __name__ == "__main__":
    main()
