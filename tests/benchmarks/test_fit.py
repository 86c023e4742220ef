"""What is tried for a limit, and what the table beside others says."""

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.fit import NOT_COMPARED, Unlimited, show_others, smallest, within
from benchmarks.models import RESNET101, case_of, workload


def fits_from(least_mib: int, tried: list[int]) -> Any:
    def run(mib: int) -> dict[str, Any] | None:
        tried.append(mib)
        return {"mib": mib} if mib >= least_mib else None

    return run


@pytest.mark.parametrize("least", [200, 245, 251, 299, 340])
def test_the_smallest_limit_is_found_to_its_resolution(least: int) -> None:
    found = smallest(fits_from(least, []), 250)
    assert found is not None and least <= found[0] < least + 8


def test_a_given_limit_is_tried_alone() -> None:
    tried: list[int] = []
    assert within(fits_from(245, tried), 400, 250) == (250, {"mib": 250})
    assert within(fits_from(245, tried), 400, 240) is None
    assert tried == [250, 240]


def test_what_others_take_stands_beside_bundles_with_planning_time_and_gap() -> None:
    rows = [
        Unlimited("gpt2", "eager", 3000, 1.5, 1.25, True),
        Unlimited("gpt2", "compile 0.5", None, None, None, None),
        Unlimited("gpt2", "bundle, 1500 MiB", 1480, 1.75, 1.5, True, 31.5, 0.25),
    ]
    shown = Console(file=io.StringIO(), width=150)
    show_others(rows, shown)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "does not finish" in text and "31.50" in text and "25%" in text
    assert NOT_COMPARED.split()[0] in text


def test_resnet_101_is_deeper_than_resnet_50_and_trained_alike() -> None:
    counts = [sum(p.numel() for p in workload(name, small=True).model.parameters()) for name in ("resnet50", RESNET101)]
    assert counts[0] < counts[1] and case_of(RESNET101) == case_of("resnet50")
