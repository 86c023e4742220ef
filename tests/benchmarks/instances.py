"""Where the reference problems and their checker lie: beside the checkout, not part of it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "../shared/planning"
OWN = Path(__file__).parent / "data"

QUICK = (
    "linear__m0__ram50__rt100",
    "linear__m4__ram70__rt110",
    "transformer__a72__ram90__rt110",
    "vgg16_cifar__m4__ram70__rt110",
    "bert__a72__ram50__rt110",
    "resnet18_cifar__m4__ram50__rt150",
)
HEAVY = ("vgg16_cifar__a72__ram50__rt110", "resnet18_cifar__a72__ram50__rt110", "resnet50__a72__ram50__rt110")


def reference_path(name: str) -> Path:
    """Return the file of a reference problem; skip the test where the reference data is absent."""
    path = REFERENCE / "instances" / f"{name}.json"
    if not path.exists():
        pytest.skip("the reference problems (../shared/planning) are not on this machine")
    return path


def best_known(name: str) -> dict[str, Any]:
    """Return what is known about a reference problem."""
    found: dict[str, Any] = json.loads((REFERENCE / "best_known.json").read_text())[name]
    return found


def checker() -> ModuleType:
    """Return the independent checker of POET's semantics."""
    spec = importlib.util.spec_from_file_location("check_schedule", REFERENCE / "check_schedule.py")
    if spec is None or spec.loader is None or not (REFERENCE / "check_schedule.py").exists():
        pytest.skip("the checker (../shared/planning) is not on this machine")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
