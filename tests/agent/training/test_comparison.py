"""A step beside plain PyTorch's: the same bits pass, others are refused with the cause that they have."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from port_agent.training import comparison
from port_agent.training.comparison import MismatchError, compare_step, processor, tensor_checksum
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.bundle.manifest import ExpectedResults
from port_planner.ir.torch_arithmetic import arithmetic

WEIGHT = torch.arange(6.0).reshape(2, 3)
REFERENCE = ExpectedResults(((0.5).hex(), float("nan").hex()), 1, processor(), {"parameter/w": tensor_checksum(WEIGHT)})


def chunks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), 5):
        yield flat[start : start + 5].numpy().data


def test_the_same_bits_pass_and_later_steps_are_not_compared() -> None:
    compare_step(REFERENCE, 1, 0.5, lambda key: chunks_of(WEIGHT + 1))
    compare_step(REFERENCE, 2, float("nan"), lambda key: chunks_of(WEIGHT))
    compare_step(REFERENCE, 3, 7.0, lambda key: chunks_of(WEIGHT + 1))
    compare_step(ExpectedResults(), 1, 7.0, lambda key: chunks_of(WEIGHT))


def test_the_layout_of_a_tensor_is_none_of_its_bits() -> None:
    assert tensor_checksum(WEIGHT.t().contiguous().t()) == tensor_checksum(WEIGHT)
    assert tensor_checksum(WEIGHT.t()) != tensor_checksum(WEIGHT)


def test_another_loss_is_refused_as_a_step_that_the_bundle_does_not_have() -> None:
    with pytest.raises(MismatchError, match=r"step 1 gave the loss 0\.25; plain PyTorch gave 0\.5 .*port-agent exec"):
        compare_step(REFERENCE, 1, 0.25, lambda key: chunks_of(WEIGHT))


def test_so_is_another_state_with_the_same_losses() -> None:
    with pytest.raises(MismatchError, match=r"after step 2 1 of 1 tensors .* parameter/w first"):
        compare_step(REFERENCE, 2, float("nan"), lambda key: chunks_of(WEIGHT + 1))


def test_settings_of_arithmetic_that_changed_meanwhile_are_named() -> None:
    planned = replace(REFERENCE, arithmetic=arithmetic())
    with unchanged_arithmetic():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with pytest.raises(MismatchError, match=r"\(with torch's onednn off instead of on now\)"):
            compare_step(planned, 1, 0.25, lambda key: chunks_of(WEIGHT))


def test_a_processor_is_named_by_its_core_where_torch_has_no_name_for_its_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(comparison, "cpuinfo", lambda: "CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n")
    assert comparison.processor().startswith("aarch64 Cortex-A76")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    assert comparison.processor().startswith("aarch64 SVE256")


def test_only_another_processor_is_blamed_on_the_processor() -> None:
    elsewhere = replace(REFERENCE, processor="riscv64 DEFAULT")
    with pytest.raises(MismatchError, match=r"planned on riscv64 DEFAULT.*small differences are normal"):
        compare_step(elsewhere, 1, 0.25, lambda key: chunks_of(WEIGHT))
