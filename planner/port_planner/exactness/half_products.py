"""The cost of half-precision products on this processor, measured once per process.

If a processor does not multiply bfloat16 (Cortex-A72 and A76, x86 with only AVX2), torch does it in software. This is
many times slower than float32, and needs 32-bit sums besides the result. If oneDNN is asked first and refuses, it stays
disabled for the rest of the process.
"""

import sys
import time
import warnings
from functools import cache

import torch

from port_planner.exactness.applied_arithmetic import computing_as, unchanged_arithmetic
from port_planner.ir.arithmetic import FLOAT32_INSTEAD
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.profiling.timing import HostWorkspaceMeter

HALVES = (torch.bfloat16, torch.float16)
_REFUSAL = r"mkldnn_\w+ failed, switching to "
"""The beginning of torch's warning when oneDNN rejects a product, which is a page of text with a C++ trace."""

_SUMS_BYTES = 4
_ROWS, _INNER, _COLUMNS = 128, 16, 4096
"""Shape whose workspace is measured; packed operands take a sixteenth of its sums."""

_SIDE, _TIMES = 256, 3
"""Size of the timed square matrices and number of runs: 34 million multiplications."""


def in_software(dtype: torch.dtype) -> bool:
    """Return whether this processor lacks instructions that multiply numbers of this type, according to oneDNN."""
    if dtype not in HALVES:
        return False
    with_onednn = torch.ops.mkldnn
    found = with_onednn._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else with_onednn._is_mkldnn_fp16_supported
    return not found()


@cache
def sums_bytes(dtype: torch.dtype) -> int:
    """Return the extra bytes per result element of a product: 4 if it keeps 32-bit sums, else 0.

    Without the allocator that measures calls, it is 4 for half precision in software.
    """
    if dtype not in HALVES:
        return 0
    meter = HostWorkspaceMeter()
    if not meter.sees:
        return _SUMS_BYTES if in_software(dtype) else 0
    with unchanged_arithmetic(), _without_refusals():
        one, other = torch.ones(_ROWS, _INNER, dtype=dtype), torch.ones(_COLUMNS, _INNER, dtype=dtype).t()
        torch.mm(one, other)  # one-off allocations do not count
        meter.start()
        made = torch.mm(one, other)
        workspace_bytes = meter.stop()
    return _SUMS_BYTES if workspace_bytes >= made.numel() * _SUMS_BYTES // 2 else 0


@cache
def slowdown(dtype: torch.dtype, shape: tuple[int, int, int] = (_SIDE, _SIDE, _SIDE)) -> float:
    """Return the CPU time of a layer's products in this type relative to float32, forward and backward, on one thread.

    Waiting for a core does not count, but other work on the same core slows one type more than the other: 1.8 was
    measured where both are equally fast. `shape`: rows, inner size and columns.
    """
    with computing_as(arithmetic()._replace(threads=1)), _without_refusals():
        return _seconds(dtype, shape) / _seconds(torch.float32, shape)


@cache
def report_once(dtype: torch.dtype) -> None:
    """Report once on standard error, instead of torch's warning, that products of this type run in software, and their
    cost.
    """
    if in_software(dtype):
        warnings.filterwarnings("ignore", message=_REFUSAL)
        sys.stderr.write(f"port-agent: {cost_of_software(dtype)}: {FLOAT32_INSTEAD}\n")


def cost_of_software(dtype: torch.dtype) -> str:
    """Return a sentence about the cost of a product on a processor without the instructions."""
    name = str(dtype).removeprefix("torch.")
    return f"this processor multiplies {name} in software, at 1/{max(slowdown(dtype), 1.0):.0f} of its speed in float32"


def _without_refusals() -> "warnings.catch_warnings[None]":
    return warnings.catch_warnings(action="ignore")


def _seconds(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Return the CPU seconds of this thread, which must be the only one that computes."""
    rows, inner, columns = shape
    given, weight, back = (torch.ones(size, dtype=dtype) for size in ((rows, inner), (columns, inner), (rows, columns)))
    taken = []
    for _ in range(_TIMES):
        begin = time.thread_time()
        torch.mm(given, weight.t())
        torch.mm(back, weight)
        taken.append(time.thread_time() - begin)
    return min(taken)
