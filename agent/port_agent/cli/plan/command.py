"""`plan`: from a training script to a bundle, in the foreground."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from port_agent.cli.arguments import (
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
from port_agent.cli.devices_and_plots import add_deadline
from port_agent.cli.plan.facts import facts_of, fine_bound_of, print_facts, usual_day_s
from port_agent.cli.terminal import terminal
from port_agent.control import places
from port_agent.malloc import begin_again_preloaded
from port_agent.planning.machine import check_request
from port_agent.planning.pace import wanted_pace
from port_agent.planning.plan_making import STAGES, PlanReport, plan
from port_agent.planning.request import PlanRequest
from port_agent.system.torch_loading import load_torch_library
from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.costs import MediumKind

if TYPE_CHECKING:
    from port_agent.prepare.sparse import SparseJob
    from port_planner.sparse.probe import ProbeResult


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan`."""
    parser = commands.add_parser(
        "plan",
        help="capture a training script and plan it for a RAM budget",
        description="Capture the training step of a script, measure it on this machine, and write a bundle that trains "
        "within the RAM budget. The script has a function port_job() that returns model, loss, optimizer and data.",
        epilog="examples:\n"
        "  port-agent plan train.py --ram 300M -o job.port\n"
        "  port-agent plan train.py --ram 300M --sparse-update   trains fewer parameters instead of paging\n",
    )
    parser.add_argument("script", type=readable_file, help="Python file with a function port_job()")
    parser.add_argument("--ram", required=True, type=size, help="resident memory of the whole process, e.g. 300M")
    parser.add_argument(
        "-o", "--out", type=writable_file, help="bundle to write (default: the script's name with .port)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_devices(parser.add_argument_group("where it computes"))
    _add_flash(parser.add_argument_group("flash and time"))
    _add_numbers(parser.add_argument_group("what is trained and compared"))
    _add_sparse(parser.add_argument_group("training less"))
    _add_search(parser.add_argument_group("the search"))
    parser.set_defaults(run=_plan)


def _add_devices(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--gpu-ram",
        type=size,
        metavar="SIZE",
        help="memory of a device that has its own, e.g. 4G: tensors, context and libraries. If the device shares the "
        "host's memory, --ram covers all of it",
    )
    group.add_argument(
        "--recording-gpu-ram",
        type=size,
        metavar="SIZE",
        help="with --gpu-ram: device memory that planning may use while plain PyTorch runs the steps that are "
        "recorded and compared (default: as --gpu-ram). Tensors saved by autograd then go to host memory; "
        "weights, gradients and optimizer state do not",
    )
    group.add_argument(
        "--device",
        metavar="KIND",
        help="cpu, cuda or mps: device that computes the step (default: the one that holds the script's model). The "
        "bundle is for that kind of device",
    )
    group.add_argument(
        "--place",
        metavar="KIND",
        help="cuda or mps: divide the step's operators between the CPU and this device, each where it was measured "
        "to be faster, transfers between them included. Or teams of CPU threads, such as cpu:1,cpu:4 or "
        "cpu:4xA76,cpu:4xA55 (clusters as `doctor` names them): each operator on the one that takes the least "
        "energy. The bits are then those of each operator on its device, not plain PyTorch's (default: all on "
        "one device, with one number of threads)",
    )
    group.add_argument(
        "--threads",
        type=whole_number(1, 1024),
        metavar="N",
        help="threads per operator, fixed in the bundle (default: set by the script or OMP_NUM_THREADS, otherwise the "
        "fastest number of 1 to all cores; 1 with --board)",
    )
    group.add_argument(
        "--cpus",
        type=whole_number(1),
        metavar="N",
        help="plan for N cores: measure, time and dry-run on N, page thread included (default: those that the "
        "policy's [limits] allow while nobody uses the device)",
    )
    group.add_argument(
        "--board",
        metavar="NAME",
        help="plan for a board that is not here: costs measured here are scaled to it, and the bundle is marked as "
        "estimated",
    )


def _add_flash(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="directory on the flash to measure (default: the current one). Repeat it for a further medium, "
        "measured and priced as its "
        "own kind, for tensors that live within a step; weights and optimizer state stay on the first",
    )
    group.add_argument(
        "--medium",
        choices=[kind.name.lower() for kind in MediumKind],
        help="medium that pages are written to, which sets the cost of a written byte (default: that of the first "
        "--page-dir, or of --board)",
    )
    spared = group.add_mutually_exclusive_group()
    spared.add_argument("--writes-per-step", type=size, metavar="SIZE", help="write no more to flash in a step")
    spared.add_argument(
        "--flash-life",
        type=duration,
        metavar="TIME",
        help="limit writes so that the flash lasts this long even if training never stops, such as 3y",
    )
    group.add_argument(
        "--flash-read", type=size, help="plan for flash that reads no faster than this, in bytes per second"
    )
    group.add_argument(
        "--flash-write", type=size, help="plan for flash that writes no faster than this, in bytes per second"
    )
    group.add_argument(
        "--config",
        type=readable_file,
        metavar="FILE",
        help="configuration whose [energy] gives watts, prices and the card's endurance (default: "
        f"{places.SYSTEM_CONFIG} if it exists)",
    )
    add_deadline(group)


def _add_numbers(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--epochs",
        type=whole_number(1),
        help="passes over the data to be trained later. A learning-rate schedule is tabulated at least this far, as "
        "are the numbers of an optimizer that is not torch's; `train` rejects more epochs than `show` lists "
        "(default: the job's own, otherwise 1)",
    )
    group.add_argument(
        "--verify",
        type=whole_number(0),
        metavar="N",
        help="compare the first N steps with plain PyTorch's, bit for bit (default: one more than `accumulate`; 0: "
        "none)",
    )
    group.add_argument(
        "--prune",
        type=float,
        metavar="SHARE",
        help="prune: set this share of each weight matrix, the smallest magnitudes, to zero in steps over the first "
        "half of --epochs. Pruned weights and activations pack smaller. The numbers differ from plain PyTorch's "
        "(default: no pruning)",
    )
    group.add_argument(
        "--allow",
        choices=("reordered",),
        help="reordered: accept operators that add in a different order each time on the step's device, which makes "
        "numbers differ from run to run. Also accept sums over rows or samples (gradients of weights) computed in "
        "tiles, whose last digits differ. Nothing is then compared with plain PyTorch",
    )


def _add_sparse(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--sparse-update",
        action="store_true",
        help="train only the biases and weights that gain most, chosen so that the step fits the memory that holds "
        "the model (--ram, --gpu-ram; --deadline, --step-joules) without paging or recomputing: measures the "
        "gain of each layer in a short training, solves for the best set over the planner's bytes, freezes the "
        "rest and captures again",
    )
    group.add_argument(
        "--probe-steps",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="batches of each short training of --sparse-update (default 20)",
    )
    group.add_argument(
        "--step-joules",
        type=positive_number,
        metavar="JOULES",
        help="energy that a step of --sparse-update may take, in joules: including the device at rest meanwhile, "
        "estimated from the watts of the --board, or of a small board where none is given",
    )


def _add_search(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--strategy", default="milp", help="planner (default milp; greedy is the fastest)")
    group.add_argument(
        "--time-limit",
        type=duration,
        default=12.0,
        metavar="SECONDS",
        help="seconds of planning per graph (default 12)",
    )
    group.add_argument(
        "--iterations",
        type=whole_number(1),
        metavar="N",
        help="attempts of the search per graph, in place of --time-limit: with equal costs of operators, two runs have "
        "the same plan",
    )
    group.add_argument(
        "--frontier",
        action="store_true",
        help="add plans for smaller budgets to the bundle, and print them; the agent switches between them",
    )
    group.add_argument(
        "--solve-on",
        metavar="PEER",
        help="let a paired device solve for the plan, by its name or id, or `any`: sends operators, their costs and "
        "the limits, but no weights, data or code; the answer is checked here, and the plan is solved here if "
        "none arrives",
    )
    group.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        help="directory of the agent's control socket, to find paired devices",
    )
    group.add_argument(
        "--write-model",
        type=writable_file,
        metavar="FILE",
        help="write the training step's planning model in the LP format (FILE.lp), its rows and columns by name",
    )


def _plan(arguments: argparse.Namespace) -> int:
    from port_agent.cli.progress import StageBar
    from port_planner.base.process_memory import peak_with_children_bytes
    from port_planner.ir.bundle.bundle import Bundle

    request = _request(arguments)
    check_request(request)
    if sys.argv[1:2] == ["plan"]:  # this process exists only for the command
        begin_again_preloaded(arguments.ram)
        if not sys.flags.safe_path:
            del sys.path[0]  # warnings about our own calls, which do not concern the script
    load_torch_library()
    _keep_to_cores(arguments)
    with StageBar(STAGES, quiet=arguments.json) as bar:
        report = plan(request, bar.update)
    bundle = Bundle(report.bundle)
    facts = facts_of(report.bundle, bundle, 0)
    fine_bound_joules = fine_bound_of(bundle)  # before the peak is read, because it takes memory, too
    facts |= {
        "peers": report.peers,
        "measured_peak_bytes": report.measured_peak_bytes,
        "measured_device_bytes": report.measured_device_bytes,
        "planning_s": report.planning_s,
        "planning_stages": {stage: asdict(taken) for stage, taken in report.stages.items()},
        "planning_peak_bytes": peak_with_children_bytes(),
        "fine_bound_joules": fine_bound_joules,
        "step_s_by_threads": report.step_s_by_threads,
        "left_whole": report.left_whole,
        "step_s_by_device": report.step_s_by_device,
        "device_watts": None if report.device_watts is None else asdict(report.device_watts),
        "steps": report.manifest.steps_per_epoch() * report.epochs,
        "usual_day_s": None if arguments.board is not None else usual_day_s(),
    }
    if report.sparse is not None:
        facts["sparse_update"] = _sparse_facts(report.sparse)
    if arguments.json:
        print(msgspec.json.encode(facts).decode())
        return 0
    print_facts(report.bundle, facts, report.manifest)
    _print_choices(arguments, report)
    if report.sparse is not None:
        _print_sparse(report.sparse)
    return 0


def _request(arguments: argparse.Namespace) -> PlanRequest:
    """Return the planning request of the command line.

    Raises UsageError if one of several page directories is in RAM.
    """
    return PlanRequest(
        script=arguments.script, out=arguments.out or arguments.script.with_suffix(".port"), ram_bytes=arguments.ram,
        device_ram_bytes=arguments.gpu_ram, recording_device_ram_bytes=arguments.recording_gpu_ram,
        device=arguments.device, place=arguments.place, threads=arguments.threads, board=arguments.board,
        page_dirs=tuple(page_dirs(arguments.page_dirs)),
        medium=None if arguments.medium is None else MediumKind[arguments.medium.upper()],
        written_bytes_per_step=arguments.writes_per_step, flash_life_s=arguments.flash_life,
        flash_read_bytes_per_s=arguments.flash_read, flash_write_bytes_per_s=arguments.flash_write, config=arguments.config,
        deadline_at=arguments.deadline, charging=arguments.charging, epochs=arguments.epochs,
        compared_steps=arguments.verify, pruned_share=arguments.prune, reordered=arguments.allow is not None,
        sparse_update=arguments.sparse_update, probe_steps=arguments.probe_steps, step_joules=arguments.step_joules,
        strategy=arguments.strategy, time_limit_s=arguments.time_limit, iterations=arguments.iterations,
        frontier=arguments.frontier,
        solve_on=arguments.solve_on, runtime_dir=arguments.runtime_dir, write_model=arguments.write_model,
    )  # fmt: skip


def _keep_to_cores(arguments: argparse.Namespace) -> None:
    """Restrict planning to the cores that a job will have; raises UsageError, and ConfigError for the settings."""
    from port_agent.worker.thread_limit import usable_cores

    if arguments.cpus is not None:
        use_cores(arguments.cpus)
    elif arguments.board is None and arguments.threads is None:
        use_cores(places.granted_cores(arguments.config, usable_cores()))


def _print_choices(arguments: argparse.Namespace, report: PlanReport) -> None:
    """Print the bundle's plans if asked, and whether a deadline can be met."""
    from rich.table import Table

    manifest = report.manifest
    if arguments.frontier:
        table = Table(title="plans in the bundle")
        for column in ("plan", "peak", "step", "energy (estimated)", "written per step"):
            table.add_column(column, justify="right")
        for i, c in enumerate(manifest.plans):
            table.add_row(
                str(i),
                format_bytes(c.computing_peak_bytes),
                format_seconds(c.seconds),
                format_joules(c.joules),
                format_bytes(c.written_bytes),
            )
        terminal().print(table)
    wanted = wanted_pace(arguments.deadline, arguments.charging, report.epochs, manifest.steps_per_epoch())
    if wanted is not None:
        print(
            f"deadline: {format_seconds(wanted.seconds_per_step)} per step available, the plan takes "
            f"{format_seconds(manifest.plans[0].seconds)}: in time"
        )


def _sparse_facts(sparse: "SparseJob") -> dict[str, Any]:
    return {
        "trained": sorted(sparse.trained),
        "needed_bytes": sparse.needed_bytes,
        "full_bytes": sparse.full_bytes,
        "predicted_loss": sparse.predicted_loss,
        "proven": sparse.proven,
        "before": asdict(sparse.before),
        "measured": asdict(sparse.reached),
        "everything": asdict(sparse.everything),
    }


def _print_sparse(sparse: "SparseJob") -> None:
    """Print the trained part of each layer and its gain, then the sums."""
    from rich.table import Table

    table = Table(
        "layer", "trained", "gain of its weights", title="what is trained, and how much the probes lowered the loss"
    )
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
        f"{'the best that fits' if sparse.proven else 'the best found before the search ran out of time'}"
    )


def _probed(result: "ProbeResult") -> str:
    return f"{result.loss:.4f}" + ("" if result.metric is None else f" (metric {result.metric:.4f})")
