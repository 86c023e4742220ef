"""The tensors of a running step: a base for every resident storage, and a view of it for every value in use."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from port_agent.backend.base import Backend
from port_agent.backend.cpu import CpuBackend
from port_agent.backend.raw_bytes import whole_bytes
from port_agent.training.state.finite import NonFiniteError
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Argument, Op, StepGraph, Value
from port_planner.ir.run_op import Fetcher, call, compiled, fetcher, view
from port_planner.ir.torch_operators import (
    CONNECTIONIST,
    MAX_COORDINATE,
    MAX_REPEATS,
    REPEATS,
    check_arguments,
    dtype,
    shaped_by_contents,
)
from port_planner.operators import base_name, operator_of


class GraphChangedError(PortError):
    """The step differs from the recorded one, for example by a branch or a shape."""

    exit_code = ExitCode.IMPOSSIBLE


class StepValues:
    """Storages and values of one graph while its step runs, and the operands of its operators."""

    def __init__(self, graph: StepGraph, backend: Backend | None = None) -> None:
        self.graph, self.values = graph, graph.values
        self._backends: dict[str, Backend] = {CPU: CpuBackend()}
        if backend is not None:
            self._backends[backend.kind] = backend
        self.env: list[torch.Tensor | None] = [None] * len(graph.values)
        """Tensor of each value, once an operator has asked for it."""
        self.base: list[torch.Tensor | None] = [None] * len(graph.storages)
        """Tensor on each storage while the storage is resident."""
        self.scalars: Sequence[float | int] = ()
        """The optimizer's numbers for this step."""
        self._values_of: list[list[int]] = [[] for _ in graph.storages]
        for v, value in enumerate(graph.values):
            self._values_of[value.storage].append(v)

    def value(self, v: int) -> torch.Tensor:
        """Return the tensor of a value; raise PortError if its storage is not resident."""
        tensor = self.env[v]
        if tensor is None:
            value = self.values[v]
            tensor = self.env[v] = view(self.resident(value.storage), value)
        return tensor

    def resident(self, s: int) -> torch.Tensor:
        """Return a tensor on storage `s`; raise PortError if it is not resident."""
        base = self.base[s]
        if base is None:
            raise PortError(f"storage {s} is not resident, which is a defect of the program; report this")
        return base

    def whole(self, s: int) -> torch.Tensor:
        """Return the bytes of storage `s`, which may go to flash; raise GraphChangedError if it is too short."""
        nbytes, found = self.graph.storages[s].nbytes, whole_bytes(self.resident(s))
        if found.numel() < nbytes:
            raise GraphChangedError(
                f"storage {s} ({self.graph.storages[s].name}) has {found.numel()} bytes, but {nbytes} were recorded; "
                "plan the job again on this version of torch"
            )
        return found[:nbytes]

    def bind(self, v: int, tensor: torch.Tensor) -> None:
        """Use `tensor` as a value, and as its storage's base if there is none."""
        s = self.values[v].storage
        self.env[v] = tensor
        if self.base[s] is None:
            self.base[s] = tensor

    def allocate(self, s: int, nbytes: int | None = None) -> torch.Tensor:
        """Return memory for the contents of storage `s`, or for `nbytes` of them, on its device."""
        storage = self.graph.storages[s]
        return self._backends[storage.device].allocate(storage.nbytes if nbytes is None else nbytes)

    def clear(self, s: int) -> None:
        """Release a storage and every value on it."""
        self.base[s] = None
        env = self.env
        for v in self._values_of[s]:
            env[v] = None

    def stand_in(self, s: int) -> None:
        """Replace every value on a freed storage by a tensor of its shape, for operators that read nothing else."""
        for v in self._values_of[s]:
            value = self.values[v]
            self.env[v] = torch.empty((), dtype=dtype(value.dtype)).expand(value.shape)

    def load_batch(self, batch: Sequence[torch.Tensor]) -> None:
        """Bind the tensors of a batch.

        Raises GraphChangedError if their shapes or types differ from the recorded ones.
        """
        graph = self.graph
        for v, tensor in zip(graph.batch, batch, strict=True):
            value = graph.values[v]
            if tuple(tensor.shape) != value.shape or str(tensor.dtype) != f"torch.{value.dtype}":
                raise GraphChangedError(
                    f"a batch tensor has shape {list(tensor.shape)} {tensor.dtype}, but the plan was made for "
                    f"{list(value.shape)} {value.dtype}; plan for this shape too or drop the last short batch"
                )
            elsewhere = tensor.device.type != graph.storages[value.storage].device
            if elsewhere or tuple(tensor.stride()) != value.stride or tensor.storage_offset() != value.offset:
                tensor = view(self.allocate(value.storage), value).copy_(tensor)
            self.bind(v, tensor)

    def caller(self, op: Op, args: tuple[Argument, ...]) -> Fetcher:
        """Return a function that calls the operator on the current values."""
        check_arguments(op, self.graph)
        positional = [self.fetcher(a) for a in args]
        coordinates = operator_of(op.name).coordinates
        if coordinates is not None:
            positional[coordinates] = _within_reach(op, positional[coordinates])
        if base_name(op.name) == CONNECTIONIST:
            positional[1] = _among_classes(*positional[:4])
        if op.name == REPEATS:
            positional[0] = _countable(op, positional[0])
        return compiled(op, positional, [(k, self.fetcher(a)) for k, a in op.kwargs])

    def draw(self, op: Op) -> None:
        """Draw the numbers of a random operator, with zeros instead of its operands."""
        storages, values = self.graph.storages, self.values
        call(op, lambda v: view(torch.zeros(storages[values[v].storage].nbytes, dtype=torch.uint8), values[v]))

    def fetcher(self, argument: Argument) -> Fetcher:
        """Return a function that returns the current value of an operator's argument."""
        return fetcher(argument, self._value_fetcher, self.number_fetcher)

    def _value_fetcher(self, v: int) -> Fetcher:
        env, value = self.env, self.value

        def fetch() -> torch.Tensor:
            tensor = env[v]
            return value(v) if tensor is None else tensor

        return fetch

    def number_fetcher(self, index: int) -> Fetcher:
        """Return a function that returns one of the optimizer's numbers for the current step."""
        return lambda: self.scalars[index]


def _within_reach(op: Op, fetch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that returns an operator's coordinates; it raises NonFiniteError if they are not finite."""

    def checked() -> torch.Tensor:
        grid = fetch()
        if grid.numel():
            least, most = (bound.item() for bound in torch.aminmax(grid))
            if not -MAX_COORDINATE <= least <= most <= MAX_COORDINATE:
                raise NonFiniteError(
                    f"{op.name} is given coordinates from {least} to {most}, which are outside any image; the last "
                    "good checkpoint is kept: look for such values in the data, or lower the learning rate and plan "
                    "again"
                )
        return grid

    return checked


def _countable(op: Op, fetch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that returns how often each index is repeated.

    The function raises IndexError for a negative number, or for more than memory can hold.
    """

    def checked() -> torch.Tensor:
        repeats = fetch()
        counted = repeats.cpu()  # Apple's GPU has no 64-bit numbers to add them in
        if counted.numel() and (counted.min() < 0 or counted.sum(dtype=torch.float64) > MAX_REPEATS):
            raise IndexError(f"{op.name} is given {counted.min().item()} to {counted.max().item()} repeats")
        return repeats

    return checked


def _among_classes(
    log_probs: Callable[[], torch.Tensor],
    labels: Callable[[], torch.Tensor],
    _: Callable[[], Any],
    lengths: Callable[[], Any],
) -> Callable[[], torch.Tensor]:
    """Return a function that returns the labels of a CTC loss (one row per sample, or all in a row).

    The function raises IndexError, as other losses do, if a label within a sample's length is not a valid class.
    """

    def checked() -> torch.Tensor:
        given, classes = labels(), log_probs().shape[-1]
        used = given
        if given.dim() > 1:
            places, longest = torch.arange(given.shape[1], device=given.device), torch.as_tensor(lengths())
            used = given[places < longest.to(given.device).unsqueeze(1)]
        if used.numel():
            least, most = (bound.item() for bound in torch.aminmax(used))
            if not 0 <= least <= most < classes:
                raise IndexError(f"Target {least if least < 0 else most} is out of bounds.")
        return given

    return checked


def check_layout(op: Op, value: Value, tensor: torch.Tensor) -> None:
    """Raise GraphChangedError unless an operator's result has the recorded layout."""
    actual = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
    if actual != (f"torch.{value.dtype}", value.shape, value.stride, value.offset):
        raise GraphChangedError(
            f"{op.name} gave a tensor {actual}, but recorded was {value.dtype} {value.shape} {value.stride} "
            f"{value.offset}; "
            + (
                "its size depends on its operands' contents, and a plan is valid for one size; train with "
                "`port-agent exec`, which handles such changes"
                if shaped_by_contents(op)
                else "plan the job again on this version of torch"
            )
        )
