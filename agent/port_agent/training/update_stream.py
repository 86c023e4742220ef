"""An elementwise update that runs slice by slice: weight, gradient and optimizer state stream through RAM.

While slice i is computed, slice i + 1 is being read and slice i - 1 written, with two buffers per streamed storage.
This runs on a separate thread, so that the transfers of an update hide behind the backward pass.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from port_agent.training.step_paging import StepPaging, Wait
from port_agent.training.step_values import StepValues
from port_planner.ir.graph import Argument, Op, Value, operands
from port_planner.ir.lowering.update_slices import slice_bounds
from port_planner.ir.program import Program
from port_planner.ir.run_op import Fetcher, compiled, fetcher


class _AbandonError(Exception):
    """The step has ended early, and nothing needs the result."""


class UpdateThread:
    """Runs the sliced updates of one step, one after another. The thread starts with the first of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update-thread")
        self._futures: dict[int, Future[float]] = {}
        self._may_run = threading.Event()
        self._may_run.set()
        self._closed = False

    def start(self, update: "SlicedUpdate") -> None:
        self._futures[update.index] = self._pool.submit(update.run, self._gate)

    def result(self, group: int, timeout_s: float) -> float | None:
        """Return the seconds of computation in a group's update; None if it is not done yet.

        Raises what the update raised.
        """
        future = self._futures[group]
        try:
            return future.result(timeout_s)
        except TimeoutError:
            return None

    def hold(self) -> None:
        """Let no further slice start until `go_on` is called."""
        self._may_run.clear()

    def go_on(self) -> None:
        self._may_run.set()

    def close(self) -> None:
        """End the thread; updates for which nobody waited stop before their next slice."""
        self._closed = True
        self._may_run.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _gate(self) -> None:
        self._may_run.wait()
        if self._closed:
            raise _AbandonError


class SlicedUpdate:
    """One update group of a program."""

    def __init__(
        self,
        program: Program,
        group_index: int,
        values: StepValues,
        paging: StepPaging,
        whole: Sequence[Callable[[], None]],
    ) -> None:
        """`whole`: runs each of the group's operators that work on whole storages, before the slices."""
        self.values, self.paging, self.index, self.whole = values, paging, group_index, whole
        graph = program.graph
        self.group = program.groups[group_index]
        self.bounds = slice_bounds(self.group.nbytes, dict(program.slice_counts)[group_index])
        inside = range(self.group.first, self.group.last + 1)
        self.ops = [graph.ops[i] for i in inside if i not in self.group.whole]
        self.calls = [self._caller(op) for op in self.ops]
        self.written = {s for op in self.ops for s in op.writes if graph.storages[s].persistent}
        self.temporaries = set(self.group.temporaries)
        self.streamed = [s for s in self.group.storages if s not in self.temporaries]
        self.leaving = dict(program.slice_written).get(group_index, ())
        """Resident storages that must be on flash when the update ends."""
        self.last_use = {
            s: k for k, op in enumerate(self.ops) for s in _storages(graph.values, op) if s in self.temporaries
        }
        self.slices: dict[int, torch.Tensor] = {}
        """Storage -> the current slice, as bytes."""
        self.views: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def run(self, gate: Callable[[], None]) -> float:
        """Run the group, with resident storages in place; return the seconds of computation.

        `gate` is called before each slice, and waits while the step is paused.
        """
        gate()
        begin = time.perf_counter()
        for run in self.whole:
            run()
        computed_s = time.perf_counter() - begin
        away = [s for s in self.streamed if self.values.base[s] is None]
        here = {s: self.values.whole(s) for s in self.streamed if s not in away}
        sources = {s: self.paging.slices_from(s) for s in away}
        targets = {s: self.paging.slices_to(s) for s in (*(s for s in away if s in self.written), *self.leaving)}
        size = max(stop - start for start, stop in self.bounds)
        buffers = {s: (self.paging.memory(s, size), self.paging.memory(s, size)) for s in away}
        reads: list[dict[int, Wait]] = [{}, {}]
        writes: list[list[Wait]] = [[], []]

        def read(k: int) -> None:
            start, stop = self.bounds[k]
            for wait in writes[k % 2]:
                wait()
            for s in away:
                reads[k % 2][s] = sources[s](buffers[s][k % 2][: stop - start], start)

        read(0)
        for k, (start, stop) in enumerate(self.bounds):
            if k + 1 < len(self.bounds):
                read(k + 1)
            for s in away:
                reads[k % 2][s]()
                self.slices[s] = buffers[s][k % 2][: stop - start]
            for s, whole in here.items():
                self.slices[s] = whole[start:stop]
            gate()
            begin = time.perf_counter()
            self._compute()
            computed_s += time.perf_counter() - begin
            writes[k % 2] = [target(self.slices[s], start) for s, target in targets.items()]
            self.slices.clear()
            self.views.clear()
        for wait in (*writes[0], *writes[1]):
            wait()
        return computed_s

    def _compute(self) -> None:
        for k, (op, call) in enumerate(zip(self.ops, self.calls, strict=True)):
            result = call()
            v = op.outputs[0] if op.outputs else None
            if v is not None and self.values.values[v].storage in self.temporaries:
                s = self.values.values[v].storage
                if s not in self.slices:
                    self.slices[s] = result
                    self.views[v] = result
            for s, last in self.last_use.items():
                if last == k:
                    self.slices.pop(s, None)
                    for used in [u for u in self.views if self.values.values[u].storage == s]:
                        del self.views[used]

    def _caller(self, op: Op) -> Fetcher:
        def given(argument: Argument) -> Fetcher:
            return fetcher(argument, self._value_fetcher, self.values.number_fetcher)

        return compiled(op, [given(a) for a in op.args], [(k, given(a)) for k, a in op.kwargs])

    def _value_fetcher(self, v: int) -> Fetcher:
        value = self.values.values[v]
        return partial(self._slice, v, value) if value.storage in self.group.storages else partial(self.values.value, v)

    def _slice(self, v: int, value: Value) -> torch.Tensor:
        tensor = self.views.get(v)
        if tensor is None:
            data = self.slices[value.storage]
            if data.dtype is torch.uint8:
                item = torch.empty(0, dtype=getattr(torch, value.dtype), device=data.device)
                start = data.storage_offset() // item.element_size()
                count = data.numel() // item.element_size()
                tensor = item.set_(data.untyped_storage(), start, (count,), (1,))
            else:
                tensor = data
            self.views[v] = tensor
        return tensor


def _storages(values: tuple[Value, ...], op: Op) -> set[int]:
    return {values[v].storage for v in (*op.outputs, *operands(op)) if v is not None}
