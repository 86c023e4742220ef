"""What an error that ends a worker means for its job."""

import errno
import signal

import pytest
import torch

from port_agent.training.state.finite import NonFiniteError
from port_agent.worker.control import Control, Emit
from port_agent.worker.protocol import FailureCause
from port_agent.worker.serve import failure_cause, serve
from port_planner.base.errors import CaptureError, ExitCode, PortError


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), FailureCause.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureCause.OUT_OF_MEMORY),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."
            ),
            FailureCause.OUT_OF_MEMORY,
        ),
        (RuntimeError("can't start new thread"), FailureCause.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), FailureCause.OUT_OF_MEMORY),
        (RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator"), FailureCause.OUT_OF_MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"), FailureCause.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), FailureCause.OTHER),
        (RuntimeError("shape mismatch"), FailureCause.OTHER),
        (PortError("the disk refuses"), FailureCause.OTHER),
        (CaptureError("never"), FailureCause.IMPOSSIBLE),
        (NonFiniteError("the loss of step 3 is nan"), FailureCause.DIVERGED),
    ],
)
def test_causes(error: Exception, cause: FailureCause) -> None:
    assert failure_cause(error) is cause


def test_what_nobody_expected_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle may have an operator take what it does not: torch raises TypeError, ValueError and the like."""

    def work(control: Control, emit: Emit) -> None:
        torch.empty("x")  # type: ignore[arg-type]

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        assert serve(None, work) == ExitCode.FAILED
    finally:
        signal.signal(signal.SIGINT, before[0]), signal.signal(signal.SIGTERM, before[1])
    said = capsys.readouterr().err
    assert (
        said.startswith("port-agent worker: ")
        and "TypeError" in said
        and "(test_serve.py, line" in said
        and "Traceback" not in said
    )
