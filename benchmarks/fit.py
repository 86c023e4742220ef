"""Smallest memory limit in which each method trains with the right result: `python -m benchmarks.fit MODEL...`.

`--limit MIB` tries that limit alone. `--others` measures instead what each method takes where nothing limits it, peak
and time, and next to them bundles planned for the least of these peaks and for half of it: how long planning took,
and the gap to the bound.

The limit is RLIMIT_DATA, bisected to 8 MiB or 1 %; the kernel refuses what goes beyond it. Methods: plain PyTorch
(eager), checkpoint per block, saved-tensor hooks to disk, torch.compile with activation_memory_budget 0.5 and 0.25, a
planned bundle (port), and an ordinary script, unchanged, through `port-agent exec` (follow; "follow cgroup": inside a
memory cgroup, which does not count reserved address space, as root). "Right" means: the same losses as eager to the bit
(compiled methods change the numbers; they count when they finish, and the table says so). Each method runs in a
separate process, three steps; CPU seconds are of the last two.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import memory_group
from benchmarks.models import CASES, RESNET101, case_of
from benchmarks.ours import BESIDE_RESIDENT, BESIDE_RESIDENT_LEAST, Ours, Run
from port_planner.base.process_memory import peak_resident_bytes
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.search.solve import relative_gap

STEPS = 3
RESOLUTION_MIB = 8
GOALS_MIB = {"resnet18": 235, "resnet50": 250, "bert": 270, "gpt2": 400}
"""Where the search for a bundle's smallest limit begins."""
TARGETS_MIB = {"resnet18": 380, "resnet50": 400, "bert": 700, "gpt2": 750}
"""What ours should fit in, including the 233 MiB of an imported torch; ResNet-18: 60 MiB above
that, weights and momentum.
"""
FOLLOW_TARGETS_MIB = {"resnet18": 300, "resnet50": 330, "bert": 420, "gpt2": 620}
FOLLOW_BESIDE = 64 << 20
"""What RLIMIT_DATA counts beyond an intercepted process's resident memory: 32 MiB are numpy's BLAS buffer, never
touched, 25 are mkldnn's generated code, most of it reserved only. A plain run has the same.
"""
GROUP_BESIDE = 16 << 20
"""What a memory cgroup counts beyond that: page tables, pages of files that pass through."""
OTHERS = ("eager", "checkpoint", "compile 0.5", "compile 0.25")
"""Methods that are compared without a limit, by default on `OTHERS_MODELS`."""
OTHERS_MODELS = ("gpt2", RESNET101)
SHARES = (1.0, 0.5)
"""Shares of the others' least peak, for which bundles are planned next to them."""
PLANNING_S = 20.0
"""Seconds of CPU time for the solver, each time it is asked."""
NOT_COMPARED = (
    "rockmate 2.0.0 (with HiRemate, which has no package of its own) is missing: it computes on CUDA alone, and rkgb "
    "2.0.0, which it imports, is published without its subpackages core and lowlevel"
)
METHODS = ("eager", "checkpoint", "disk hooks", "compile 0.5", "compile 0.25", "port", "follow", "follow cgroup")


@dataclass
class Row:
    """One method on one model."""

    model: str
    method: str
    limit_mib: int | None
    cpu_s_per_step: float | None
    peak_rss_mib: int | None
    equal: bool | None
    note: str = ""


@dataclass
class Unlimited:
    """What one method takes if nothing limits it; `planning_s` and `gap` belong to a bundle."""

    model: str
    method: str
    peak_rss_mib: int | None
    wall_s_per_step: float | None
    cpu_s_per_step: float | None
    equal: bool | None
    planning_s: float | None = None
    gap: float | None = None
    note: str = "does not finish"
    """Note of a row that has no figures."""


# -- one run, in a separate process: `python -m benchmarks.fit --child METHOD MODEL`


def child(method: str, model: str, steps: int, *, small: bool) -> None:
    """Train with one of torch's own methods; print losses, CPU and wall seconds (of the steps
    after the first) as JSON.
    """
    import torch

    from benchmarks.models import make_optimizer, workload
    from port_planner.ir.bundle.data_order import batch_rows

    optimizer_name, batch_size = case_of(model)
    work = workload(model, batch_size=batch_size, small=small)
    optimizer = make_optimizer(optimizer_name, work.model.parameters())
    step: Callable[..., Any] = work.loss_fn
    if method == "checkpoint":
        checkpoint_blocks(work.model)
    if method.startswith("compile"):
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = float(method.split()[1])
        compiled = torch.compile(work.model)
        step = lambda _, *batch: work.loss_fn(compiled, *batch)  # noqa: E731
    data = [torch.cat(columns) for columns in zip(*(work.batch(i) for i in range(steps)), strict=True)]
    torch.manual_seed(0)
    losses, cpu, wall = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _, rows in itertools.islice(batch_rows(0, len(data[0]), batch_size, drop_last=False), steps):
            begin, begin_wall = time.process_time(), time.perf_counter()
            with _hooks(method, folder):
                loss = step(work.model, *(column[rows] for column in data))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            cpu.append(time.process_time() - begin)
            wall.append(time.perf_counter() - begin_wall)
    peak = peak_resident_bytes() >> 20
    print(json.dumps({"losses": losses, "cpu_s": cpu[1:], "wall_s": wall[1:], "peak_mib": peak}))


def _hooks(method: str, folder: str) -> Any:
    import contextlib
    import uuid

    import torch

    if method != "disk hooks":
        return contextlib.nullcontext()

    def pack(tensor: Any) -> str:
        path = f"{folder}/{uuid.uuid4().hex}"
        torch.save(tensor, path)
        return path

    def unpack(path: str) -> Any:
        tensor = torch.load(path)
        Path(path).unlink(missing_ok=True)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def checkpoint_blocks(model: Any) -> None:
    """Wrap each repeated block (residual block, transformer layer) in torch.utils.checkpoint."""
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        name = type(module).__name__
        if name in ("_Basic", "_Bottleneck", "BertLayer", "GPT2Block", "LlamaDecoderLayer"):
            forward = module.forward
            module.forward = lambda *a, _f=forward, **k: checkpoint(_f, *a, use_reentrant=False, **k)


def run_child(
    method: str,
    model: str,
    limit_mib: int | None,
    *,
    steps: int = STEPS,
    thrifty: bool = True,
    threads: int = 1,
    small: bool = False,
) -> dict[str, Any] | None:
    """Run one of torch's methods under a limit; return None if it does not finish.

    `thrifty`: glibc returns freed memory at once, which lets every method finish in less, at some cost in time.
    """

    def limit() -> None:
        if limit_mib is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if thrifty:
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.fit", "--child", method, model, str(steps), *(["--small"] if small else [])], env=environment,
        preexec_fn=limit, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def _run_ours(ours: Ours, limit_mib: int) -> dict[str, Any] | None:
    """Plan for a limit and train under it; return None if there is no plan or the kernel refuses."""
    for beside in (BESIDE_RESIDENT_LEAST, BESIDE_RESIDENT):
        path = ours.plan((limit_mib << 20) - beside)
        run = ours.train(path, data_limit_bytes=limit_mib << 20) if path else None
        if run is not None:
            return as_result(run)
    return None


def as_result(run: Run | None) -> dict[str, Any] | None:
    """Return what a run of a bundle took, in the form of `child`."""
    if run is None:
        return None
    return {
        "losses": [e["loss"].hex() for e in run.steps],
        "cpu_s": [e["cpu_s"] for e in run.steps[1:]],
        "wall_s": [e["wall_s"] for e in run.steps[1:]],
        "peak_mib": run.peak_bytes >> 20,
    }


def run_follow(
    model: str,
    limit_mib: int | None,
    *,
    steps: int = STEPS,
    ram_mib: int | None = None,
    rates: tuple[int, int] | None = None,
    page_dir: Path | None = None,
    plans: Path | None = None,
    enter: Callable[[], None] | None = None,
    advice: Literal["no-recompute", "guard-only"] | None = None,
) -> dict[str, Any] | None:
    """Run `benchmarks.loop`, an unchanged script, through `port-agent exec`; None if it does not finish.

    `limit_mib` is enforced by the kernel, everything included; the budget is a little less, or `ram_mib`. `rates`:
    pages are read and written no faster, bytes per second. `plans`: a folder with plans of earlier runs, where new ones
    are kept, too; without it it is never reused. `enter` runs in the new process first. `advice`: an option of `exec`.
    The result holds what `--report` says, too.
    """

    def limit() -> None:
        if enter is not None:
            enter()
        if limit_mib is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    with tempfile.NamedTemporaryFile(suffix=".json") as report, tempfile.TemporaryDirectory() as fresh:
        cache = str(plans or fresh)
        ram = ram_mib << 20 if ram_mib is not None else ((limit_mib or 0) << 20) - FOLLOW_BESIDE
        throttle = ["--read-limit", str(rates[0]), "--write-limit", str(rates[1])] if rates else []
        command = ["-m", "port_agent.cli", "exec", "--ram", str(ram), "--report", report.name, *throttle]
        if advice is not None:
            command.append(f"--{advice}")
        if page_dir is not None:
            command += ["--page-dir", str(page_dir)]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command, "--", "-m", "benchmarks.loop", model, str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache},
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            return None
        result: dict[str, Any] = json.loads(lines[-1])
        return {
            **result,
            "cpu_s": result["cpu_s"][1:],
            "first_cpu_s": result["cpu_s"][0],
            "report": json.loads(Path(report.name).read_text()),
        }


def _follow_in_group(model: str, limit_mib: int) -> dict[str, Any] | None:
    """Run the unchanged script in a memory cgroup, which counts what is really used; needs root."""
    with memory_group.memory_group(limit_mib << 20) as enter:
        ram_mib = limit_mib - (GROUP_BESIDE >> 20)
        return run_follow(model, None, ram_mib=ram_mib, enter=lambda: enter(os.getpid()))


# -- bisection and table


def smallest(run: Callable[[int], dict[str, Any] | None], guess: int) -> tuple[int, dict[str, Any]] | None:
    """Return the smallest limit in MiB at which `run` succeeds, and its result there; None if there is
    none up to 1.5x `guess`.

    From `guess` in steps of a tenth to the first that differs, then by halves to 8 MiB or 1 %, whichever is more.
    """
    step = max(guess // 10, RESOLUTION_MIB)
    high, best = guess, run(guess)
    while best is None and high < guess * 1.5:
        high += step
        best = run(high)
    if best is None:
        return None
    low = high - step
    if high == guess:
        while low > 0 and (result := run(low)) is not None:
            high, best, low = low, result, low - step
    while high - low > max(RESOLUTION_MIB, high // 100):
        middle = (low + high) // 2
        result = run(middle)
        if result is None:
            low = middle
        else:
            high, best = middle, result
    return high, best


def within(
    run: Callable[[int], dict[str, Any] | None], guess: int, limit: int | None
) -> tuple[int, dict[str, Any]] | None:
    """Return `limit` and the result there, or None; without a limit, return the smallest limit and its result."""
    if limit is None:
        return smallest(run, guess)
    result = run(limit)
    return None if result is None else (limit, result)


def measure(model: str, methods: list[str], limit: int | None, folder: Path, console: Console) -> list[Row]:
    """Return one row per method, within `limit` MiB where it is given; eager without a limit gives the right losses."""
    reference = run_child("eager", model, None)
    if reference is None:
        raise SystemExit(f"plain PyTorch does not train {model} here")
    rows = []
    for method in methods:
        console.print(f"{model}: {method} ...")
        try:
            if method == "port":
                ours = Ours(model, folder, *CASES[model], steps=STEPS)
                found = within(partial(_run_ours, ours), GOALS_MIB[model], limit)
            elif method == "follow":
                found = within(lambda mib: run_follow(model, mib), FOLLOW_TARGETS_MIB[model], limit)
            elif method == "follow cgroup":
                found = within(lambda mib: _follow_in_group(model, mib), FOLLOW_TARGETS_MIB[model], limit)
            else:
                free = run_child(method, model, None)
                found = within(partial(run_child, method, model), free["peak_mib"], limit) if free else None
        except subprocess.TimeoutExpired:
            found = None
        if found is None:
            rows.append(Row(model, method, None, None, None, None, "does not finish"))
            continue
        reached, result = found
        console.print(f"{model}: {method}: {reached} MiB")
        rows.append(
            Row(
                model,
                method,
                reached,
                statistics.mean(result["cpu_s"]),
                result["peak_mib"],
                result["losses"] == reference["losses"],
            )
        )
    return rows


# -- alongside others, without a limit


def beside_others(model: str, folder: Path, console: Console, *, small: bool) -> list[Unlimited]:
    """Return one row per method of `OTHERS` and per bundle, planned for `SHARES` of the least peak among those."""
    found = {}
    for method in OTHERS:
        console.print(f"{model}: {method} ...")
        found[method] = run_child(method, model, None, thrifty=False, small=small)
    reference = found["eager"]
    if reference is None:
        raise SystemExit(f"plain PyTorch does not train {model} here")
    rows = [_unlimited(model, method, result, reference) for method, result in found.items()]
    least_mib = min(result["peak_mib"] for result in found.values() if result)
    begin = time.perf_counter()
    ours = Ours(model, folder, *case_of(model), steps=STEPS, small=small)
    console.print(f"{model}: recorded and measured in {time.perf_counter() - begin:.0f} s")
    for share in SHARES:
        ram_mib = int(share * least_mib)
        console.print(f"{model}: a bundle for {ram_mib} MiB ...")
        begin = time.perf_counter()
        path = ours.plan(ram_mib << 20, strategy="milp", time_limit_s=PLANNING_S)
        row = Unlimited(model, f"bundle, {ram_mib} MiB", None, None, None, None, note="no plan fits")
        if path is not None:
            planning_s, choice = time.perf_counter() - begin, read_manifest(path).plans[0]
            row = replace(
                _unlimited(model, row.method, as_result(ours.train(path)), reference),
                planning_s=planning_s,
                gap=relative_gap(choice.overhead_joules, choice.bound_joules),
            )
        rows.append(row)
    return rows


def _unlimited(model: str, method: str, result: dict[str, Any] | None, reference: dict[str, Any]) -> Unlimited:
    if result is None:
        return Unlimited(model, method, None, None, None, None)
    wall, cpu = (statistics.mean(result[key]) for key in ("wall_s", "cpu_s"))
    return Unlimited(model, method, result["peak_mib"], wall, cpu, result["losses"] == reference["losses"])


def show_others(rows: Sequence[Unlimited], console: Console) -> None:
    """Print the rows as one table."""
    table = Table(title=f"peak and time of {STEPS} steps without a limit, one thread", caption=NOT_COMPARED)
    for column in (
        "model",
        "method",
        "peak RSS MiB",
        "s/step",
        "CPU s/step",
        "losses equal eager's",
        "planned in s",
        "gap",
    ):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for row in rows:
        table.add_row(
            row.model,
            row.method,
            str(row.peak_rss_mib or row.note),
            _figure(row.wall_s_per_step),
            _figure(row.cpu_s_per_step),
            {True: "yes", False: "no", None: ""}[row.equal],
            _figure(row.planning_s),
            "" if row.gap is None else f"{row.gap:.0%}",
        )
    console.print(table)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated (default: all)")
    parser.add_argument("--limit", type=int, metavar="MIB", help="try this limit alone")
    parser.add_argument(
        "--others", action="store_true", help=f"peak and time without a limit (default: {', '.join(OTHERS_MODELS)})"
    )
    parser.add_argument(
        "--small", action="store_true", help="with --others: the same models in small, to try the command"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "MODEL", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        method, model, steps = arguments.child
        child(method, model, int(steps), small=arguments.small)
        return 0
    if arguments.others:
        with tempfile.TemporaryDirectory(prefix="port-fit-") as folder:
            compared = [
                row
                for model in arguments.models or OTHERS_MODELS
                for row in beside_others(model, Path(folder), Console(stderr=True), small=arguments.small)
            ]
        if arguments.json:
            print(json.dumps([asdict(r) for r in compared]))
        else:
            show_others(compared, Console(width=None if sys.stdout.isatty() else 140))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="port-fit-") as folder:
        for model in arguments.models or CASES:
            rows += measure(model, arguments.methods.split(","), arguments.limit, Path(folder), Console(stderr=True))
    if arguments.json:
        print(json.dumps([asdict(r) for r in rows]))
        return 0
    table = Table(title=f"smallest RLIMIT_DATA at which {STEPS} steps finish (bisected to {RESOLUTION_MIB} MiB or 1 %)")
    for column in ("model", "method", "limit MiB", "peak RSS MiB", "CPU s/step", "losses equal eager's"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for row in rows:
        table.add_row(
            row.model,
            row.method,
            str(row.limit_mib or row.note),
            str(row.peak_rss_mib or ""),
            f"{row.cpu_s_per_step:.2f}" if row.cpu_s_per_step else "",
            {True: "yes", False: "no", None: ""}[row.equal],
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
