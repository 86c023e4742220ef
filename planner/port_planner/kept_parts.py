"""What steps on tensors without contents must not change: all ways into training other than torch's operators.

A program may change a learning rate, give the model another parameter, seed torch's generator or empty the optimizer's
state. It may write to weights and data through numpy. None of this is an operator that a recording shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from port_planner.base.errors import CaptureError, program_line
from port_planner.column_file import Column
from port_planner.ir.bundle.checksums import tensor_hasher
from port_planner.ir.lowering.optimizer_scalars import hyperparameters
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.job import TrainingJob
from port_planner.torch_compat.autograd import version_of
from port_planner.torch_compat.contentless import has_contents


class KeptParts:
    """The parts of a job that its steps on tensors without contents must leave as they are.

    `columns`: the samples of its buckets; the steps receive copies of them.
    """

    def __init__(self, job: TrainingJob, columns: Sequence[Sequence[Column]]) -> None:
        self._job = job
        named = [*job.model.named_parameters(), *job.model.named_buffers()]
        self._tensors = [(f"{name} of the model", tensor, version_of(tensor)) for name, tensor in named]
        data = (column for bucket in columns for column in bucket if isinstance(column, torch.Tensor))
        self._tensors += [("the data", column, version_of(column)) for column in data]
        self._contents = [_checksum(tensor) for _, tensor, _ in self._tensors]

    @contextmanager
    def kept(self, *, replaces_buffers: bool = False) -> Iterator[None]:
        """Run code of the job: forward and backward pass, or hooks.

        `replaces_buffers`: it may put results of its operators in the place of buffers, as in each further such run.

        Raises CaptureError if it uses the optimizer's state, or changes the optimizer's groups, which tensors the model
        has, torch's generator or settings.
        """
        optimizer, before = self._job.optimizer, self._now()
        with state_unread(optimizer, "the step"):
            yield
        now = self._now()
        if replaces_buffers:
            for name in before.buffers.keys() & now.buffers.keys():
                if now.buffers[name] is None:
                    before.buffers[name] = None
        for what, was, is_now in zip(_PARTS, before, now, strict=True):
            if was != is_now:
                raise CaptureError(f"the step changes {what}")

    def _now(self) -> "_Parts":
        model, settings = self._job.model, arithmetic()
        groups = [([*map(id, g["params"])], repr(hyperparameters(g))) for g in self._job.optimizer.param_groups]
        parameters = [(name, *_identity(parameter)) for name, parameter in model.named_parameters()]
        buffers = {
            name: _identity(buffer) if has_contents(buffer) else None
            for name, buffer in model.named_buffers(remove_duplicate=False)
        }
        return _Parts(groups, parameters, buffers, torch.get_rng_state().numpy().tobytes(), settings)

    def require_contents(self) -> None:
        """Raise CaptureError if the steps wrote to weights or data without torch's operators."""
        for (what, tensor, version), content in zip(self._tensors, self._contents, strict=True):
            if version_of(tensor) == version and _checksum(tensor) != content:
                raise CaptureError(f"the step writes to {what} by other means than torch's operators, such as numpy's")


class _Parts(NamedTuple):
    """What code of the job must not change, in the order of `_PARTS`; buffers that operators made have no identity."""

    groups: list[Any]
    parameters: list[Any]
    buffers: dict[str, tuple[int, int] | None]
    generator: bytes
    settings: Any


_PARTS = (
    "the optimizer's groups, such as a learning rate, which a `scheduler` of the job may do",
    "which parameters the model has",
    "which buffers the model has",
    "torch's random generator (torch.manual_seed)",
    "settings of torch's arithmetic",
)


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), StorageWeakRef(tensor.untyped_storage()).cdata


def _checksum(tensor: torch.Tensor) -> str:
    whole = tensor.detach()
    if not has_contents(tensor) or whole.layout is not torch.strided:
        return ""
    hasher = tensor_hasher()
    hasher.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class _UnreadState(dict[Any, Any]):
    """Stands for the optimizer's state while code runs that must not use it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CaptureError(f"{program_line()}: {self._what} uses the optimizer's state")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = _refuse
    get = setdefault = pop = popitem = keys = values = items = clear = update = _refuse


@contextmanager
def state_unread(optimizer: torch.optim.Optimizer, what: str) -> Iterator[None]:
    """Raise CaptureError where the block, called `what`, uses the optimizer's state or replaces it."""
    state, stand_in = optimizer.state, _UnreadState(what)
    optimizer.state = stand_in  # type: ignore[assignment]
    try:
        yield
        if optimizer.state is not stand_in:
            raise CaptureError(f"{what} replaces the optimizer's state")
    finally:
        optimizer.state = state
