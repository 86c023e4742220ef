"""Check our promises on the GPU of this machine: `make check-gpu`, or `python -m benchmarks.gpu`.

Prints context and library bytes; which processes see a gigabyte of device memory; whether eager twice, a program, and a
program with pages under way are equal to the bit; planned against real peaks; the speed of each way between device,
host and files; how much of a copy hides behind compute; what a launch costs; and which methods train inside a capped
device memory (`benchmarks.gpu_jobs`: plain PyTorch, `save_on_cpu`, checkpointing, torch.compile's memory budget, a
planned step). It says which of these ran. On a machine without a GPU it says so and exits with 0.
"""

import argparse
import contextlib
import gc
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device_steps import DeviceRun, Job, captured, on_device, plain_steps, planned_steps
from benchmarks.gpu_jobs import METHODS, gpu_jobs
from port_agent.backend.base import Backend
from port_agent.backend.cuda import CudaBackend
from port_agent.backend.staging import Staging
from port_agent.paging.pager import BURST, PageFile, Pager, Slot
from port_agent.prepare.page_routes import PageRoutes, measured_page_routes
from port_agent.prepare.repeatable import OperatorDigests
from port_agent.training.comparison import tensor_checksum
from port_agent.training.step_values import StepValues
from port_planner.base.errors import PortError
from port_planner.base.process_memory import resident_bytes
from port_planner.base.units import format_bytes
from port_planner.capture.step import Capture
from port_planner.ir.costs import CostTable, DeviceCosts, Flash
from port_planner.ir.graph import Phase
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.torch_device import repeat_kernels
from port_planner.profiling.operator_profile import profile_operators
from port_planner.search.plan_step import plan_step

STEPS = 3
SAMPLE_BYTES = 256 << 20
GIB = 1 << 30
CAPS = (1.0, 0.8, 0.6, 0.45)
"""Shares of what plain PyTorch takes that the device's memory is capped to: of what its allocator took for all tensors,
gaps between them included, which a cap counts.
"""
PLAN_SECONDS = 60.0
LAUNCHES = 2000


def main(arguments: list[str]) -> int:
    """Print what is measured here; return 0 even if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="small models: minutes instead of an hour")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin nothing more after this time (make check-gpu: 60)"
    )
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    console = Console(width=118, highlight=False)
    if not torch.cuda.is_available():
        console.print(f"no GPU: torch {torch.__version__} finds no CUDA device here; nothing was measured")
        return 0
    if args.child:
        CHILDREN[args.child]()
        return 0
    device = torch.cuda.get_device_properties(0)
    shared = ", shares the host's memory" if device.is_integrated else ""
    console.print(f"{device.name}, {format_bytes(device.total_memory)}{shared}; torch {torch.__version__}")
    began, ran, left = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name, measure in _parts(Path(folder), console, small=args.small):
            if time.monotonic() - began > args.seconds:
                left.append(name)
                continue
            gc.collect()
            with contextlib.suppress(torch.OutOfMemoryError):
                measure()
            ran += 1
    console.print(f"{ran} parts ran in {time.monotonic() - began:.0f} s; not run: {', '.join(left) or 'none'}")
    return 0


def _parts(folder: Path, console: Console, *, small: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each part, and what measures it and prints what it found."""
    for child in CHILDREN:
        yield child, partial(_by_child, child, console)
    backend = CudaBackend()
    links: dict[str, tuple[float, float]] = {}
    yield "speeds", lambda: links.update(speeds(backend, folder, console))
    yield "pages in shared memory", partial(page_ways, backend, folder, console)
    yield "overlap", partial(overlap, backend, console)
    yield "launches", partial(launches, backend, console)
    for job in gpu_jobs(small=small):
        yield job.name, partial(check_job, job, backend, links, folder, console)


def _by_child(child: str, console: Console) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--child", child]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    console.print((done.stdout or done.stderr[-800:]).rstrip())


# -- memory: in processes of their own


def used_on_device() -> int | None:
    """Return the bytes in use on the first device by the driver's count; None if nvidia-smi does not report them."""
    with contextlib.suppress(OSError, ValueError, subprocess.CalledProcessError):
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) << 20
    return None


def _context() -> None:
    """Print what a context takes, and what cuBLAS and cuDNN add to it."""
    before = used_on_device()
    torch.cuda.init()
    torch.cuda.synchronize()
    context = used_on_device()
    x = torch.randn(8, 3, 32, 32, device="cuda", requires_grad=True)
    torch.nn.functional.conv2d(x, torch.randn(8, 3, 3, 3, device="cuda")).sum().backward()
    (torch.randn(256, 256, device="cuda") @ torch.randn(256, 256, device="cuda")).sum().item()
    libraries = used_on_device()
    if before is None or context is None or libraries is None:
        sys.stdout.write("context and libraries: not known, nvidia-smi does not tell\n")
        return
    held = torch.cuda.memory_reserved()
    sys.stdout.write(
        f"context {format_bytes(context - before)}, libraries and workspaces "
        f"{format_bytes(libraries - context - held)} more\n"
    )


def _visible() -> None:
    """Print which processes see a gigabyte of device memory."""
    torch.cuda.init()
    sources: dict[str, Callable[[], int | None]] = {
        "RSS": resident_bytes,
        "cgroup": _cgroup_bytes,
        "driver": used_on_device,
    }
    before = {name: read() for name, read in sources.items()}
    kept = torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    said = []
    for name, read in sources.items():
        first, now = before[name], read()
        said.append(f"{name} {'not known' if first is None or now is None else format_bytes(max(0, now - first))}")
    del kept
    torch.cuda.empty_cache()
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + (256 << 20), resource.RLIM_INFINITY))
    try:
        torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(1)
        said.append("RLIMIT_DATA allows it")
    except (torch.OutOfMemoryError, RuntimeError):
        said.append("RLIMIT_DATA refuses it")
    sys.stdout.write(f"1 GiB on the device is seen by: {', '.join(said)}\n")


def _cgroup_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        place = Path("/proc/self/cgroup").read_text().splitlines()[-1].split("::")[1]
        return int(Path(f"/sys/fs/cgroup{place}/memory.current").read_text())
    return None


CHILDREN: dict[str, Callable[[], None]] = {"context": _context, "visible": _visible}


# -- speeds


def _rate(backend: Backend, move: Callable[[], None], nbytes: int) -> float:
    move()
    backend.synchronize()
    begin = time.perf_counter()
    move()
    backend.synchronize()
    return nbytes / (time.perf_counter() - begin)


def speeds(
    backend: Backend, folder: Path, console: Console, nbytes: int = SAMPLE_BYTES
) -> dict[str, tuple[float, float]]:
    """Print and return bytes per second out of and into the device, by way."""
    there, pageable = backend.allocate(nbytes), torch.empty(nbytes, dtype=torch.uint8)
    pinned = backend.allocate_host(nbytes)[:nbytes]
    found = {}
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        out = _rate(backend, partial(_copy, backend, host, there), nbytes)
        into = _rate(backend, partial(_copy, backend, there, host), nbytes)
        found[name] = out, into
    pager, file = Pager(staging=Staging(backend, BURST)), PageFile(folder / "speed.pages")
    file.reserve(nbytes)
    slot = Slot(file, 0, nbytes)
    try:
        out = _rate(backend, lambda: pager.send(slot, there).join(), nbytes)
        into = _rate(backend, lambda: pager.receive(slot, there).join(), nbytes)
        through = (
            _rate(backend, lambda: pager.send(slot, pinned).join(), nbytes),
            _rate(backend, lambda: pager.receive(slot, pinned).join(), nbytes),
        )
    finally:
        pager.close()
        file.close()
    found["file, O_DIRECT" if file.direct else "file, buffered"] = out, into
    found["the same, pinned memory alone"] = through
    for name, (out, into) in found.items():
        console.print(f"{name}: {out / 1e9:.2f} GB/s out, {into / 1e9:.2f} GB/s in")
    return {"host": found["pinned"], "file": (out, into)}


def page_ways(backend: Backend, folder: Path, console: Console) -> PageRoutes | None:
    """Print and return what pages take with and without copies; None, and nothing printed, for a
    device with memory of its own.
    """
    if not backend.unified:
        return None
    found = measured_page_routes(backend, folder)
    without = "not there" if found.shared_s is None else f"{1e3 * found.shared_s:.2f} ms"
    console.print(
        f"a page of {format_bytes(found.nbytes)} in shared memory: with copies {1e3 * found.copied_s:.2f} ms, without "
        f"{without}: plans have it {'moved where it lies' if found.shares else 'copied'}"
    )
    return found


def overlap(backend: Backend, console: Console, size: int = 4096, nbytes: int = SAMPLE_BYTES) -> float:
    """Print and return the share of the shorter of compute and copies that hides behind the other."""
    a = torch.ones(size, size, device=backend.kind)
    there, host = backend.allocate(nbytes), backend.allocate_host(nbytes)[:nbytes]

    def compute() -> None:
        for _ in range(16):
            torch.mm(a, a)

    def copies() -> None:
        for _ in range(4):
            backend.copy(host, there, backend.reached())

    def both() -> None:
        events = [backend.copy(host, there, backend.reached()) for _ in range(4)]
        compute()
        events[-1].synchronize()

    alone, moved, together = (_seconds(backend, work) for work in (compute, copies, both))
    hidden = max(0.0, alone + moved - together) / min(alone, moved)
    console.print(
        f"compute {alone * 1e3:.1f} ms, copies {moved * 1e3:.1f} ms, both {together * 1e3:.1f} ms: {hidden:.0%} of the "
        "shorter is hidden"
    )
    return hidden


def _seconds(backend: Backend, work: Callable[[], object]) -> float:
    work()
    backend.synchronize()
    begin = time.perf_counter()
    work()
    backend.synchronize()
    return time.perf_counter() - begin


def _copy(backend: Backend, target: torch.Tensor, source: torch.Tensor) -> None:
    backend.copy(target, source, backend.reached()).synchronize()


def launches(backend: Backend, console: Console, count: int = LAUNCHES) -> float:
    """Return the seconds that the host takes for one small operator without waiting for it."""
    x = torch.ones(8, device=backend.kind)
    seconds = _seconds(backend, lambda: [x.add_(1) for _ in range(count)]) / count
    console.print(f"a small operator: {seconds * 1e6:.1f} us")
    return seconds


# -- one job: bits, peaks, what fits


def costs_of(capture: Capture, links: dict[str, tuple[float, float]], host_bytes: int) -> CostTable:
    """Return measured costs of a captured step; watts are 1, so that a plan's joules are its seconds."""
    graph = capture.graphs["step"]
    measured = profile_operators((graph,), compute_watts=1.0)
    (file_out, file_in), (out, into) = links["file"], links["host"]
    flash = Flash("file", file_in, file_out, 1e-4, 0.0, 0.0)
    host = Flash("host memory", into, out, 1e-5, 0.0, 0.0, capacity_bytes=host_bytes)
    return CostTable(DeviceCosts(graph.device, 0, 1.0, 0.0, flash, scratch_targets=(host,)), measured.ops[0])


def first_difference(job: Job, backend: Backend) -> str:
    """Return the first operator whose result differs between two plain steps, or ""."""
    traces = [plain_trace(job, backend) for _ in range(2)]
    return next((name for (name, a), (_, b) in zip(*traces, strict=False) if a != b), "")


def plain_trace(job: Job, backend: Backend) -> list[tuple[str, str]]:
    """Return name and digest of each operator's result in a plain step, without the update."""
    w = job.make()
    model = w.model.to(backend.kind)
    torch.manual_seed(0)
    with OperatorDigests() as trace:
        result = w.loss_fn(model, *on_device(w.batch(0), backend.kind))
        (result[0] if isinstance(result, tuple) else result).backward()
    seen: list[tuple[str, str]] = trace.seen
    return seen


def first_unequal(job: Job, capture: Capture, plan: Plan, costs: CostTable, backend: Backend, folder: Path) -> str:
    """Return the first operator of the first step whose result in a plan's program differs
    from plain PyTorch's, or "".
    """
    graph = capture.graphs["step"]
    program = lower(graph, costs, plan)
    order = plan.order or tuple(range(len(graph.ops)))
    found: dict[int, str] = {}

    def note(values: StepValues, i: int) -> None:
        made = [values.value(v) for v in program.graph.ops[i].outputs if v is not None]
        found.setdefault(order[i], " ".join(map(tensor_checksum, made)))

    watchers = {i: partial(note, i=i) for i, op in enumerate(program.graph.ops) if op.phase is not Phase.UPDATE}
    planned_steps(job, capture, program, backend, folder, 1, watchers)
    expected = iter(plain_trace(job, backend))
    for i in sorted(found):
        name = graph.ops[i].name.replace("::", ".")
        digests = next((d for called, d in expected if called.removesuffix(".default") == name), None)
        if digests is not None and digests != found[i]:
            return f"{name} (operator {i})"
    return ""


def check_job(
    job: Job, backend: Backend, links: dict[str, tuple[float, float]], folder: Path, console: Console
) -> None:
    """Print whether one job's numbers are plain PyTorch's on this device, what the peaks are,
    and what fits below them.
    """
    repeat_kernels(backend.kind)  # as `plan` and `train` do, before the first step that others are compared with
    eager, again = (plain_steps(job, backend, STEPS) for _ in range(2))
    unequal = eager.difference(again)
    told = (
        f"differs: {unequal}, first in {first_difference(job, backend) or 'no operator of one step'}"
        if unequal
        else "equal"
    )
    console.print(f"\n{job.name}: eager twice {told}")
    try:
        capture = captured(job, backend.kind)
    except PortError as error:
        console.print(f"{job.name}: not captured: {error}")
        return
    gc.collect()
    graph = capture.graphs["step"]
    costs = costs_of(capture, links, host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    table = Table(
        "device memory",
        "method",
        "equal",
        "s/step",
        "peak",
        "reserved",
        "planned",
        title=f"{job.name}, {job.optimizer}, {STEPS} steps",
    )
    held = backend.allocated_bytes()
    most = max(eager.peak_bytes, eager.reserved_bytes - held)
    for share in CAPS:
        cap = int(share * most)
        with capped(backend, held + cap):
            for method in METHODS:
                run = partial(plain_steps, job, backend, STEPS, method.around, method.adapt)
                table.add_row(format_bytes(cap), method.name, *_tried(run, eager), "")
            plan = Plan() if share == 1.0 else plan_step(graph, costs, ram_bytes=cap, time_limit_s=PLAN_SECONDS).plan
            if plan is None:
                table.add_row(format_bytes(cap), "port", "no plan", "", "", "", "")
                continue
            program = lower(graph, costs, plan)
            place = folder / f"{job.name}-{share}"
            equal, *figures = _tried(partial(planned_steps, job, capture, program, backend, place, STEPS), eager)
            if equal not in ("yes", _NO_ROOM):
                equal += (
                    f", first in {first_unequal(job, capture, plan, costs, backend, place / 'again') or 'the update'}"
                )
            table.add_row(format_bytes(cap), "port", equal, *figures, format_bytes(program.peak_bytes))
    console.print(table)


@contextlib.contextmanager
def capped(backend: Backend, nbytes: int) -> Iterator[None]:
    """Limit the memory of the device's tensors to `nbytes` in the block."""
    backend.limit(nbytes)
    try:
        yield
    finally:
        backend.limit(1 << 62)


_NO_ROOM = "out of memory"


def _tried(run: Callable[[], DeviceRun], expected: DeviceRun) -> tuple[str, str, str, str]:
    """Return whether a run gave the expected numbers, its seconds, its peak and what was
    reserved; or why it did not end.
    """
    try:
        done = run()
    except torch.OutOfMemoryError:
        return _NO_ROOM, "", "", ""
    except (RuntimeError, NotImplementedError, TypeError) as error:  # torch's compiler lacks a kernel, a C compiler
        return f"not run: {str(error).strip().partition(chr(10))[0][:40]}", "", "", ""
    finally:
        gc.collect()
    peaks = format_bytes(done.peak_bytes), format_bytes(done.reserved_bytes)
    return done.difference(expected) or "yes", f"{done.seconds:.3f}", *peaks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
