"""What `plan` and `show` report about a bundle: figures for programs, and the same in words for people."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from port_agent.cli.devices_and_plots import where_it_runs
from port_agent.cli.terminal import terminal
from port_agent.control import places
from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.device_kinds import CPU

if TYPE_CHECKING:
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.ir.bundle.manifest import Manifest, PlannedLimits
    from port_planner.ir.graph import Tile
    from port_planner.ir.program import Program

_TB = 1e12
Row = tuple[str, str]
"""A figure's name and the figure, in words."""


def facts_of(path: Path, bundle: "Bundle", index: int) -> dict[str, Any]:
    import msgpack

    from port_planner.ir.bundle.codec import pack_plan
    from port_planner.ir.lowering.lower import lower
    from port_planner.ir.plan import Action
    from port_planner.problem.decoded_weights import decoded_bytes, widened_bytes
    from port_planner.search.floor import floor_of
    from port_planner.search.solve import relative_gap

    main = bundle.manifest.main_graph
    batches = bundle.manifest.batches_of(main)
    graph, plan = bundle.graphs[main], bundle.plans[index][main]
    program = lower(graph, bundle.costs[main], plan)
    keep_all = lower(graph, bundle.costs[main], type(plan)(), check_budget=False)
    media = bundle.costs[main].device.targets
    lasting = [
        {
            "medium": medium.name,
            "endurance_bytes": medium.endurance_bytes,
            "written_bytes": written,
            "packs_pages": medium.packs_pages,
            "lasts_steps": batches * medium.endurance_bytes / written if medium.endurance_bytes and written else None,
        }
        for medium, written in zip(media, program.written_to, strict=True)
    ]
    floor = floor_of(graph, bundle.costs[main])
    first = min(lasting, key=lambda one: one["lasts_steps"] or math.inf)
    count = {a: len({d.storage for d in plan.decisions if d.action is a}) for a in Action}
    choice, device = bundle.manifest.plans[index], bundle.costs[main].device
    planned_peak, base_bytes = program.peak_bytes, device.base_bytes
    if device.host is not None:
        planned_peak, base_bytes = choice.peak_bytes, device.host_base_bytes
    return {
        "device": bundle.manifest.device_kind, "device_budget_bytes": choice.device_ram_bytes,
        "device_peak_bytes": choice.device_peak_bytes, "device_base_bytes": device.base_bytes if device.host else 0,
        "host_page_bytes": program.host_bytes, "shares_pages": device.shares_pages,
        "bundle": str(path), "batches": batches, "threads": bundle.manifest.threads, "operators": len(graph.ops), "storages": len(graph.storages),
        "budget_bytes": choice.ram_bytes, "planned_peak_bytes": planned_peak,
        "peak_without_planning_bytes": keep_all.peak_bytes, "base_bytes": base_bytes,
        "in_pieces": [_tile_text(tile) for tile in graph.tiles],
        "reordered_pieces": sum(tile.reordered for tile in graph.tiles),
        "floor_bytes": floor.nbytes, "floor": str(floor),
        "packed": count[Action.PACK], "packing_seconds": program.packing_seconds,
        "packed_and_paged": count[Action.PACK_PAGE],
        "packings": _packing_facts(program, [medium.name for medium in media]),
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
        "known_updates": bundle.manifest.known_updates, "plain": asdict(bundle.manifest.plain), "pruning": None if bundle.manifest.pruning is None else asdict(bundle.manifest.pruning),
        "placed": _placed(bundle),
        "weight_files": _weight_files(bundle.manifest), "buckets": _buckets(bundle), "decoded_weights": decoded_bytes(graph), "widened_weights": widened_bytes(graph),
    }  # fmt: skip


def _tile_text(tile: "Tile") -> str:
    """Return which operators run in how many tiles, and whether the bits are those of the whole."""
    return f"{tile.what} in {tile.count} tiles" + (", summed in another order" if tile.reordered else "")


def _placed(bundle: "Bundle") -> dict[str, Any] | None:
    """Return how the operators of a step are divided between two devices or teams of threads; None if all run on one.

    The figures are the number of operators on each, the alternating runs, and the transfers.
    """
    from port_planner.ir.devices.cpu_teams import CpuTeam
    from port_planner.ir.devices.transfers import transfer_of

    if not bundle.manifest.placed and not bundle.manifest.teams:
        return None
    graph = bundle.graphs[bundle.manifest.main_graph]
    if bundle.manifest.teams:
        teams = [team.text for team in (CpuTeam(bundle.manifest.threads), *bundle.manifest.teams)]
        where = [teams[op.team] for op in graph.ops]
        return {
            "operators": {team: where.count(team) for team in teams},
            "runs": [(team, len([*together])) for team, together in itertools.groupby(where)],
            "transfers": 0,
            "transferred_bytes": 0,
            "teams": True,
        }
    moved = {i: found for i, op in enumerate(graph.ops) if (found := transfer_of(graph, op)) is not None}
    kinds = [where_it_runs(graph, i) for i in range(len(graph.ops)) if i not in moved]
    return {
        "operators": {kind: kinds.count(kind) for kind in bundle.manifest.placed},
        "runs": [(kind, len([*together])) for kind, together in itertools.groupby(kinds)],
        "transfers": len(moved),
        "transferred_bytes": sum(graph.storages[t.target].nbytes for t in moved.values()),
        "teams": False,
    }


def _buckets(bundle: "Bundle") -> list[str]:
    """Return, for each bucket, the number of its samples, their shapes, and the size of a batch."""
    from port_planner.ir.bundle.manifest import train_part

    found = []
    for number, size in enumerate(bundle.manifest.sizes):
        members = [bundle.data[f"{train_part(number)}/{i}"] for i in range(len(bundle.manifest.batch))]
        rows = ", ".join(f"{member.dtype} {[*member.shape[1:]]}" for member in members)
        found.append(f"{size.samples} samples of {rows}, {size.batch_size} to a batch")
    return found


def _weight_files(manifest: "Manifest") -> dict[str, int]:
    """Return the files in which frozen weights stay, and the bytes in each."""
    found = Counter[str]()
    for part in manifest.files.values():
        found[part.path] += part.nbytes
    return dict(found)


def _packing_facts(program: "Program", media: Sequence[str]) -> list[dict[str, Any]]:
    from port_planner.ir.program import Code

    graph = program.graph
    away = {i.index: media[i.target] for i in program.instructions if i.code is Code.WRITE_PACKED}
    return [
        {
            "tensor": graph.label(cost.storage),
            "bytes": graph.storages[cost.storage].nbytes,
            "density": cost.density,
            "codec": cost.codec.value,
            "packed_bytes": cost.reserved_bytes,
            "seconds": cost.seconds,
            "medium": away.get(entry),
        }
        for entry, cost in enumerate(program.packings)
    ]


def print_packings(facts: dict[str, Any]) -> None:
    """Print the packed tensors, the largest first; print nothing if there are none."""
    from rich.table import Table

    if not facts["packings"]:
        return
    table = Table(title="packed while idle, as measured on the batches of the dry run")
    for heading in ("tensor", "size", "density", "codec", "packed", "seconds", "waits in"):
        table.add_column(heading, justify="left" if heading in ("tensor", "codec", "waits in") else "right")
    for one in sorted(facts["packings"], key=lambda one: -one["bytes"]):
        table.add_row(
            one["tensor"],
            format_bytes(one["bytes"]),
            f"{one['density']:.2f}" if one["codec"] == "bitmap" else "",
            one["codec"],
            format_bytes(one["packed_bytes"]),
            format_seconds(one["seconds"]),
            one["medium"] or "RAM",
        )
    terminal().print(table)


def print_facts(path: Path, facts: dict[str, Any], manifest: "Manifest") -> None:
    """Print a bundle's figures: memory, one step, flash, the whole training, and what was recorded and compared."""
    from rich.table import Table

    board = f", {manifest.device}" if manifest.estimated else ""
    table = Table(title=f"{path}  ({manifest.name}, {facts['operators']} operators{board})", show_header=False)
    sections = (_memory_rows(facts), _step_rows(facts), _flash_rows(facts), _training_rows(facts, manifest))
    for name, value in itertools.chain(*sections, _proof_rows(facts, manifest)):
        table.add_row(name, value)
    terminal().print(table)


def _memory_rows(facts: dict[str, Any]) -> Iterator[Row]:
    if facts["device"] != CPU:
        yield "computes on", f"{facts['device']}, {_memory_of(facts)}"
    if (placed := facts["placed"]) is not None:
        yield "placed", _placement_text(facts, placed)
    yield "budget", _both(facts, "budget_bytes", "device_budget_bytes")
    peak, base = format_bytes(facts["planned_peak_bytes"]), format_bytes(facts["base_bytes"])
    pages = f", {format_bytes(facts['host_page_bytes'])} pages of the device" if facts["device_budget_bytes"] else ""
    yield "planned peak", f"{peak} resident, {base} of it the process itself{pages}"
    if facts["device_budget_bytes"]:
        peak, base = format_bytes(facts["device_peak_bytes"]), format_bytes(facts["device_base_bytes"])
        yield "", f"{peak} on the device, {base} of it context and libraries"
    if "measured_peak_bytes" in facts:
        yield "measured peak", f"{_both(facts, 'measured_peak_bytes', 'measured_device_bytes')} (by the dry run)"
    yield "without planning", format_bytes(facts["peak_without_planning_bytes"])
    yield "floor", facts["floor"]


def _step_rows(facts: dict[str, Any]) -> Iterator[Row]:
    yield (
        "decisions",
        f"{facts['paged']} tensors paged, {facts['recomputed']} recomputed, {facts['packed']} packed, "
        f"{facts['packed_and_paged']} packed and paged, {facts['intermediate']} rematerialized as intermediates, "
        f"{facts['sliced_updates']} updates in slices; plan of {facts['plan_bytes']} bytes ({facts['strategy']})",
    )
    step = "step" if facts["batches"] == 1 else f"update of {facts['batches']} batches, layer by layer"
    yield (
        f"per {step}",
        f"{format_seconds(facts['seconds'])} ({format_seconds(facts['stall_seconds'])} waiting for flash, "
        f"{format_seconds(facts['recompute_seconds'])} recomputing, {format_seconds(facts['packing_seconds'])} "
        f"packing), {format_joules(facts['joules'])} (estimated)",
    )
    if facts["device"] != CPU and "device_watts" in facts:
        yield "watts", _drawn(facts["device"], facts["device_watts"])
    yield "threads", _threads(facts)
    yield "energy overhead", _overhead(facts)


def _flash_rows(facts: dict[str, Any]) -> Iterator[Row]:
    packed = ", less packed" if facts["media"][0]["packs_pages"] else ""
    moved = f"{format_bytes(facts['written_bytes'])} written, {format_bytes(facts['read_bytes'])} read{packed}"
    yield f"flash per {'step' if facts['batches'] == 1 else 'update'}", moved
    if len(facts["media"]) > 1:
        shares = (f"{format_bytes(one['written_bytes'])} to the {one['medium']}" for one in facts["media"])
        yield "written to", ", ".join(shares)
    if (steps := facts["flash_lasts_steps"]) is not None:
        trained_s = steps / facts["batches"] * facts["seconds"]
        yield (
            "flash life",
            f"this {facts['medium']}, assumed to endure {facts['endurance_bytes'] / _TB:,.3g} TB, lasts {steps:,.2g} "
            f"steps: {format_seconds(trained_s)} of training",
        )


def _training_rows(facts: dict[str, Any], manifest: "Manifest") -> Iterator[Row]:
    if pruning := manifest.pruning:
        share = f"{pruning.sparsity:.0%} of each weight matrix set to zero by update {pruning.end}"
        yield "pruning", f"{share}; the numbers differ from plain PyTorch's"
    if limits := _kept_limits(manifest.limits):
        yield "limits", limits
    if "steps" in facts:
        yield "the training", _training(facts)
    if (known := facts["known_updates"]) is not None:
        epochs = known * manifest.accumulate / max(manifest.steps_per_epoch(), 1)
        yield (
            "schedule",
            f"known for {known:,} updates, {epochs:,.4g} epochs; training beyond them is rejected (plan --epochs)",
        )
    if (plateau := manifest.plateau) is not None:
        after = f"after {plateau.patience:,} epochs whose mean loss is no better (ReduceLROnPlateau)"
        yield "learning rates", f"times {plateau.factor:g} {after}"
    for file, nbytes in facts["weight_files"].items():
        yield "left in its file", f"{format_bytes(nbytes)} of frozen weights: {file} must not change"
    for what in facts["buckets"] if len(facts["buckets"]) > 1 else ():
        yield "bucket", what
    if decoded := facts["decoded_weights"]:
        whole, stored = (format_bytes(sum(sizes)) for sizes in zip(*decoded.values(), strict=True))
        yield "quantized", f"{len(decoded)} frozen weights, {whole}, kept as {stored} of codes and scales"
    if widened := facts["widened_weights"]:
        whole, stored = (format_bytes(sum(sizes)) for sizes in zip(*widened.values(), strict=True))
        yield (
            "in 16 bits",
            f"{len(widened)} frozen weights, {whole}, kept as {stored}: their numbers are numbers of 16 bits",
        )


def _proof_rows(facts: dict[str, Any], manifest: "Manifest") -> Iterator[Row]:
    yield "recorded", _recorded(manifest)
    yield "compared", _compared(facts, manifest)
    yield "refereed", _refereed(manifest)
    for what, count in Counter(facts["in_pieces"]).items():
        yield "in tiles", f"{count} x {what}" if count > 1 else what
    for reason in dict.fromkeys(facts.get("left_whole", ())):
        yield "left whole", reason
    for what in facts.get("peers", ()):
        yield "paired devices", what
    if "planning_s" in facts:
        yield "made in", _made_in(facts)


def _drawn(kind: str, watts: dict[str, Any] | None) -> str:
    """Return the assumed watts of operators on a device, and their source."""
    if watts is None:
        return f"no meter here measures {kind}: the CPU's power is assumed for it"
    return f"{kind} draws {watts['dense']:.3g} W computing, {watts['moving']:.3g} W moving data, {watts['source']}"


_MAX_RUNS = 12
"""Largest number of runs of a division that are listed one by one; of more, only their number is given."""


def _placement_text(facts: dict[str, Any], placed: dict[str, Any]) -> str:
    """Return which operators run where, what moves between them, and which results have equal bits."""
    word = "with" if placed["teams"] else "on"
    text = " and ".join(f"{count} operators {word} {kind}" for kind, count in placed["operators"].items())
    if not placed["teams"]:
        text += f", {placed['transfers']} transfers of {format_bytes(placed['transferred_bytes'])} a step"
    if len(placed["runs"]) <= _MAX_RUNS:
        text += ": " + ", ".join(f"{count} {kind}" for kind, count in placed["runs"])
    if alone := facts.get("step_s_by_device"):
        taken = " and ".join(f"{format_seconds(seconds)} {word} {kind} alone" for kind, seconds in alone.items())
        text += f"; a step's operators take {taken}"
    text += ". No operator runs in tiles: tiles are compared with the whole on a single device only"
    if placed["teams"]:
        return f"{text}. The bits are those of each operator with its threads; plain PyTorch gives them with no number of threads"
    return f"{text}. The bits are those of each operator on its device; plain PyTorch gives them on neither"


def _memory_of(facts: dict[str, Any]) -> str:
    if facts["device_budget_bytes"]:
        return "which has memory of its own"
    way = "used in place" if facts["shares_pages"] else "copied on the way"
    return f"which shares the host's memory; pages are {way}, which was measured to be faster"


def _both(facts: dict[str, Any], host: str, device: str) -> str:
    """Return a figure of the host's memory, and of the device's if it has its own."""
    beside = f", {format_bytes(facts[device])} on the device" if facts["device_budget_bytes"] else ""
    return f"{format_bytes(facts[host])}{beside}"


def _made_in(facts: dict[str, Any]) -> str:
    """Return how long planning took, by stages, and the peak memory of its largest process."""
    stages = ", ".join(
        f"{stage} {format_seconds(taken['wall_s'])}" for stage, taken in facts["planning_stages"].items()
    )
    peak = format_bytes(facts["planning_peak_bytes"])
    return f"{format_seconds(facts['planning_s'])} ({stages}); its largest process took {peak}"


def usual_day_s() -> float | None:
    """Return how long an average day trains on this device, if a running agent has learned it."""
    from port_agent.control.client import ControlError

    try:
        usual: float | None = places.connect(None).get("/v1/status").get("usual_day_s")
    except ControlError:
        return None
    return usual


def _training(facts: dict[str, Any]) -> str:
    """Return the totals of all steps: time, flash writes, and nights of this device."""
    runs = facts["steps"] / facts["batches"]
    whole_s = runs * facts["seconds"]
    text = f"{facts['steps']:,} steps (--epochs), {format_seconds(whole_s)}, {format_joules(runs * facts['joules'])}"
    if facts["written_bytes"]:
        text += f", {runs * facts['written_bytes'] / _TB:.3g} TB written"
    if facts["usual_day_s"]:
        text += f"; at the usual {format_seconds(facts['usual_day_s'])} a day on this device, {math.ceil(whole_s / facts['usual_day_s'])} nights"
    return text


def _kept_limits(limits: "PlannedLimits") -> str:
    """Return the limits that the plans had to keep."""
    kept = []
    if limits.deadline_at is not None:
        hours = "" if limits.charging is None else f", training {limits.charging[0]} to {limits.charging[1]}"
        step = "" if limits.step_s is None else f": {format_seconds(limits.step_s)} a step"
        kept.append(f"done by {datetime.fromtimestamp(limits.deadline_at):%Y-%m-%d %H:%M}{hours}{step}")
    if limits.written_bytes is not None:
        kept.append(f"{format_bytes(limits.written_bytes)} written per step")
    return "; ".join(kept)


def _threads(facts: dict[str, Any]) -> str:
    """Return the number of threads of an operator, and the step times with other numbers."""
    tried = facts.get("step_s_by_threads", {})
    others = ", ".join(f"{format_seconds(seconds)} with {count}" for count, seconds in tried.items())
    return f"{facts['threads']}" + (f", the fastest: a step's operators take {others}" if len(tried) > 1 else "")


def _recorded(manifest: "Manifest") -> str:
    """Return how often the step was recorded, what was varied, and what proved constant."""
    recordings = manifest.recordings
    if recordings.count < 2:
        return "once; changes from step to step were not looked for: plan it again"
    constants = ", ".join(recordings.constants) or "nothing"
    return (
        f"{recordings.count} times, varying {', '.join(recordings.varied)}: the same operators, numbers and shapes; "
        f"constant besides: {constants}"
    )


def _compared(facts: dict[str, Any], manifest: "Manifest") -> str:
    """Return which results the dry run compared with plain PyTorch."""
    reference = manifest.reference
    if manifest.reordered:
        which = ", ".join(manifest.reordered)
        text = f"with nothing: on {manifest.device_kind} {which} may add in a different order each time (--allow reordered)"
        if count := facts["reordered_pieces"]:
            chains = (
                "1 chain of operators sums over its" if count == 1 else f"{count} chains of operators sum over their"
            )
            text += f"; {chains} tiles, so last digits differ from plain PyTorch's"
        return text
    if not reference.losses:
        return "with nothing; `plan` without --verify 0 compares with plain PyTorch"
    whose = "its operators run one at a time" if reference.placed else "plain PyTorch's"
    return (
        f"{len(reference.losses)} steps with {whose} on {reference.processor}: losses and "
        f"{len(reference.checksums)} tensors equal to the bit"
    )


def _refereed(manifest: "Manifest") -> str:
    """Return the number of updates for which the bundle ran alongside its script, or why it did not."""
    plain = manifest.plain
    if plain.unchecked:
        return f"not compared with its script: {plain.unchecked}"
    last = plain.updates + plain.unchanged
    later = "; later ones are not checked" if manifest.known_updates is None else ""
    further = f"; updates {plain.updates + 1} to {last} run the same operators" if plain.unchanged else ""
    return (
        f"compared for {plain.updates} updates with the script itself, run alone, over {sum(plain.rows)} "
        f"samples: {len(plain.results.losses)} losses, {len(plain.results.checksums)} tensors, the random "
        f"numbers and the result equal to the bit{further}{later}"
    )


def fine_bound_of(bundle: "Bundle") -> float | None:
    """Return a bound in joules on the main plan's overhead that holds without coarsening; None if
    computing it took too long.
    """
    from port_planner.search.plan_problem import MAX_SEARCHED
    from port_planner.search.plan_step import fine_bound

    main = bundle.manifest.main_graph
    if len(bundle.graphs[main].ops) > MAX_SEARCHED:
        return None
    budget = bundle.plans[0][main].ram_bytes
    return fine_bound(bundle.graphs[main], bundle.costs[main], ram_bytes=budget, time_limit_s=2.5)


def _overhead(facts: dict[str, Any]) -> str:
    """Return the plan's cost beyond keeping everything, and the part of it that no plan can avoid.

    Joules are shown separately from the price of wear.
    """
    wear = facts["wear_joules"]
    text = f"{format_joules(facts['overhead_joules'] - wear)} per step beyond keeping everything"
    if wear:
        text += f", and {format_joules(wear)} charged for the wear of written bytes"
    if facts["bound_joules"] is None:
        text += "; no bound proven for these stages"
    else:
        least = format_joules(facts["bound_joules"]) + (", wear included" if wear else "")
        text += f"; no plan of these stages needs less than {least} (gap {facts['gap']:.0%})"
    if facts.get("fine_bound_joules") is not None:
        text += f", no plan of single operators less than {format_joules(facts['fine_bound_joules'])}"
    return text
