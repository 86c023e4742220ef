"""Settings that round the same call otherwise, read and put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from port_planner.exactness.applied_arithmetic import (
    UnavailableArithmeticError,
    computing_as,
    set_arithmetic,
    unchanged_arithmetic,
)
from port_planner.ir.torch_arithmetic import arithmetic

ONEDNN: Any = torch.backends.mkldnn
PRODUCTS: Any = ONEDNN.matmul


@pytest.fixture
def precision() -> Iterator[None]:
    before = PRODUCTS.fp32_precision
    yield
    PRODUCTS.fp32_precision = before


def test_precision_may_be_set_in_either_way_of_torch(precision: None) -> None:
    PRODUCTS.fp32_precision = "ieee"
    exact = arithmetic()
    PRODUCTS.fp32_precision = "bf16"
    assert arithmetic() != exact, "for which torch's older getter raises an error"


def test_a_block_computes_with_other_settings_and_leaves_none(precision: None) -> None:
    PRODUCTS.fp32_precision = "ieee"
    before = arithmetic()
    with (
        pytest.raises(KeyError),
        computing_as(before._replace(threads=1, onednn=False, precisions=("bf16", *before.precisions[1:]))),
    ):
        assert (torch.get_num_threads(), torch._C._get_mkldnn_enabled(), PRODUCTS.fp32_precision) == (1, False, "bf16")
        raise KeyError
    assert arithmetic() == before


def test_what_a_block_changes_itself_is_put_back() -> None:
    """As a product does that oneDNN refuses: it would move all later float32 convolutions of the
    process to other kernels.
    """
    before = arithmetic()
    with unchanged_arithmetic():
        ONEDNN.enabled = False
        torch.set_flush_denormal(True)
        torch.set_deterministic_debug_mode("warn")
        assert arithmetic() == before._replace(onednn=False, flush_denormal=True, deterministic=1)
    assert arithmetic() == before


def test_settings_of_another_process_hold_from_now_on_or_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic()
    try:
        set_arithmetic(before._replace(onednn=False, threads=1))
        assert arithmetic() == before._replace(onednn=False, threads=1)
    finally:
        set_arithmetic(before)
    monkeypatch.setattr(ONEDNN, "is_available", lambda: False)
    with pytest.raises(UnavailableArithmeticError, match=r"\(onednn off instead of on\)"):
        set_arithmetic(before)
