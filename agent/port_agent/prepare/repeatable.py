"""Whether a device gives the same bits again, by what is known about its operators, and by
running plain PyTorch twice.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from port_agent.training.comparison import tensor_checksum
from port_planner.base.errors import ExitCode, PortError
from port_planner.column_file import Column
from port_planner.ir.devices.exactness import reordered_operators
from port_planner.ir.graph import StepGraph
from port_planner.ir.run_op import flatten
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job, on_device
from port_planner.torch_compat.modes import TorchDispatchMode

ALLOW = "--allow reordered"
_UNNAMED = "operators that are in no table"


class UnrepeatableError(PortError):
    """A step's numbers differ each time on its device, so no plan can give plain PyTorch's."""

    exit_code = ExitCode.IMPOSSIBLE


def reordered_in(graphs: Iterable[StepGraph], *, allowed: bool) -> tuple[str, ...]:
    """Return the operators that add in a different order each time.

    Raises UnrepeatableError for them unless that is `allowed`.
    """
    graphs = tuple(graphs)
    found: dict[str, str] = {}
    for graph in graphs:
        found |= reordered_operators(graph)
    if found and not allowed:
        named = ", ".join(f"{name} ({source})" for name, source in sorted(found.items()))
        raise UnrepeatableError(
            f"on {graphs[0].device} these operators do not give the same bits each time: {named}; replace them in the "
            f"model, plan with --device cpu, or take numbers that differ from run to run with {ALLOW}"
        )
    return tuple(sorted(found)) or ((_UNNAMED,) if allowed else ())


def not_repeated(job: TrainingJob, data: Sequence[Column]) -> UnrepeatableError:
    """Return the error for plain PyTorch's own steps that differ, with the first operator that shows it."""
    traces = [_traced(job, data) for _ in range(2)]
    first = next((name for (name, a), (_, b) in zip(*traces, strict=False) if a != b), None)
    where = "no operator of one step shows it" if first is None else f"first in {first}"
    return UnrepeatableError(
        f"plain PyTorch gave different numbers when it ran the first steps again on {kind_of_job(job)}: {where}; "
        "replace what does not repeat, plan with --device cpu, or take numbers that differ from run to run with "
        f"{ALLOW}"
    )


def _traced(job: TrainingJob, data: Sequence[Column]) -> list[tuple[str, str]]:
    torch.manual_seed(job.seed)
    batch = on_device((column[: job.batch_size] for column in data), kind_of_job(job))
    trained = [p for p in job.model.parameters() if p.requires_grad]
    with OperatorDigests() as digests:
        result = job.loss_of(0)(job.model, *batch)
        torch.autograd.grad(result[0] if isinstance(result, tuple) else result, trained, allow_unused=True)
    seen: list[tuple[str, str]] = digests.seen
    return seen


class OperatorDigests(TorchDispatchMode):
    """Records the name of each operator and a digest of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seen.append((str(func), " ".join(map(tensor_checksum, flatten(result)))))
        return result
