"""Settings that round the same call otherwise, read and put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from port_planner.exactness.arithmetic import arithmetic, computing_as

PRODUCTS: Any = torch.backends.mkldnn.matmul


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
