"""The drop-in: a training step that stays within a RAM budget, inside the user's own process and loop.

    with budgeted_step(model, loss_fn, optimizer, example_batch, ram="300MB", page_dir="/mnt/sd") as step:
        for batch in loader:
            loss = step(*batch)

Model and optimizer keep their identity. While the context is open, tensors that do not fit live on flash (their storages
are empty); afterwards they are back. The numbers are those of the plain PyTorch step, to the bit.

Flash space is taken before the first step, and Ctrl-C waits for the end of the step. A step that fails before it changed
anything (a batch of a wrong type, say) may be repeated. One that a failing medium cuts off in its updates cannot be undone
within the budget: the error says so, and no further step is made from there.
"""

import contextlib
import multiprocessing
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from agent.malloc import thrifty_glibc
from agent.prepare.bundle import measure, this_device
from agent.system.atomic_file import publish
from agent.train.buffers import block, view
from agent.train.checkpoint import StateStore
from agent.train.executor import Executor, StepReport
from agent.train.pager import PageError, Pager
from agent.train.resident_state import Persistents
from agent.train.step_paging import Scratch
from agent.train.step_values import GraphChangedError
from planner.capture.step import BatchSpec, Capture, Fill, capture_evaluation, capture_step
from planner.ir.bundle.bundle import Bundle, TensorLayout
from planner.ir.bundle.safetensors_io import encode
from planner.ir.costs import CostTable, DeviceCosts
from planner.ir.errors import CaptureError, PortError
from planner.ir.graph import Role, StepGraph, Value, storage_key
from planner.ir.lowering.lower import lower
from planner.ir.lowering.optimizer_scalars import StepScalars, describe_optimizer
from planner.ir.plan import Plan
from planner.ir.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from planner.ir.program import Program
from planner.ir.torch_operators import dtype
from planner.ir.units import format_bytes, parse_bytes
from planner.make_bundle import InfeasibleError, tensor_chunks
from planner.profiling.operators import Measured
from planner.search.plan_step import plan_step

_HALF_WAY = (
    "the last step was left half-way: some weights have its update, others do not; leave the block and load the weights "
    "that you saved last"
)

_MARGIN = 0.05
"""Share of what the plan may use that is kept back for what glibc cannot give back."""


@dataclass(frozen=True)
class _Recorded:
    """A capture without the model's own tensors, as it comes out of the recording process."""

    graphs: Mapping[str, StepGraph]
    constants: Mapping[str, bytes]
    fills: Mapping[str, Fill]
    layouts: Mapping[str, TensorLayout]
    aux: Any


@contextlib.contextmanager
def budgeted_step(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    example_batch: Sequence[Any],
    ram: str | int,
    page_dir: str | Path = ".",
    *,
    plan: str | Path | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    strategy: str = "greedy",
    restore: bool = True,
) -> Iterator["BudgetedStep"]:
    """Give a `step(*batch)` that trains within `ram` bytes of resident memory.

    `loss_fn(model, *batch)` returns a scalar, or (loss, aux); `ram` is a size ("300MB", "300M") or bytes and bounds this
    process from here on; `page_dir` is where tensors are paged. `plan`: a bundle made elsewhere from the same model, for
    a device that cannot record the step itself (aux is then the tuple of its tensors). `restore=False` leaves weights that
    were paged on flash at the end (save them with `step.save(path)`). Raises InfeasibleError with the smallest budget that
    would do, CaptureError for a step that cannot be recorded.
    """
    step = BudgetedStep(
        model, loss_fn, optimizer, parse_bytes(ram), Path(page_dir), clip_grad_norm=clip_grad_norm,
        accumulate=accumulate, strategy=strategy,
    )  # fmt: skip
    try:
        if plan is not None:
            step.use_bundle(Bundle(Path(plan)), tuple(example_batch))
        else:
            step.prepare(tuple(example_batch))
        yield step
    finally:
        step.close(restore=restore)


class BudgetedStep:
    """See `budgeted_step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        ram_bytes: int,
        page_dir: Path,
        *,
        clip_grad_norm: float | None,
        accumulate: int,
        strategy: str,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.ram_bytes, self.strategy = ram_bytes, strategy
        self.clip_grad_norm, self.accumulate = clip_grad_norm, accumulate
        self.report: StepReport | None = None
        """What the last step did."""
        spec = describe_optimizer(optimizer)
        if not page_dir.is_dir():
            raise PortError(f"page_dir {page_dir} is not a directory; create it or choose another")
        thrifty_glibc()
        page_dir.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=".port-", dir=page_dir))
        self.pager = Pager()
        self._own = {
            **{storage_key(Role.PARAMETER, n): p for n, p in model.named_parameters()},
            **{storage_key(Role.BUFFER, n): b for n, b in model.named_buffers()},
        }
        self._names = {p: n for n, p in model.named_parameters()}
        self._layouts: dict[str, TensorLayout] = {}
        self._released: set[str] = set()
        self._programs: dict[str, tuple[dict[str, Executor], Any]] = {}
        self._scratch: list[Scratch] = []
        self._micro = 0
        self._device: DeviceCosts | None = None
        self._persistents: Persistents | None = None
        self._store: StateStore | None = None
        self._fills: dict[str, Fill] = {}
        self.scalars = StepScalars(spec)
        self.scalars.steps_done = self._updates_so_far()
        self._mode = self._training_mode()
        self.planned_peak_bytes = 0
        self._left_half_way = False

    # -- preparing

    def prepare(self, batch: tuple[Any, ...], *, evaluation: bool = False) -> None:
        """Record, profile and plan the step for batches of this shape."""
        self._settle()
        if resident_bytes() > self.ram_bytes:
            raise InfeasibleError(
                f"this process already holds {format_bytes(resident_bytes())}, the budget is "
                f"{format_bytes(self.ram_bytes)}; raise ram, or plan on a bigger machine (port-agent plan) and pass "
                'plan="job.port"',
                resident_bytes(),
            )
        recorded = self._record(batch, evaluation)
        measured = measure_graphs(recorded.graphs)
        self._open_store(recorded.graphs, recorded.layouts, recorded.fills)
        device = self._this_device(measured)
        executors = {}
        for (name, graph), ops in zip(recorded.graphs.items(), measured.ops, strict=True):
            costs = CostTable(device, ops)
            result = plan_step(graph, costs, ram_bytes=self.ram_bytes, strategy=self.strategy)
            if result.plan is None:
                raise InfeasibleError(result.message, result.needed_bytes)
            executors[name] = self._executor(name, graph, costs, result.plan, recorded.constants)
        self._programs[self._signature(batch, evaluation)] = executors, recorded.aux

    def use_bundle(self, bundle: Bundle, batch: tuple[Any, ...]) -> None:
        """Take graphs and plans from a bundle instead of recording; it must be of the same model."""
        held = sum(t.untyped_storage().nbytes() for t in self._own.values())
        own_base = max(0, resident_bytes() - held)
        needs = {i: own_base + _dynamic_bytes(bundle, i) for i in range(len(bundle.plans))}
        best = [i for i, need in needs.items() if need <= self.ram_bytes]
        if not best:
            least = min(needs.values())
            raise InfeasibleError(
                f"no plan of {bundle.path} fits beside the {format_bytes(own_base)} that this process holds already; "
                f"the smallest needs {format_bytes(least)} in all: raise ram or plan for less",
                least,
            )
        index = min(best, key=lambda i: bundle.manifest.plans[i].seconds)
        missing = [
            k
            for k in self._own
            if k in bundle.manifest.layouts and bundle.manifest.layouts[k].shape != tuple(self._own[k].shape)
        ]
        unknown = [k for k in bundle.manifest.layouts if k.startswith(("parameter/", "buffer/")) and k not in self._own]
        if missing or unknown:
            raise CaptureError(f"{bundle.path} was made from another model (differs in {[*missing, *unknown][:3]})")
        fills = {
            k: Fill(v, bundle.manifest.layouts[k].dtype, bundle.manifest.layouts[k].shape)
            for k, v in bundle.manifest.fills.items()
        }
        self._open_store(bundle.graphs, bundle.manifest.layouts, fills)
        constants = {}
        with open(bundle.path, "rb") as stream:
            for key, member in bundle.tensors.items():
                if key.startswith("constant/"):
                    constants[key] = bundle.read(stream.fileno(), member, 0, member.nbytes)
        for name, graph in bundle.graphs.items():
            kind, _, rows = name.partition("@")
            executor = self._executor(name, graph, bundle.costs[name], bundle.plans[index][name], constants)
            signature = self._signature_of_rows(batch, int(rows or bundle.manifest.batch_size), kind == "eval")
            self._programs.setdefault(signature, ({}, None))[0][kind] = executor

    def _record(self, batch: tuple[Any, ...], evaluation: bool) -> _Recorded:
        """Record in a process forked for it: what recording imports and holds is gone afterwards."""
        if sys.platform != "linux":
            if self._released:
                raise CaptureError(
                    "a batch of another shape came while weights live on flash; prepare every shape on entry or drop the "
                    "last short batch"
                )
            return self._record_here(batch, evaluation)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)

        def child() -> None:
            torch.set_num_threads(1)
            try:
                self._revive()
                theirs.send(self._record_here(batch, evaluation))
            except (PortError, RuntimeError, TypeError, ValueError) as error:
                theirs.send(str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}")

        process = context.Process(target=child)
        process.start()
        theirs.close()
        try:
            answer = ours.recv()
        except EOFError:
            answer = "the recording process ended without an answer; it may have run out of memory"
        process.join()
        if isinstance(answer, str):
            raise CaptureError(answer)
        result: _Recorded = answer
        return result

    def _revive(self) -> None:
        """In the recording process: give the model its tensors again, from flash or from this process's blocks."""
        for key in self._released & self._own.keys():
            store, resident = self._kept().store, self._kept().resident
            own = self._own[key].detach()
            own.untyped_storage().resize_(store.sizes[key])
            if key in resident:
                _bytes(own).copy_(_bytes(resident[key])[: store.sizes[key]])
                continue
            slot = store.slot(key)
            with open(slot.file.path, "rb") as stream:
                stream.seek(slot.offset)
                stream.readinto(_bytes(own).numpy().data)

    def _record_here(self, batch: tuple[Any, ...], evaluation: bool) -> _Recorded:
        if evaluation:
            capture = capture_evaluation(self.model, self.loss_fn, batch)
        else:
            capture = capture_step(
                self.model, self.loss_fn, self.optimizer, batch, clip_grad_norm=self.clip_grad_norm,
                accumulate=self.accumulate,
            )  # fmt: skip
        return _without_tensors(capture)

    def _this_device(self, measured: Measured) -> DeviceCosts:
        """Costs of this machine; the base is what this process holds besides the tensors that the graph accounts for."""
        if self._device is None:
            held = sum(t.untyped_storage().nbytes() for k, t in self._own.items() if k in self._layouts)
            device = this_device(measured, self.folder, torch.get_num_threads(), lambda *_: None)
            base = max(0, resident_bytes() - held) + measured.retained_bytes
            base += int(_MARGIN * max(0, self.ram_bytes - base))
            self._device = replace(device, base_bytes=base)
        return self._device

    def _open_store(
        self, graphs: Mapping[str, StepGraph], layouts: Mapping[str, TensorLayout], fills: Mapping[str, Fill]
    ) -> None:
        self._layouts |= layouts
        self._fills |= fills
        sizes = {s.key: s.nbytes for g in graphs.values() for s in g.storages if s.persistent}
        if self._persistents is None:
            self._store = StateStore(self.folder, sizes, self.pager, job="drop-in")
            self._persistents = Persistents(self._store, self._layouts)
        elif self._store is not None:
            self._store.add(sizes)
        for key in sizes:
            if key in self._own and key not in self._released:
                self._persistents.resident.setdefault(key, self._own[key].detach())

    def _executor(
        self, name: str, graph: StepGraph, costs: CostTable, plan: Plan, constants: Mapping[str, bytes]
    ) -> Executor:
        program = lower(graph, costs, plan)
        self.planned_peak_bytes = max(self.planned_peak_bytes, program.peak_bytes)
        persistents = self._kept()
        self._hand_over(program)
        scratch = Scratch(self.folder / f"scratch-{len(self._scratch)}.pages")
        self._scratch.append(scratch)
        tensors = {k: torch.frombuffer(bytearray(b), dtype=torch.uint8) for k, b in constants.items() if b}
        return Executor(program, tensors, persistents.resident, self._store, self.pager, scratch)

    def _hand_over(self, program: Program) -> None:
        """Move what the program pages out of the model's own tensors, and make optimizer state that does not exist yet."""
        persistents, store = self._kept(), self._store
        graph = program.graph
        paged = program.paged_storages
        for s, storage in enumerate(graph.storages):
            if not storage.persistent or not graph.uses[s] or storage.key in self._released:
                continue
            key = storage.key
            source = self._source(key)
            if s not in paged:
                if key not in persistents.resident:
                    persistents.resident[key] = _materialised(source)
                continue
            tensor = _materialised(source)
            if store is not None:
                self.pager.wait(store.write(key, tensor))
            persistents.resident.pop(key, None)
            if isinstance(source, torch.Tensor):
                source.untyped_storage().resize_(0)
            self._released.add(key)

    def _source(self, key: str) -> "torch.Tensor | Fill":
        kind, _, name = key.partition("/")
        if key in self._kept().resident:
            return self._kept().resident[key]
        if kind == "state":
            parameter, _, what = name.rpartition("/")
            state = self.optimizer.state.get(self._own[storage_key(Role.PARAMETER, parameter)], {})
            if isinstance(state.get(what), torch.Tensor):
                found: torch.Tensor = state[what]
                return found
        return self._fills[key]

    def _kept(self) -> Persistents:
        if self._persistents is None:
            raise PortError("the step is not prepared; enter it with `with budgeted_step(...) as step`")
        return self._persistents

    # -- stepping

    def __call__(self, *batch: Any) -> Any:
        """Train on one batch; return the loss, or (loss, aux) as `loss_fn` does."""
        if self._training_mode() != self._mode:
            raise GraphChangedError(
                "model.train() or model.eval() was called since the step was recorded; put the mode back, or use "
                "step.evaluate(*batch) for evaluation"
            )
        self._check_whole()
        with _interrupt_waits():
            return self._train(batch)

    def _train(self, batch: tuple[Any, ...]) -> Any:
        kind = self._kind()
        scalars: list[float | int] = []
        updates_done = self.scalars.steps_done
        if kind in ("step", "last"):
            self.scalars.set_groups(self.optimizer.param_groups)
            scalars = self.scalars.advance()
        finished = False
        try:
            result = self._run(batch, kind, scalars, evaluation=False)
            finished = True
        finally:
            if not finished:
                self.scalars.steps_done = updates_done
        self._micro += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or LR schedulers warn that no step was made
        return result

    def evaluate(self, *batch: Any) -> Any:
        """Run the loss function forward only, the model in evaluation mode, within the same budget."""
        return self._run(batch, "eval", [], evaluation=True)

    def _run(self, batch: tuple[Any, ...], kind: str, scalars: list[float | int], *, evaluation: bool) -> Any:
        signature = self._signature(batch, evaluation)
        if signature not in self._programs:
            self.prepare(batch, evaluation=evaluation)
        executors, aux = self._programs[signature]
        executor = executors[kind]
        with self._paging_state():
            self._kept().prepare(executor.program)
        tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
        try:
            self.report = executor.run(tensors, scalars)
            self._kept().stepped(executor.program)
        except (PortError, RuntimeError, MemoryError, KeyboardInterrupt) as error:
            if executor.changed:
                self._left_half_way = True
                error.add_note(_HALF_WAY)
            raise
        if aux is None:
            return (self.report.loss, self.report.aux) if self.report.aux else self.report.loss
        return self.report.loss, _filled(aux, self.report.aux)

    def _settle(self) -> None:
        """Wait for what the last step left under way to flash."""
        if self._store is not None:
            with self._paging_state():
                self._store.settle()

    @contextlib.contextmanager
    def _paging_state(self) -> Iterator[None]:
        """Between steps: a transfer that fails here has lost contents of weights or optimizer state."""
        try:
            yield
        except PageError as error:
            self._left_half_way = True
            error.add_note(_HALF_WAY)
            raise

    def _check_whole(self) -> None:
        if self._left_half_way:
            raise PortError(_HALF_WAY)

    def _kind(self) -> str:
        if self.accumulate == 1:
            return "step"
        place = self._micro % self.accumulate
        return "first" if place == 0 else "last" if place == self.accumulate - 1 else "next"

    def _training_mode(self) -> tuple[bool, ...]:
        return tuple(m.training for m in self.model.modules())

    def _signature(self, batch: tuple[Any, ...], evaluation: bool) -> str:
        return f"{'eval' if evaluation else 'train'} {BatchSpec.of(batch)}"

    def _signature_of_rows(self, batch: tuple[Any, ...], rows: int, evaluation: bool) -> str:
        resized = pytree.tree_map(
            lambda t: t.new_empty((rows, *t.shape[1:])) if isinstance(t, torch.Tensor) and t.dim() else t, batch
        )
        return self._signature(resized, evaluation)

    def _updates_so_far(self) -> int:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                step = self.optimizer.state.get(parameter, {}).get("step")
                if step is not None:
                    return int(step)
        return 0

    @property
    def peak_bytes(self) -> int:
        """Highest resident memory of this process since `reset_peak_bytes`, or since it started."""
        return peak_resident_bytes()

    def reset_peak_bytes(self) -> None:
        reset_peak()

    # -- results

    def save(self, path: str | Path) -> None:
        """Write the model's state as safetensors, reading from flash piece by piece what lives there.

        Names are those of `model.state_dict()`, tied tensors once: read it with `safetensors.torch.load_model`.
        """
        self._settle()
        self._check_whole()
        target = Path(path)
        temporary = target.with_name(target.name + ".new")
        kept, state = self._kept(), self.model.state_dict(keep_vars=True)
        keys = {k.partition("/")[2]: k for k in self._own}
        tensors = kept.chunks([k for n, k in keys.items() if n in state and k in kept.store.sizes])
        tensors |= {
            n: tensor_chunks(self._own[k].detach().contiguous())
            for n, k in keys.items()
            if n in state and n not in tensors
        }
        with open(temporary, "wb") as stream:
            for piece in encode(tensors, {"format": "pt"}):
                stream.write(piece)
        publish(temporary, target)

    def close(self, *, restore: bool) -> None:
        """Bring paged tensors back into model and optimizer, and remove the page files."""
        try:
            if restore and self._persistents is not None:
                self._settle()
                self._bring_back(self._persistents)
        finally:
            self._programs.clear()
            self.pager.close()
            for scratch in self._scratch:
                scratch.close()
            if self._store is not None:
                self._store.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _bring_back(self, persistents: Persistents) -> None:
        for key in sorted(self._layouts):
            if key in self._own:
                own = self._own[key].detach()
                if key in self._released:
                    storage = own.untyped_storage()
                    source = persistents.resident.pop(key, None)
                    layout = self._layouts[key]
                    base = source if source is not None else persistents.store.load(key)
                    storage.resize_(persistents.store.sizes[key])
                    _bytes(own).copy_(_bytes(base)[: storage.nbytes()])
                    del base, layout
            elif key.startswith("state/") and (key in persistents.resident or key in self._released):
                parameter, _, what = key.removeprefix("state/").rpartition("/")
                owner = self._own[storage_key(Role.PARAMETER, parameter)]
                self.optimizer.state[owner][what] = persistents.tensor(key)
                persistents.resident.pop(key, None)


@contextlib.contextmanager
def _interrupt_waits() -> Iterator[None]:
    """Let the first Ctrl-C wait until the block ends, that no step is left half-way; a second one is obeyed at once."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    arrived: list[Any] = []

    def remember(number: int, frame: Any) -> None:
        if arrived:
            previous(number, frame)
        arrived.append((number, frame))

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        previous(*arrived[0])


def measure_graphs(graphs: Mapping[str, StepGraph]) -> Measured:
    """Profile graphs in a process of its own."""
    return measure(graphs, torch.get_num_threads(), lambda *_: None)


def _dynamic_bytes(bundle: Bundle, index: int) -> int:
    """Return what a bundle's plan needs at its peak besides the process itself."""
    peaks = []
    for name, graph in bundle.graphs.items():
        costs = bundle.costs[name]
        program = lower(graph, costs, bundle.plans[index][name], check_budget=False)
        peaks.append(program.peak_bytes - costs.device.base_bytes)
    return max(peaks)


def _without_tensors(capture: Capture) -> _Recorded:
    constants = {
        k: t.view(-1).view(torch.uint8).numpy().tobytes()
        for k, t in capture.tensors.items()
        if k.startswith("constant/") and isinstance(t, torch.Tensor)
    }
    fills = {k: t for k, t in capture.tensors.items() if isinstance(t, Fill)}
    return _Recorded(capture.graphs, constants, fills, capture.layouts, capture.aux)


def _materialised(source: "torch.Tensor | Fill") -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return source
    kind = dtype(source.dtype)
    count = 1
    for n in source.shape:
        count *= n
    base = block(count * kind.itemsize)
    view(base, Value(0, source.dtype, (count,), (1,), 0)).fill_(source.value)
    return base


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(structure, dict) and set(structure) == {"aux"} and isinstance(structure["aux"], int):
        return tensors[structure["aux"]]
    if isinstance(structure, dict):
        return {k: _filled(v, tensors) for k, v in structure.items()}
    if isinstance(structure, tuple | list):
        return type(structure)(_filled(v, tensors) for v in structure)
    return structure
