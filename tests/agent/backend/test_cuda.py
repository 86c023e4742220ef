"""CUDA: refused with the remedy where there is none; where there is, copies follow events.

What it asks of torch and of the driver.
"""

from pathlib import Path

import pytest
import torch

from port_agent.backend.base import DeviceAbsentError
from port_agent.backend.cuda import CudaBackend, grow_segments, held_by, pin_as_asked
from port_planner.ir.device_kinds import CUDA

absent = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
present = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@absent
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceAbsentError, match="finds none; run it where there is one"):
        CudaBackend()


@present
def test_a_copy_out_and_in_follows_what_was_computed() -> None:
    backend = CudaBackend()
    pin_as_asked(backend.kind)
    there, host = backend.allocate(1 << 20), backend.allocate_host(1 << 20)
    there.fill_(7)
    backend.copy(host, there, backend.reached()).synchronize()
    assert bool((host == 7).all())
    host.fill_(9)
    backend.wait(backend.copy(there, host, backend.reached()))
    assert int(there.sum(dtype=torch.int64)) == 9 << 20
    size, before = 5 << 20, torch.cuda.host_memory_stats()["allocated_bytes.current"]
    kept = backend.allocate_host(size)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before == size == kept.numel()


def test_pinned_memory_is_taken_as_it_is_asked_for_and_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    """torch warns where it is to round sizes that it does not keep, and says that it will not."""
    pin_as_asked(CUDA)
    asked = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(f"pinned_max_round_threshold_mb:7,{asked}")
    output = capfd.readouterr().err
    assert "(7) > pinned_max_cached_size_mb (0)" in output and "never rounded up" in output


def test_segments_grow_beside_what_is_set_already_unless_that_says_otherwise() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
        grow_segments(CUDA)
        assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:128,expandable_segments:True"
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        grow_segments(CUDA)
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:False"
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


SAYS = """#!/bin/sh
[ "$4" = GPU-8f3b-1 ] || exit 6
printf '%s\\n' "$SAID"
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("output", "held"),
    [("4711, 512\n4712, 20", 512 << 20), ("4712, 20", None), ("4711, [N/A]", None), ("[Not Supported]", None)],
)
def test_what_the_driver_says_of_a_process_is_asked_of_the_card_that_torch_uses(
    output: str, held: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SAYS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SAID", output)
    assert held_by(4711, "GPU-8f3b-1") == held
    assert held_by(4711, "GPU-another") is None
