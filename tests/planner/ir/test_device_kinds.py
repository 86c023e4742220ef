"""A step uses the CPU and at most one other device."""

import pytest

from port_planner.ir.device_kinds import CPU, CUDA, MPS, accelerator_of


def test_the_accelerator_is_what_is_not_the_cpu() -> None:
    assert accelerator_of([]) == accelerator_of([CPU, CPU]) == CPU
    assert accelerator_of([CPU, CUDA, CUDA]) == CUDA


def test_two_accelerators_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cuda and mps"):
        accelerator_of([MPS, CPU, CUDA])
