"""Run a recorded step operator by operator, each on its device: the expected results of a placed program.

There is no plan here, no rewritten graph and no concurrent transfer: each operator's operands are moved to its device,
it runs, and its results stay there until the next one needs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from port_agent.backend.raw_bytes import whole_bytes
from port_agent.backend.team_threads import CpuTeams
from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Argument, NamedArgument, Op, Role, StepGraph
from port_planner.ir.run_op import fill_all, flatten, view
from port_planner.ir.torch_operators import function_of, literal


class EagerStep:
    """Steps of one graph over one set of contents.

    `kinds`: kind of the device on which each operator runs. `teams`: teams of the CPU's threads, if operators are
    divided among them. `contents`: contents by key of constants and of storages that outlive a step; a step
    stores its changes there.
    """

    def __init__(
        self, graph: StepGraph, kinds: Sequence[str], contents: dict[str, torch.Tensor], teams: CpuTeams | None = None
    ) -> None:
        self.graph, self.kinds, self.contents = graph, kinds, contents
        self._teams = teams or CpuTeams(torch.get_num_threads())
        self._last_use = [uses[-1] if uses else -1 for uses in graph.uses]

    def run(self, batch: Sequence[torch.Tensor], scalars: Sequence[float | int] = ()) -> torch.Tensor:
        """Run the step on a batch and return its loss on the host."""
        graph = self.graph
        bases: dict[int, torch.Tensor] = {
            s: self.contents[storage.key]
            for s, storage in enumerate(graph.storages)
            if graph.uses[s] and (storage.persistent or storage.role is Role.CONSTANT)
        }
        for v, tensor in zip(graph.batch, batch, strict=True):
            value = graph.values[v]
            nbytes = graph.storages[value.storage].nbytes
            base = torch.empty(nbytes, dtype=torch.uint8)
            view(base, value).copy_(tensor)
            bases[value.storage] = base
        with torch.no_grad():
            for i, (op, kind) in enumerate(zip(graph.ops, self.kinds, strict=True)):
                if op.name != GUARD:
                    self._run(op, kind, bases, scalars)
                for s in (*graph.reads[i], *graph.creates[i]):
                    if self._last_use[s] == i and graph.storages[s].role is Role.TEMPORARY and s not in graph.kept:
                        bases.pop(s, None)
        for s, storage in enumerate(graph.storages):
            if storage.persistent and s in bases:
                self.contents[storage.key] = bases[s]
        loss = graph.values[graph.loss]
        return view(bases[loss.storage], loss).to(CPU, copy=True)

    def _run(self, op: Op, kind: str, bases: dict[int, torch.Tensor], scalars: Sequence[float | int]) -> None:
        values, there = self.graph.values, dict[int, torch.Tensor]()

        def fetch(v: int) -> torch.Tensor:
            s = values[v].storage
            if s not in there:
                base = bases[s]
                there[s] = base if base.device.type == kind else whole_bytes(base).to(kind)
            return view(there[s], values[v])

        def constant(argument: Argument) -> Any:
            is_device = isinstance(argument, NamedArgument) and argument.kind == "device"
            return torch.device(kind) if is_device else literal(argument)

        (args, kwargs), function = fill_all(op, fetch, scalars.__getitem__, constant), function_of(op)
        result = self._teams.runs(op.team, lambda: function(*args, **kwargs))()
        bases.update({s: there[s] for s in op.writes})
        for v, tensor in zip(op.outputs, flatten(result), strict=True):
            if v is not None:
                bases.setdefault(values[v].storage, tensor)


def eager_contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return private initial contents: the bytes of each tensor's storage, on the host."""
    return {key: whole_bytes(tensor).to(CPU, copy=True) for key, tensor in tensors.items()}
