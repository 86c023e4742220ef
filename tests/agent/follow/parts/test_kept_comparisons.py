"""Answers outlive their process, and belong to the arithmetic that they were found with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent.follow.parts.kept_comparisons import KeptComparisons, mirrored

FORM = (torch.ops.aten.mm.default, torch.bfloat16, torch.Size([3, 4]), 64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield tmp_path / "port-agent" / "comparisons"
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.mark.parametrize("equal", [True, False])
def test_the_next_process_knows_what_was_found(equal: bool) -> None:
    first = KeptComparisons()
    assert first.get(FORM) is None
    first.note(FORM, equal=equal)
    for later in (first, KeptComparisons()):
        assert later.get(FORM) is equal
        assert later.get((*FORM, 1)) is None


def test_what_two_processes_find_is_kept_together() -> None:
    one, other = KeptComparisons(), KeptComparisons()
    assert one.get(FORM) is None and other.get(FORM) is None
    one.note(FORM, equal=True)
    other.note((*FORM, 1), equal=False)
    assert (KeptComparisons().get(FORM), KeptComparisons().get((*FORM, 1))) == (True, False)


def test_other_arithmetic_is_compared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found = KeptComparisons()
    torch.set_num_threads(1)
    found.note(FORM, equal=True)
    torch.set_num_threads(2)
    assert found.get(FORM) is None
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    assert found.get(FORM) is None and KeptComparisons().get(FORM) is None
    torch.set_float32_matmul_precision("highest")
    with torch.backends.mkldnn.flags(enabled=False):
        assert found.get(FORM) is None and KeptComparisons().get(FORM) is None
    assert found.get(FORM) is True
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert KeptComparisons().get(FORM) is None


def test_a_damaged_file_costs_a_comparison(cache: Path) -> None:
    KeptComparisons().note(FORM, equal=True)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert KeptComparisons().get(FORM) is None


def test_sums_of_mirrored_numbers_are_what_rounding_leaves() -> None:
    rows, columns = mirrored(torch.randn(4, 1001), 1, 1), mirrored(torch.randn(1001, 3), 0, -1)
    assert torch.equal(rows[:, :500], rows[:, 500:1000].flip(1)) and torch.equal(
        columns[:500], -columns[500:1000].flip(0)
    )
    even = rows[:, :1000].double(), columns[:1000].double()
    assert float((even[0] @ even[1]).abs().max()) < 1e-10


def added(terms: torch.Tensor) -> torch.Tensor:
    """Return the sum over the middle dimension, one after the other in single precision."""
    total = torch.zeros_like(terms[:, 0])
    for term in terms.unbind(1):
        total = total + term
    return total


def test_mirrored_numbers_tell_orders_apart_that_half_precision_hides() -> None:
    torch.manual_seed(0)
    rows, columns = torch.randn(16, 600).bfloat16(), torch.randn(600, 16).bfloat16()

    def apart() -> int:
        """Count the sums in half precision that differ where two are added up side by side."""
        terms = rows.float()[:, :, None] * columns.float()[None]
        two = added(terms[:, ::2]) + added(terms[:, 1::2])
        return int((added(terms).bfloat16() != two.bfloat16()).sum())

    hidden = apart()
    mirrored(rows, 1, 1)
    mirrored(columns, 0, -1)
    assert hidden < 10 < 100 < apart()


def test_halves_that_are_added_up_for_themselves_leave_a_trace() -> None:
    torch.manual_seed(0)
    terms = mirrored(torch.randn(16, 600), 1, 1)[:, :, None] * mirrored(torch.randn(600, 16), 0, -1)[None]
    assert int((added(terms[:, :300]) + added(terms[:, 300:])).count_nonzero()) > 200
