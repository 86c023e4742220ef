"""Answers outlive their process, and belong to the arithmetic that they were found with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_planner.exactness.kept_answers import KeptAnswers

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
    first = KeptAnswers()
    assert first.get(FORM) is None
    assert first.equal(FORM, lambda: equal) is equal
    for later in (first, KeptAnswers()):
        assert later.get(FORM) is equal
        assert later.get((*FORM, 1)) is None


def test_what_two_processes_find_is_kept_together() -> None:
    one, other = KeptAnswers(), KeptAnswers()
    assert one.get(FORM) is None and other.get(FORM) is None
    one.equal(FORM, lambda: True)
    other.equal((*FORM, 1), lambda: False)
    assert (KeptAnswers().get(FORM), KeptAnswers().get((*FORM, 1))) == (True, False)


def test_other_arithmetic_is_compared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found = KeptAnswers()
    torch.set_num_threads(1)
    found.equal(FORM, lambda: True)
    torch.set_num_threads(2)
    assert found.get(FORM) is None
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    assert found.get(FORM) is None and KeptAnswers().get(FORM) is None
    torch.set_float32_matmul_precision("highest")
    with torch.backends.mkldnn.flags(enabled=False):
        assert found.get(FORM) is None and KeptAnswers().get(FORM) is None
    assert found.get(FORM) is True
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert KeptAnswers().get(FORM) is None


def test_a_damaged_file_costs_a_comparison(cache: Path) -> None:
    KeptAnswers().equal(FORM, lambda: True)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert KeptAnswers().get(FORM) is None
