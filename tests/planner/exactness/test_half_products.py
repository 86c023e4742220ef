"""What products in half precision take where the processor has no instructions for them."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

from port_planner.exactness import half_products
from port_planner.exactness.half_products import in_software, report_once, sums_bytes

WITHOUT_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""A processor without bfloat16, on one of x86."""


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    for kept in (sums_bytes, report_once, half_products.slowdown):
        kept.cache_clear()
    yield
    for kept in (sums_bytes, report_once, half_products.slowdown):
        kept.cache_clear()


class Meter:
    """A stand-in that records its arguments."""

    sees, took = True, 0

    def start(self) -> None:
        """Begin a call."""

    def stop(self) -> int:
        """Return the bytes."""
        return self.took


@pytest.mark.parametrize(("took", "expected"), [(0, 0), (128 * 16 * 2, 0), (128 * 4096 * 4, 4), (128 * 4096 * 6, 4)])
def test_the_room_of_sums_is_measured_not_told_by_the_platform(
    took: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_products, "HostWorkspaceMeter", Meter)
    monkeypatch.setattr(Meter, "took", took)
    assert sums_bytes(torch.bfloat16) == expected
    assert sums_bytes(torch.float32) == 0


@pytest.mark.parametrize("software", [True, False])
def test_where_nobody_sees_what_a_call_takes_sums_are_expected_of_software(
    software: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "sees", False)
    monkeypatch.setattr(half_products, "HostWorkspaceMeter", Meter)
    monkeypatch.setattr(half_products, "in_software", lambda dtype: software)
    assert sums_bytes(torch.bfloat16) == (4 if software else 0)


def test_measuring_changes_nothing_for_the_products_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn = torch.backends.mkldnn

    def refused(*operands: torch.Tensor) -> torch.Tensor:
        """Switch oneDNN off as torch does: it warns, and does not use oneDNN from then on."""
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: could not create a primitive\n" * 60, stacklevel=1)
        onednn.enabled = False  # type: ignore[assignment]
        return torch.zeros(128, 4096)

    monkeypatch.setattr(torch, "mm", refused)
    monkeypatch.setattr(half_products, "HostWorkspaceMeter", Meter)
    with warnings.catch_warnings(action="error"):
        sums_bytes(torch.bfloat16)
        half_products.slowdown(torch.bfloat16)
    assert onednn.enabled


def test_one_sentence_stands_for_torchs_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(half_products, "in_software", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(half_products, "slowdown", lambda dtype: 9.6)
    with warnings.catch_warnings(record=True) as said:
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
            report_once(dtype)
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: could not create a primitive", stacklevel=1)
    assert not said
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "port-agent: this processor multiplies bfloat16 in software, at 1/10 of its speed in float32: "
    )


@pytest.mark.process
def test_a_processor_without_bfloat16_is_known_as_one() -> None:
    program = (
        "import torch; from port_planner.exactness.half_products import in_software; print(in_software(torch.bfloat16))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **WITHOUT_BFLOAT16},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
    assert not in_software(torch.float32)
