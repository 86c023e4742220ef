"""`plan`, `show`, `train`: from a training script to trained weights, in the foreground."""

import argparse
import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agent.cli import places
from agent.cli.arguments import (
    UsageError,
    duration,
    page_dirs,
    positive_number,
    readable_file,
    size,
    use_cores,
    whole_number,
    writable_file,
    writable_folder,
)
from agent.cli.devices_and_plots import add_deadline, too_slow, wanted_pace
from agent.cli.terminal import draw, terminal
from agent.energy.media import FlashPrices, Medium, medium_of, medium_under
from agent.energy.sources.power_models import power_with
from planner.ir.boards import load_board
from planner.ir.costs import MediumKind
from planner.ir.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from agent.cli.progress import Spent
    from agent.energy.sources.registry import EnergyConfig
    from agent.prepare.bundle import Made
    from agent.prepare.peers import PlanningPeers
    from agent.prepare.sparse import SparseJob
    from planner.deadline import Pace
    from planner.ir.bundle.bundle import Bundle, Manifest, PlannedLimits
    from planner.ir.costs import CostTable, PackingCost
    from planner.ir.graph import StepGraph
    from planner.ir.plan import Plan
    from planner.sparse.probe import ProbeResult


_TB = 1e12


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan`, `show` and `train` to `commands`."""
    _add_plan(commands)
    _add_show(commands)
    _add_train(commands)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="capture a training script and plan it for a RAM budget",
        description="Capture the training step of a script, measure it on this machine, and write a bundle that trains "
        "within the RAM budget. The script defines port_job() returning a planner.job.TrainingJob.",
        epilog="Examples: port-agent plan train.py --ram 300M -o job.port; train fewer parameters instead of paging: "
        "port-agent plan train.py --ram 300M --sparse-update",
    )
    parser.add_argument("script", type=readable_file, help="Python file with a function port_job()")
    parser.add_argument("--ram", required=True, type=size, help="resident memory of the whole process, e.g. 300M")
    parser.add_argument(
        "-o", "--out", type=writable_file, help="bundle to write (default: the script's name with .port)"
    )
    parser.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="where flash is measured (default: here). Given again, a further medium, measured and priced as what it is, for what "
        "lives within a step; weights and optimizer state stay on the first",
    )
    parser.add_argument(
        "--threads", type=whole_number(1, 1024), metavar="N",
        help="threads per operator, fixed in the bundle (default: what the script or OMP_NUM_THREADS sets, else the fastest "
        "number of 1 to all cores; 1 with --board)",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", type=whole_number(1), metavar="N",
        help="plan for N cores: measured, timed and tried on so many, page thread included (default: those that the policy's [limits] "
        "grant while nobody uses the device)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs", type=whole_number(1), default=1, help="how far a learning-rate schedule is tabulated"
    )
    parser.add_argument(
        "--verify", type=whole_number(0), metavar="N",
        help="compare the first N steps with plain PyTorch's, bit for bit (default: one more than `accumulate`; 0: none)",
    )  # fmt: skip
    parser.add_argument(
        "--sparse-update", action="store_true",
        help="train only the biases and weights that gain most, chosen so that the step fits --ram (--deadline, --step-joules) without "
        "paging or computing anything twice: measures what each layer gains in a short training, solves for the best set over the "
        "planner's bytes, freezes the rest and captures again",
    )  # fmt: skip
    parser.add_argument(
        "--probe-steps", type=whole_number(1), default=20, metavar="N",
        help="batches that each short training of --sparse-update takes (default 20)",
    )  # fmt: skip
    parser.add_argument(
        "--step-joules", type=positive_number, metavar="J",
        help="energy that a step of --sparse-update may take, in joules: operators and the device at rest meanwhile, "
        "estimated from the watts of the --board, or of a small board where none is given",
    )  # fmt: skip
    parser.add_argument("--strategy", default="milp", help="planner (default milp; greedy is the fastest)")
    parser.add_argument(
        "--time-limit", type=duration, default=12.0, metavar="S", help="seconds of planning per graph (default 12)"
    )
    parser.add_argument(
        "--solve-on", metavar="PEER",
        help="let a paired device solve for the plan, by its name or id, or `any`: operators, their costs and the limits are sent, no "
        "weights, data or code; what comes back is checked here, and solved here where it does not",
    )  # fmt: skip
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="R",
        help="where the control socket of the agent is that knows paired devices",
    )
    parser.add_argument(
        "--frontier", action="store_true",
        help="put more plans for smaller budgets into the bundle, and print them; the agent switches between them",
    )  # fmt: skip
    add_deadline(parser)
    parser.add_argument(
        "--medium", choices=[kind.name.lower() for kind in MediumKind],
        help="what pages are written to (default: what the first --page-dir lies on, or the --board has): sets what a written byte costs",
    )  # fmt: skip
    spared = parser.add_mutually_exclusive_group()
    spared.add_argument("--writes-per-step", type=size, metavar="SIZE", help="write no more to flash in a step")
    spared.add_argument(
        "--flash-life", type=duration, metavar="TIME",
        help="write so little that the flash lasts so long if training never stops, such as 3y",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=readable_file, metavar="F",
        help=f"[energy] there says watts, prices and the card's endurance; default {places.SYSTEM_CONFIG} if it exists",
    )  # fmt: skip
    parser.add_argument(
        "--board", metavar="NAME",
        help="plan for a board that is not at hand: costs measured here are scaled to it, and the bundle says estimated",
    )  # fmt: skip
    parser.add_argument(
        "--write-model", type=writable_file, metavar="FILE",
        help="write the training step's planning model in the LP format (FILE.lp), its rows and columns by name",
    )  # fmt: skip
    parser.add_argument("--flash-read", type=size, help="plan for flash no faster than this, bytes per second")
    parser.add_argument("--flash-write", type=size, help="plan for flash no faster than this, bytes per second")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_plan)


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "show",
        help="show what a bundle keeps, recomputes and pages",
        description="Show a bundle: budget, planned peak, what is kept, recomputed and paged, and memory over the step.",
    )
    parser.add_argument("bundle", type=readable_file)
    parser.add_argument("--plan", type=whole_number(0), default=0, help="which plan of the bundle (default 0)")
    parser.add_argument("--html", type=writable_file, metavar="FILE", help="write the plot as a page of its own")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_show)


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a bundle in the foreground; run again to resume",
        description="Train a bundle. Ctrl-C finishes the step and stops; the same command goes on from there.",
        epilog="Example: port-agent train job.port --epochs 3 --out weights.safetensors",
    )
    parser.add_argument("bundle", type=readable_file)
    parser.add_argument(
        "--epochs", type=whole_number(1), help="passes over the data, counted from the beginning (default 1)"
    )
    parser.add_argument("--steps", type=whole_number(1), help="batches instead of epochs")
    parser.add_argument("--out", type=writable_file, help="where to write the trained weights (safetensors)")
    parser.add_argument(
        "--state-dir", type=writable_folder, help="checkpoints (default: beside the bundle, NAME.state)"
    )
    parser.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="where temporaries are paged (default: the state directory); again for each further medium that was planned for, in "
        "the same order",
    )
    parser.add_argument("--plan", type=whole_number(0), default=0, help="which plan of the bundle (default 0)")
    parser.add_argument("--cpus", type=whole_number(1), metavar="N", help="run on N cores (default: all)")
    parser.add_argument(
        "--verify", type=whole_number(0), default=0, metavar="N", help="compare the first N steps with plain PyTorch's"
    )
    parser.add_argument(
        "--checkpoint-every", type=whole_number(1), default=1, metavar="N",
        help="steps between checkpoints (default 1: a killed run loses only the unfinished step; more spares the flash)",
    )  # fmt: skip
    parser.add_argument(
        "--read-limit",
        type=size,
        help="throttle page-in to so many bytes per second, such as 20M, to try a slower medium",
    )
    parser.add_argument("--write-limit", type=size, help="throttle page-out, bytes per second")
    parser.add_argument("--digest", action="store_true", help="print a checksum over weights and optimizer state")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.set_defaults(run=_train)


# -- plan


def _plan(arguments: argparse.Namespace) -> int:
    from planner.ir.bundle.bundle import Bundle
    from planner.ir.process_memory import peak_with_children_bytes

    if arguments.step_joules is not None and not arguments.sparse_update:
        raise UsageError("--step-joules limits what --sparse-update trains; give both, or neither")
    if arguments.solve_on is not None and arguments.strategy == "greedy":
        raise UsageError("--solve-on: a greedy plan is made here in a moment; leave --strategy away")
    out = arguments.out or arguments.script.with_suffix(".port")
    _keep_to_cores(arguments)
    begin = time.perf_counter()
    planned = _make_bundle(arguments, out)
    planning_s = time.perf_counter() - begin
    made, sparse = planned.made, planned.sparse
    bundle = Bundle(out)
    facts = _facts(out, bundle, 0)
    facts |= {
        "peers": planned.peers,
        "measured_peak_bytes": made.measured_peak_bytes, "planning_s": planning_s,
        "planning_stages": {stage: asdict(taken) for stage, taken in planned.spent.items()},
        "planning_peak_bytes": peak_with_children_bytes(),
        "fine_bound_joules": _fine_bound(bundle), "step_s_by_threads": planned.step_s,
        "left_whole": planned.left_whole, "in_pieces": planned.in_pieces,
        "steps": made.manifest.steps_per_epoch() * arguments.epochs,
        "usual_day_s": None if arguments.board is not None else _usual_day_s(),
    }  # fmt: skip
    if sparse is not None:
        facts["sparse_update"] = _sparse_facts(sparse)
    if arguments.json:
        print(msgspec.json.encode(facts).decode())
        return 0
    _print_facts(out, facts, made.manifest)
    _print_choices(arguments, made.manifest)
    if sparse is not None:
        _print_sparse(sparse)
    return 0


def _keep_to_cores(arguments: argparse.Namespace) -> None:
    """Plan on the cores that a job will have; raises UsageError, and ConfigError of the settings."""
    from agent.worker.thread_room import usable_cores

    if arguments.cpus is not None:
        use_cores(arguments.cpus)
    elif arguments.board is None and arguments.threads is None:
        use_cores(places.granted_cores(arguments.config, usable_cores()))


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning made: the bundle, what is trained, seconds of a step's operators by the numbers of threads tried.

    `left_whole`: operators that did not give the same bits in pieces, and where that showed. `in_pieces`: those that
    run so. `spent`: what each stage took. `peers`: what paired devices did for it, and why no more.
    """

    made: "Made"
    sparse: "SparseJob | None"
    step_s: Mapping[int, float]
    left_whole: tuple[str, ...]
    in_pieces: tuple[str, ...]
    spent: "Mapping[str, Spent]"
    peers: list[str]


def _make_bundle(arguments: argparse.Namespace, out: Path) -> Planned:
    """Make the bundle within the budget that it is planned for.

    A job that cannot be followed with the same numbers takes plain PyTorch's memory.
    """
    from agent.follow.budget import NotFollowedError
    from agent.prepare.within_budget import within_budget

    page_dir = next(iter(page_dirs(arguments.page_dirs)), Path())
    try:
        with within_budget(arguments.ram, page_dir):
            return _planned(arguments, out)
    except NotFollowedError:
        return _planned(arguments, out)


def _planned(arguments: argparse.Namespace, out: Path) -> Planned:
    """Capture, measure, choose what is trained where that was asked for, and plan; show how far it is."""
    import torch

    from agent.cli.progress import StageBar
    from agent.prepare import bundle
    from agent.prepare.reference import compared_steps, with_reference
    from agent.prepare.slices import Sliced, in_halves, in_pieces
    from agent.prepare.sparse import StepLimits, train_less
    from agent.prepare.threads import fastest
    from agent.prepare.whole_updates import with_whole_update
    from planner import make_bundle
    from planner.deadline import DeadlineError
    from planner.ir.bundle.bundle import Bundle
    from planner.ir.costs import CostTable
    from planner.ir.plan import Plan
    from planner.job_sources import load_job

    energy, _ = places.energy_settings(arguments.config)
    page_dir, *scratch_dirs = page_dirs(arguments.page_dirs) or [Path()]
    medium, further = _medium(arguments, energy, page_dir), _further_media(arguments, energy, scratch_dirs)
    sparse: SparseJob | None = None
    peers = _planning_peers(arguments)
    with StageBar(("capture", "profile", "flash", "analyse", "compare", "plan", "try"), quiet=arguments.json) as bar:
        bar.update("capture", 0.0)
        before = torch.get_num_threads()
        job = load_job(arguments.script)
        counts = _thread_counts(arguments, set_by_script=torch.get_num_threads() != before)
        rows, updates = make_bundle.rows_and_updates(job, arguments.epochs)
        prepare = partial(make_bundle.prepare, job, updates=updates)
        prepared = prepare()
        bar.update("capture", 1.0)
        power_of = partial(
            power_with, static_watts=energy.static_watts, full_watts=energy.full_watts, board=energy.board
        )
        choice = fastest(prepared.graphs, counts, lambda count: power_of(count).compute_watts, bar.update, peers)
        threads, measured = choice.threads, bundle.by_class(prepared.graphs, choice.measured, power_of(choice.threads))
        torch.set_num_threads(threads)
        here = device = bundle.this_device(measured, page_dir, threads, power_of(threads), bar.update)
        if arguments.board is not None:
            measured, device = bundle.other_board(prepared.graphs, measured, here, arguments.board)
        device = bundle.slower_flash(device, arguments.flash_read, arguments.flash_write)
        device = bundle.on_medium(device, medium)
        device = bundle.with_scratch(device, further, bar.update)
        device = bundle.with_packed_pages(device, prepared.initial_tensors)
        pace = wanted_pace(arguments, rows, job.batch_size)
        if arguments.sparse_update:
            step_limits = StepLimits(None if pace is None else pace.seconds_per_step, arguments.step_joules)
            sparse = train_less(
                job, prepared, measured, device, arguments.ram, prepare=prepare, threads=threads,
                steps=arguments.probe_steps, limits=step_limits, progress=bar.update,
            )  # fmt: skip
            prepared = sparse.prepared
        bar.update("compare", 0.0)
        whole = choice.measured if sparse is None else sparse.measured
        limits = _limits(arguments, pace, CostTable(device, whole.ops[0]))
        sliced = Sliced(prepared, whole, ())
        if arguments.board is None:  # of another board's kernels nothing is known here
            sliced = in_halves(prepared, whole, threads, power_of(threads).compute_watts, bar.update)
            sliced = in_pieces(sliced, device, arguments.ram, threads, bar.update, limits)
        prepared = sliced.prepared
        measured = bundle.by_class(prepared.graphs, sliced.measured, power_of(threads))
        if arguments.board is not None:
            measured, _ = bundle.other_board(prepared.graphs, measured, here, arguments.board)
        steps = compared_steps(job) if arguments.verify is None else arguments.verify
        prepared = with_reference(prepared, steps)
        if limits.step_s is None and limits.written_bytes is None:  # those are limits of one batch
            quick = make_bundle.default_planner(strategy="greedy", time_limit_s=arguments.time_limit)
            prepared, measured = with_whole_update(prepared, measured, device, arguments.ram, quick)
        planner = make_bundle.default_planner(
            strategy=arguments.strategy, time_limit_s=arguments.time_limit, limits=limits
        )
        if peers is not None:
            planner = peers.planner(
                planner,
                partial(
                    make_bundle.plan_problem,
                    strategy=arguments.strategy,
                    time_limit_s=arguments.time_limit,
                    limits=limits,
                ),
            )
        try:
            made = bundle.make(
                out, prepared, measured, device, arguments.ram, planner=planner, page_dir=page_dir,
                scratch_dirs=tuple(scratch_dirs), threads=threads, progress=bar.update, wide=arguments.frontier,
                estimated=arguments.board is not None, limits=limits,
            )  # fmt: skip
        except make_bundle.InfeasibleError as error:
            graph, costs = next(iter(prepared.graphs.values())), CostTable(device, measured.ops[0])
            _write_model(arguments, graph, costs, Plan(ram_bytes=arguments.ram), pace)
            if pace is None or error.fastest_seconds is None:
                raise
            raise DeadlineError(too_slow(graph, costs, pace, arguments.ram, error.fastest_seconds)) from error
    if arguments.write_model is not None:
        written, main = Bundle(out), made.manifest.main_graph
        _write_model(arguments, written.graphs[main], written.costs[main], written.plans[0][main], pace)
    told = peers.told() if peers is not None else []
    return Planned(made, sparse, choice.step_s, sliced.left_whole, sliced.in_pieces, bar.spent, told)


def _planning_peers(arguments: argparse.Namespace) -> "PlanningPeers | None":
    """Return what paired devices may do here: solve where that was asked for, share where the agent's settings say so."""
    from agent.control.client import ControlError
    from agent.control.peer_exchange import PeerExchange
    from agent.prepare.peers import PlanningPeers

    client = places.connect(arguments.runtime_dir)
    try:
        shares = bool(client.get("/v1/peers").get("shares"))
    except ControlError:
        shares = False
    if not shares and arguments.solve_on is None:
        return None
    return PlanningPeers(
        PeerExchange(client, arguments.solve_on or ""), shares=shares, solves=arguments.solve_on is not None
    )


def _thread_counts(arguments: argparse.Namespace, *, set_by_script: bool) -> tuple[int, ...]:
    """Return the numbers of threads to measure: the one that somebody set, else those up to all cores.

    A board's rates are scaled from one thread's here, unless told otherwise.
    """
    import torch

    from agent.prepare.threads import tried_counts
    from agent.worker.thread_room import usable_cores

    if arguments.threads is not None:
        return (arguments.threads,)
    if set_by_script or "OMP_NUM_THREADS" in os.environ:
        return (torch.get_num_threads(),)
    return (1,) if arguments.board is not None else tried_counts(usable_cores())


def _further_media(
    arguments: argparse.Namespace, energy: "EnergyConfig", scratch_dirs: list[Path]
) -> list[tuple[Path, Medium]]:
    """Return the media of further page directories, as the kernel tells."""
    if scratch_dirs and arguments.board is not None:
        raise UsageError("--page-dir: a board that is not at hand has one medium; give one directory with --board")
    prices = FlashPrices(per_kwh=energy.price_per_kwh)  # what else the owner says is of the first
    return [(folder, medium_under(folder, prices)) for folder in scratch_dirs]


def _medium(arguments: argparse.Namespace, energy: "EnergyConfig", page_dir: Path) -> Medium:
    """Return what pages are written to: as said, else of the board, else as the kernel tells of the page directory."""
    prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
    kind = None if arguments.medium is None else MediumKind[arguments.medium.upper()]
    if kind is None and arguments.board is not None:
        kind = load_board(arguments.board).medium
    medium = medium_under(page_dir, prices) if kind is None else medium_of(kind, prices)
    if arguments.flash_life is not None and medium.endurance_bytes is None:
        raise UsageError(
            f"--flash-life: writing does not wear out a {medium.kind.value}; name the --medium of the device"
        )
    return medium


def _limits(arguments: argparse.Namespace, pace: "Pace | None", costs: "CostTable") -> "PlannedLimits":
    """Return what the plans keep to."""
    from planner.ir.bundle.bundle import PlannedLimits

    charging = None
    if arguments.charging is not None:
        begin, end = arguments.charging
        charging = (f"{begin:%H:%M}", f"{end:%H:%M}")
    return PlannedLimits(
        step_s=None if pace is None else pace.seconds_per_step, written_bytes=_write_limit(arguments, costs),
        deadline_at=arguments.deadline, charging=charging,
    )  # fmt: skip


def _write_limit(arguments: argparse.Namespace, costs: "CostTable") -> int | None:
    """Return how many bytes a step may write; a step takes at least what its operators do."""
    if arguments.flash_life is None:
        limit: int | None = arguments.writes_per_step
        return limit
    endurance = min((target.endurance_bytes for target in costs.device.targets if target.endurance_bytes), default=None)
    if endurance is None:
        return None
    return int(endurance / arguments.flash_life * sum(op.seconds for op in costs.ops))


def _write_model(
    arguments: argparse.Namespace, graph: "StepGraph", costs: "CostTable", plan: "Plan", pace: "Pace | None"
) -> None:
    """Write the planning model where that was asked for."""
    if arguments.write_model is not None:
        from planner.search.written_model import write_model

        deadline_s = None if pace is None else pace.seconds_per_step
        write_model(arguments.write_model, graph, costs, plan, deadline_s=deadline_s)


def _print_choices(arguments: argparse.Namespace, manifest: "Manifest") -> None:
    """Print the bundle's plans where asked, and whether a deadline can be met."""
    from rich.table import Table

    if arguments.frontier:
        table = Table(title="plans in the bundle")
        for column in ("plan", "peak", "step", "energy (estimated)", "written per step"):
            table.add_column(column, justify="right")
        for i, c in enumerate(manifest.plans):
            table.add_row(
                str(i), format_bytes(c.peak_bytes), format_seconds(c.seconds), format_joules(c.joules),
                format_bytes(c.written_bytes),
            )  # fmt: skip
        terminal().print(table)
    wanted = wanted_pace(arguments, manifest.samples, manifest.batch_size)
    if wanted is not None:
        print(
            f"deadline: {format_seconds(wanted.seconds_per_step)} per step are left, the plan takes "
            f"{format_seconds(manifest.plans[0].seconds)}: in time"
        )


def _sparse_facts(sparse: "SparseJob") -> dict[str, Any]:
    return {
        "trained": sorted(sparse.trained), "needed_bytes": sparse.needed_bytes, "full_bytes": sparse.full_bytes,
        "predicted_loss": sparse.predicted_loss, "proven": sparse.proven,
        "before": asdict(sparse.before), "measured": asdict(sparse.reached), "everything": asdict(sparse.everything),
    }  # fmt: skip


def _print_sparse(sparse: "SparseJob") -> None:
    """Print what is trained of each layer and what that gains, then the sums."""
    from rich.table import Table

    table = Table("layer", "trained", "gain of its weights", title="what is trained, loss lowered in the probes")
    contributions = sparse.contributions
    for i, layer in enumerate(sparse.layers):
        parts = [
            what for what, names in (("weights", layer.weights), ("bias", layer.biases)) if {*names} & sparse.trained
        ]
        gain = f"{contributions.weight_gain(i):+.4f}" if i in contributions.weight_score else ""
        table.add_row(layer.name, " and ".join(parts) or "frozen", gain)
    console = terminal()
    console.print(table)
    console.print(
        f"loss after the probe: predicted {sparse.predicted_loss:.4f}, measured {_probed(sparse.reached)}; "
        f"everything trained {_probed(sparse.everything)}; untrained {_probed(sparse.before)}"
    )
    console.print(
        f"keeping everything resident takes {format_bytes(sparse.needed_bytes)} instead of "
        f"{format_bytes(sparse.full_bytes)}; the set is "
        f"{'the best that fits' if sparse.proven else 'the best found; the search was cut short'}"
    )


def _probed(result: "ProbeResult") -> str:
    return f"{result.loss:.4f}" + ("" if result.metric is None else f" (metric {result.metric:.4f})")


def _facts(path: Path, bundle: "Bundle", index: int) -> dict[str, Any]:
    import msgpack

    from planner.ir.bundle.codec import pack_plan
    from planner.ir.lowering.lower import lower
    from planner.ir.plan import Action
    from planner.search.floor import floor_of
    from planner.search.solve import relative_gap

    main = bundle.manifest.main_graph
    batches = bundle.manifest.batches_of(main)
    graph, plan = bundle.graphs[main], bundle.plans[index][main]
    program = lower(graph, bundle.costs[main], plan)
    keep_all = lower(graph, bundle.costs[main], type(plan)(), check_budget=False)
    media = bundle.costs[main].device.targets
    lasting = [
        {
            "medium": medium.name, "endurance_bytes": medium.endurance_bytes, "written_bytes": written,
            "packs_pages": medium.packs_pages,
            "lasts_steps": batches * medium.endurance_bytes / written if medium.endurance_bytes and written else None,
        }
        for medium, written in zip(media, program.written_to, strict=True)
    ]  # fmt: skip
    floor = floor_of(graph, bundle.costs[main])
    first = min(lasting, key=lambda one: one["lasts_steps"] or math.inf)
    count = {a: len({d.storage for d in plan.decisions if d.action is a}) for a in Action}
    return {
        "bundle": str(path), "batches": batches, "threads": bundle.manifest.threads, "operators": len(graph.ops), "storages": len(graph.storages),
        "budget_bytes": bundle.manifest.plans[index].ram_bytes, "planned_peak_bytes": program.peak_bytes,
        "peak_without_planning_bytes": keep_all.peak_bytes, "base_bytes": bundle.costs[main].device.base_bytes,
        "floor_bytes": floor.nbytes, "floor": str(floor),
        "packed": count[Action.PACK], "packing_seconds": program.packing_seconds,
        "packings": [_packing_facts(graph, cost) for cost in program.packings],
        "paged": count[Action.PAGE], "recomputed": count[Action.RECOMPUTE], "intermediate": count[Action.INTERMEDIATE],
        "sliced_updates": len(plan.sliced), "read_bytes": program.read_bytes, "written_bytes": program.written_bytes,
        "medium": first["medium"], "endurance_bytes": first["endurance_bytes"], "wear_joules": program.wear_joules,
        "flash_lasts_steps": first["lasts_steps"], "media": lasting,
        "seconds": program.seconds, "stall_seconds": program.stall_seconds, "joules": program.joules,
        "recompute_seconds": program.recompute_seconds, "plan_bytes": len(msgpack.packb(pack_plan(plan))),
        "overhead_joules": plan.overhead_joules, "bound_joules": plan.bound_joules,
        "gap": relative_gap(plan.overhead_joules, plan.bound_joules), "strategy": plan.strategy,
        "recordings": asdict(bundle.manifest.recordings), "compared_steps": len(bundle.manifest.reference.losses),
        "compared_tensors": len(bundle.manifest.reference.checksums), "limits": asdict(bundle.manifest.limits),
    }  # fmt: skip


def _packing_facts(graph: "StepGraph", cost: "PackingCost") -> dict[str, Any]:
    return {
        "tensor": graph.label(cost.storage), "bytes": graph.storages[cost.storage].nbytes, "density": cost.density,
        "codec": cost.codec.value, "packed_bytes": cost.reserved_bytes, "seconds": cost.seconds,
    }  # fmt: skip


def _print_packings(facts: dict[str, Any]) -> None:
    """Print what is packed, the largest first; nothing where nothing is."""
    from rich.table import Table

    if not facts["packings"]:
        return
    table = Table(title="packed in RAM while idle, as the trial's batches were")
    for heading in ("tensor", "size", "density", "codec", "packed", "seconds"):
        table.add_column(heading, justify="left" if heading in ("tensor", "codec") else "right")
    for one in sorted(facts["packings"], key=lambda one: -one["bytes"]):
        table.add_row(
            one["tensor"], format_bytes(one["bytes"]), f"{one['density']:.2f}" if one["codec"] == "bitmap" else "",
            one["codec"], format_bytes(one["packed_bytes"]), format_seconds(one["seconds"]),
        )  # fmt: skip
    terminal().print(table)


def _print_facts(path: Path, facts: dict[str, Any], manifest: "Manifest") -> None:
    from rich.table import Table

    board = f", {manifest.device}" if manifest.estimated else ""
    table = Table(title=f"{path}  ({manifest.name}, {facts['operators']} operators{board})", show_header=False)
    table.add_row("budget", format_bytes(facts["budget_bytes"]))
    table.add_row(
        "planned peak",
        f"{format_bytes(facts['planned_peak_bytes'])} resident, {format_bytes(facts['base_bytes'])} of it the process itself",
    )
    if "measured_peak_bytes" in facts:
        table.add_row("measured peak", f"{format_bytes(facts['measured_peak_bytes'])} (by the trial)")
    table.add_row("without planning", format_bytes(facts["peak_without_planning_bytes"]))
    table.add_row("floor", facts["floor"])
    table.add_row(
        "decisions",
        f"{facts['paged']} tensors paged, {facts['recomputed']} recomputed, {facts['packed']} packed, {facts['intermediate']} rematerialized as intermediates, "
        f"{facts['sliced_updates']} updates in slices; plan of {facts['plan_bytes']} bytes ({facts['strategy']})",
    )
    step = "step" if facts["batches"] == 1 else f"update of {facts['batches']} batches, layer by layer"
    table.add_row(
        f"per {step}", f"{format_seconds(facts['seconds'])} ({format_seconds(facts['stall_seconds'])} waiting for flash, "
        f"{format_seconds(facts['recompute_seconds'])} recomputing, {format_seconds(facts['packing_seconds'])} packing), {format_joules(facts['joules'])} (estimated)"
    )  # fmt: skip
    table.add_row("threads", _threads(facts))
    table.add_row("energy overhead", _overhead(facts))
    table.add_row(
        f"flash per {step.partition(' of')[0]}",
        f"{format_bytes(facts['written_bytes'])} written, {format_bytes(facts['read_bytes'])} read"
        + (", less packed" if facts["media"][0]["packs_pages"] else ""),
    )
    if len(facts["media"]) > 1:
        shares = (f"{format_bytes(one['written_bytes'])} to the {one['medium']}" for one in facts["media"])
        table.add_row("written to", ", ".join(shares))
    if facts["flash_lasts_steps"] is not None:
        table.add_row(
            "flash life", f"this {facts['medium']}, taken to endure {facts['endurance_bytes'] / _TB:,.3g} TB, lasts "
            f"{facts['flash_lasts_steps']:,.2g} steps: {format_seconds(facts['flash_lasts_steps'] / facts['batches'] * facts['seconds'])} of training"
        )  # fmt: skip
    if limits := _kept_limits(manifest.limits):
        table.add_row("limits", limits)
    if "steps" in facts:
        table.add_row("the training", _training(facts))
    table.add_row("recorded", _recorded(manifest))
    table.add_row("compared", _compared(manifest))
    for what, count in Counter(facts.get("in_pieces", ())).items():
        table.add_row("in pieces", f"{count} x {what}" if count > 1 else what)
    for reason in dict.fromkeys(facts.get("left_whole", ())):
        table.add_row("left whole", reason)
    for what in facts.get("peers", ()):
        table.add_row("paired devices", what)
    if "planning_s" in facts:
        table.add_row("made in", _made_in(facts))
    terminal().print(table)


def _made_in(facts: dict[str, Any]) -> str:
    """Say how long planning took, by stages, and the most memory that one of its processes had."""
    stages = ", ".join(
        f"{stage} {format_seconds(taken['wall_s'])}" for stage, taken in facts["planning_stages"].items()
    )
    peak = format_bytes(facts["planning_peak_bytes"])
    return f"{format_seconds(facts['planning_s'])} ({stages}); its largest process took {peak}"


def _usual_day_s() -> float | None:
    """Return how much training an average day gives on this device, where an agent runs that has learnt it."""
    from agent.control.client import ControlError

    try:
        usual: float | None = places.connect(None).get("/v1/status").get("usual_day_s")
    except ControlError:
        return None
    return usual


def _training(facts: dict[str, Any]) -> str:
    """Say what all steps take: time, flash, and nights of this device."""
    runs = facts["steps"] / facts["batches"]
    whole_s = runs * facts["seconds"]
    text = f"{facts['steps']:,} steps (--epochs), {format_seconds(whole_s)}, {format_joules(runs * facts['joules'])}"
    if facts["written_bytes"]:
        text += f", {runs * facts['written_bytes'] / _TB:.3g} TB written"
    if facts["usual_day_s"]:
        text += f"; at {format_seconds(facts['usual_day_s'])} a day, as usual here, {math.ceil(whole_s / facts['usual_day_s'])} nights"
    return text


def _kept_limits(limits: "PlannedLimits") -> str:
    """Say what the plans were asked to keep to."""
    kept = []
    if limits.deadline_at is not None:
        hours = "" if limits.charging is None else f", training {limits.charging[0]} to {limits.charging[1]}"
        step = "" if limits.step_s is None else f": {format_seconds(limits.step_s)} a step"
        kept.append(f"done by {datetime.fromtimestamp(limits.deadline_at):%Y-%m-%d %H:%M}{hours}{step}")
    if limits.written_bytes is not None:
        kept.append(f"{format_bytes(limits.written_bytes)} written a step")
    return "; ".join(kept)


def _threads(facts: dict[str, Any]) -> str:
    """Say how many threads an operator runs with, and how long a step's operators took with others that were tried."""
    tried = facts.get("step_s_by_threads", {})
    others = ", ".join(f"{format_seconds(seconds)} with {count}" for count, seconds in tried.items())
    return f"{facts['threads']}" + (f", the fastest: a step's operators take {others}" if len(tried) > 1 else "")


def _recorded(manifest: "Manifest") -> str:
    """Say how often the step was recorded, what was varied and what was found constant."""
    recordings = manifest.recordings
    if recordings.count < 2:
        return "once; what changes from step to step was not looked for: plan it again"
    constants = ", ".join(recordings.constants) or "nothing"
    return (
        f"{recordings.count} times, varying {' and '.join(recordings.varied)}: the same operators, numbers and shapes; "
        f"constant besides: {constants}"
    )


def _compared(manifest: "Manifest") -> str:
    """Say what the trial compared with plain PyTorch."""
    reference = manifest.reference
    if not reference.losses:
        return "with nothing; `plan` without --verify 0 compares with plain PyTorch"
    return (
        f"{len(reference.losses)} steps with plain PyTorch's on {reference.processor}: losses and "
        f"{len(reference.checksums)} tensors equal to the bit"
    )


def _fine_bound(bundle: "Bundle") -> float | None:
    """Return a bound in joules on the main plan's overhead that holds without coarsening.

    None if it took too long.
    """
    from planner.make_bundle import MOST_SEARCHED
    from planner.search.plan_step import fine_bound

    main = bundle.manifest.main_graph
    if len(bundle.graphs[main].ops) > MOST_SEARCHED:
        return None
    budget = bundle.plans[0][main].ram_bytes
    return fine_bound(bundle.graphs[main], bundle.costs[main], ram_bytes=budget, time_limit_s=2.5)


def _overhead(facts: dict[str, Any]) -> str:
    """Say what the plan costs beyond keeping everything, and how much of that no plan could avoid."""
    text = f"{format_joules(facts['overhead_joules'])} per step beyond keeping everything"
    if facts["bound_joules"] is None:
        text += "; no bound proven for these stages"
    else:
        text += (
            f"; no plan of these stages needs less than {format_joules(facts['bound_joules'])} (gap {facts['gap']:.0%})"
        )
    if facts.get("fine_bound_joules") is not None:
        text += f", no plan of single operators less than {format_joules(facts['fine_bound_joules'])}"
    return text


# -- show


def _show(arguments: argparse.Namespace) -> int:
    from planner.ir.bundle.bundle import Bundle

    bundle = Bundle(arguments.bundle)
    manifest = bundle.manifest
    if not 0 <= arguments.plan < len(manifest.plans):
        raise UsageError(
            f"{arguments.bundle} has {len(manifest.plans)} plans, there is no plan {arguments.plan}; count from 0"
        )
    facts = _facts(arguments.bundle, bundle, arguments.plan)
    if arguments.json:
        print(msgspec.json.encode(facts).decode())
        return 0
    _print_facts(arguments.bundle, facts, manifest)
    _print_packings(facts)
    _plot(bundle, arguments.plan)
    _plot_frontier(manifest)
    if arguments.html:
        _draw(bundle, arguments.plan, arguments.html)
    return 0


def _draw(bundle: "Bundle", index: int, target: Path) -> None:
    """Write the page that shows tensors over time and memory under them."""
    from planner.draw import Mark, bundle_drawing, write_drawing

    marks = [Mark(i, c.peak_bytes, c.seconds, c.joules) for i, c in enumerate(bundle.manifest.plans)]
    target = target if target.suffix else target.with_suffix(".html")
    write_drawing(bundle_drawing(bundle, index), target, marks, index)
    print(f"{target}: tensors over time, memory and budget" + (", and the frontier" if len(marks) > 1 else ""))


def _plot_frontier(manifest: "Manifest") -> None:
    """Draw the bundle's plans in the terminal: joules per step over peak memory."""
    import plotext

    if len(manifest.plans) < 2:
        return
    plans = sorted(manifest.plans, key=lambda c: c.peak_bytes)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(terminal().width, 110), 14)
    figure.theme("clear")
    signal = figure.signal([c.peak_bytes / 2**20 for c in plans], [c.joules for c in plans])
    for number in range(1, len(plans)):
        signal.line(number)
    figure.draw(signal)
    figure.title(f"{len(plans)} plans (show --plan N): joules per step over peak MiB")
    text = figure.build().string()
    draw(text if terminal().is_terminal else plotext.uncolorize(text))


def _plot(bundle: "Bundle", index: int) -> None:
    """Draw resident memory over the step's time in the terminal."""
    import plotext

    from planner.ir.lowering.lower import lower

    main = bundle.manifest.main_graph
    program = lower(bundle.graphs[main], bundle.costs[main], bundle.plans[index][main])
    moments, clock = [], 0.0
    for op in bundle.costs[main].ops:
        moments.append(clock)
        clock += op.seconds
    budget = bundle.manifest.plans[index].ram_bytes / 2**20
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(terminal().width, 110), 18)
    figure.theme("clear")
    curve = figure.signal(moments, [b / 2**20 for b in program.timeline])
    line = figure.signal([moments[0], moments[-1]], [budget, budget])
    for signal, points in ((curve, len(moments)), (line, 2)):
        for number in range(1, points):
            signal.line(number)
        figure.draw(signal)
    figure.title("resident memory over the step's seconds, MiB; the straight line is the budget")
    figure.ruler("y").lim(0, max(budget, program.peak_bytes / 2**20) * 1.05)
    text = figure.build().string()
    draw(text if terminal().is_terminal else plotext.uncolorize(text))


# -- train


def _train(arguments: argparse.Namespace) -> int:
    from agent.cli.follow_job import follow
    from agent.supervisor.job.plan_choice import data_limit
    from agent.system.memory_belt import limit_data_of
    from agent.worker.options import TorchOptions
    from agent.worker.start import start_worker, torch_worker
    from planner.ir.bundle.bundle import read_manifest

    if arguments.cpus is not None:
        use_cores(arguments.cpus)
    manifest = read_manifest(arguments.bundle)
    if not 0 <= arguments.plan < len(manifest.plans):
        raise UsageError(
            f"{arguments.bundle} has {len(manifest.plans)} plans, there is no plan {arguments.plan}; count from 0"
        )
    directories = page_dirs(arguments.page_dirs)
    state_dir = arguments.state_dir or arguments.bundle.with_suffix(".state")
    options = TorchOptions(
        bundle=arguments.bundle, state_dir=state_dir, plan=arguments.plan, verify=arguments.verify,
        checkpoint_every=arguments.checkpoint_every, steps=arguments.steps, epochs=arguments.epochs, out=arguments.out,
        page_dir=next(iter(directories), None), scratch_dirs=tuple(directories[1:]), digest=arguments.digest,
        read_limit=arguments.read_limit,
        write_limit=arguments.write_limit,
    )  # fmt: skip
    command = torch_worker(options)
    peak_bytes = manifest.plans[arguments.plan].peak_bytes
    worker = start_worker(command, limit_bytes=peak_bytes, threads=manifest.threads)
    with contextlib.suppress(OSError):  # it has ended: what it says of that is followed
        limit_data_of(worker.process.pid, data_limit(peak_bytes))
    return follow(worker, manifest, arguments.plan, as_json=arguments.json)
