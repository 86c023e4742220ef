"""What an error that ends a worker means for its job."""

import errno

import pytest

from agent.worker.protocol import FailureCause
from agent.worker.serve import failure_cause
from planner.ir.errors import CaptureError, PortError


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
        (OSError(errno.ENOSPC, "No space left on device"), FailureCause.OTHER),
        (RuntimeError("shape mismatch"), FailureCause.OTHER),
        (PortError("the disk refuses"), FailureCause.OTHER),
        (CaptureError("never"), FailureCause.IMPOSSIBLE),
    ],
)
def test_causes(error: Exception, cause: FailureCause) -> None:
    assert failure_cause(error) is cause
