"""How microcontrollers are shown: tables, progress bars, and the same as JSON lines."""

import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agent.cli.terminal import terminal
from agent.mcu.board.firmware import Firmware
from agent.mcu.protocol.device import Device
from agent.mcu.protocol.messages import DeviceInfo, DevicePages, DeviceStatus
from agent.mcu.protocol.ports import PortInfo
from agent.mcu.trainer import BoardEvaluation, BoardInterrupted, Event, SnapshotTaken
from agent.mcu.trainer import Progress as Trained
from planner.ir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.mcu.fates.choose import FittedMemory
    from planner.mcu.schemes.fit import FittedModel
    from planner.mcu.schemes.race import Finalist
    from planner.mcu.schemes.value import Valuation

UNKNOWN = "unknown"


def show_json(content: object) -> None:
    """Print one JSON document; a number that is not finite is null there."""
    print(msgspec.json.encode(content).decode())


def bytes_or_unknown(count: int | None) -> str:
    """Return a size with its unit, or that it is not known."""
    return UNKNOWN if count is None else f"{count:,} B"


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of `mcu list`: a port, and what answered on it."""

    port: PortInfo
    info: DeviceInfo | None
    problem: str | None


def listed_json(row: Listed) -> dict[str, Any]:
    """Return a row of `mcu list` for machines."""
    info = row.info
    return {
        "port": row.port.path, "usb": None if row.port.usb is None else str(row.port.usb), "serial": row.port.serial,
        "description": row.port.description, "known_as": [board.name for board in row.port.boards],
        "board": info and info.board, "firmware": info and info.firmware_version, "model": info and info.model,
        "model_hash": info and info.model_hash.hex(), "ram_bytes": info and info.ram_bytes,
        "flash_bytes": info and info.flash_bytes, "problem": row.problem,
    }  # fmt: skip


def show_list(rows: list[Listed]) -> None:
    """Print the table of `mcu list`."""
    table = Table(box=None, pad_edge=False)
    for name in ("port", "board", "firmware", "model", "hash", "RAM", "state"):
        table.add_column(name, overflow="fold")
    for row in rows:
        info = row.info
        if info is None:
            known = ", ".join(board.title for board in row.port.boards) or row.port.description
            table.add_row(row.port.path, known, "-", "-", "-", "-", row.problem or "not asked")
            continue
        table.add_row(
            row.port.path, info.board, info.firmware_version, info.model, info.model_hash.hex()[:12],
            format_bytes(info.ram_bytes), "ready",
        )  # fmt: skip
    terminal().print(table)


def firmware_json(firmware: Firmware) -> dict[str, Any]:
    """Return a build for machines."""
    board = firmware.board
    return {
        "board": board.name, "elf": str(firmware.elf), "image": None if firmware.image is None else str(firmware.image),
        "static_ram_bytes": firmware.static_ram_bytes, "stack_reserved_bytes": board.stack_bytes,
        "ram_limit_bytes": board.ram_bytes, "flash_bytes": firmware.flash_bytes, "flash_limit_bytes": board.flash_bytes,
    }  # fmt: skip


def show_firmware(firmware: Firmware) -> None:
    """Print what a build takes."""
    board = firmware.board
    print(f"{board.title}: {firmware.image or firmware.elf}")
    if firmware.static_ram_bytes is None or firmware.flash_bytes is None:
        return
    print(
        f"  RAM    {firmware.static_ram_bytes:>9,} B static + {board.stack_bytes:,} B stack reserved, of {board.ram_bytes:,} B"
    )
    print(f"  flash  {firmware.flash_bytes:>9,} B of {board.flash_bytes:,} B")


def status_json(info: DeviceInfo, status: DeviceStatus, pages: DevicePages | None) -> dict[str, Any]:
    """Return identity and counters for machines."""
    return {
        "board": info.board, "firmware": info.firmware_version, "model": info.model, "model_hash": info.model_hash.hex(),
        "serial": info.serial_text, "boot_nonce": f"{info.nonce:08x}", "has_snapshot": info.has_snapshot,
        "frames": status.frames, "frame_errors": status.frame_errors, "bad_crc": status.bad_crc,
        "bad_cobs": status.bad_cobs, "overlong": status.overlong, "duplicates": status.duplicates,
        "refused": status.refused, "overruns": status.overruns, "trained": status.trained,
        "evaluated": status.evaluated, "saves": status.saves, "stack_used_bytes": status.stack_used_bytes,
        "static_ram_bytes": status.static_ram_bytes, "ram_used_bytes": status.ram_used_bytes,
        "ram_limit_bytes": info.ram_bytes, "uptime_s": status.ticks / info.ticks_hz,
        "reset_reason": None if status.reset_reason is None else status.reset_reason.name.lower(),
        "pages": None if pages is None else asdict(pages),
    }  # fmt: skip


def show_status(info: DeviceInfo, status: DeviceStatus, pages: DevicePages | None) -> None:
    """Print the counters of one device."""
    reason = UNKNOWN if status.reset_reason is None else status.reset_reason.name.lower()
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "board": f"{info.board}, firmware {info.firmware_version}, serial {info.serial_text or 'none'}",
        "model": f"{info.model} {info.model_hash.hex()[:12]}",
        "up": f"{format_seconds(status.ticks / info.ticks_hz)} since reset by {reason}",
        "samples": f"{status.trained:,} trained, {status.evaluated:,} evaluated",
        "frames": f"{status.frames:,} received, {status.frame_errors:,} damaged "
        f"({status.bad_crc} CRC, {status.bad_cobs} COBS, {status.overlong} too long), {status.overruns} bytes overrun",
        "answers": f"{status.duplicates:,} from the reply cache, {status.refused:,} refusals",
        "RAM": f"{bytes_or_unknown(status.ram_used_bytes)} of {info.ram_bytes:,} B "
        f"(stack at most {bytes_or_unknown(status.stack_used_bytes)})",
        "snapshot": "on the device" if info.has_snapshot else "none on the device",
    }
    if pages is not None:
        rows["pages"] = _pages_line(pages)
    for name, value in rows.items():
        table.add_row(name, value)
    terminal().print(table)


def _pages_line(pages: DevicePages) -> str:
    if not pages.medium:
        return f"the model needs {pages.needed_bytes:,} B of external memory, none answers"
    state = "; a step ended half way: restore" if pages.torn else ""
    return (
        f"{pages.needed_bytes:,} B of {pages.medium} of {format_bytes(pages.medium_bytes)}; {format_bytes(pages.read_bytes)} read, "
        f"{format_bytes(pages.written_bytes)} written in blocks of {pages.block_bytes:,} B, {pages.failed} transfers failed, "
        f"{pages.damaged} pages damaged{state}"
    )


class TrainView:
    """Shows a training run as a bar, or prints JSON lines."""

    def __init__(self, total: int, as_json: bool) -> None:
        self.evaluations: list[BoardEvaluation] = []
        self.interruptions = 0
        self._json = as_json
        console = terminal(stderr=True)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(), console=console, disable=as_json or not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take one event of the trainer."""
        match event:
            case Trained():
                position = event.position
                mean = position.loss_sum / max(1, position.index)
                self._bar.update(self._task, completed=position.step, note=f"loss {mean:.3f}")
                self._line("step", step=position.step, loss=mean, samples=event.samples, wall_s=event.wall_s)
            case BoardEvaluation():
                self.evaluations.append(event)
                self._say(f"{event.step:>7} samples trained: accuracy {event.accuracy:6.1%}, loss {event.loss:.3f}")
                self._line("eval", step=event.step, accuracy=event.accuracy, loss=event.loss, samples=event.samples)
            case SnapshotTaken():
                self._line("snapshot", step=event.step, bytes=event.size_bytes, wall_s=event.wall_s)
            case BoardInterrupted():
                self.interruptions += event.resumed_at is None
                self._say(f"interrupted: {event.reason}")
                self._line("interrupted", reason=event.reason, resumed_at=event.resumed_at)

    def _say(self, text: str) -> None:
        if not self._json:
            self._bar.console.print(text, highlight=False)

    def _line(self, kind: str, **fields: object) -> None:
        if self._json:
            print(msgspec.json.encode({"event": kind, **fields}).decode(), flush=True)


def summary_of(device: Device, view: TrainView, steps: int, wall_s: float) -> dict[str, Any]:
    """Return the figures of a finished run."""
    status, counters = device.status(), device.session.counters
    first, last = (view.evaluations[0], view.evaluations[-1]) if view.evaluations else (None, None)
    return {
        "board": device.info.board, "model": device.info.model, "steps": steps, "wall_s": wall_s,
        "accuracy_before": first and first.accuracy, "accuracy_after": last and last.accuracy,
        "ram_used_bytes": status.ram_used_bytes, "ram_limit_bytes": device.info.ram_bytes,
        "stack_used_bytes": status.stack_used_bytes, "retries": counters.retries,
        "damaged_replies": counters.damaged_replies, "frame_errors": status.frame_errors,
        "duplicates": status.duplicates, "interruptions": view.interruptions,
    }  # fmt: skip


def show_summary(figures: dict[str, Any]) -> None:
    """Print the table at the end of a run."""
    table = Table("", "before", "after", box=None, pad_edge=False)
    if figures["accuracy_before"] is not None:
        table.add_row("accuracy", f"{figures['accuracy_before']:.1%}", f"{figures['accuracy_after']:.1%}")
    console = terminal()
    console.print(table)
    ram = bytes_or_unknown(figures["ram_used_bytes"])
    console.print(
        f"{figures['steps']:,} training steps on {figures['board']} in {format_seconds(figures['wall_s'])}; RAM {ram} of "
        f"{figures['ram_limit_bytes']:,} B (static data and deepest stack); {figures['retries']} retries, "
        f"{figures['duplicates']} answered from the reply cache, {figures['interruptions']} interruptions",
        highlight=False,
    )


def fitted_json(fitted: "FittedModel") -> dict[str, Any]:
    """Return the scheme that `mcu compile --sparse-update` chose, for machines.

    And what it was measured beside.

    `proven`: no scheme within the limits is predicted to do better than the knapsack's answer.
    """
    return _finalist_json(fitted.best) | {
        "proven": fitted.optimum.proven, "untrained": fitted.table.baseline,
        "finalists": [_finalist_json(finalist) for finalist in fitted.finalists],
    }  # fmt: skip


def _finalist_json(finalist: "Finalist") -> dict[str, Any]:
    return {
        "origin": finalist.origin, "trained": finalist.scheme.describe(), "predicted": finalist.predicted,
        "measured": finalist.measured, "draws": len(finalist.accuracies), "ram_bytes": finalist.ram_bytes,
        "backward_macs": finalist.backward_macs,
    }  # fmt: skip


def show_fitted(fitted: "FittedModel") -> None:
    """Print the contributions, the knapsack's answer, the race and what is trained."""
    print("\n".join(fitted.table.lines()))
    print(f"knapsack: {fitted.optimum.describe()}")
    table = Table(box=None, pad_edge=False)
    for name in ("found by", "trainings", "predicted, %", "measured, %", "RAM, B"):
        table.add_column(name, justify="left" if name == "found by" else "right")
    for f in fitted.finalists:
        measured = f"{100 * f.measured:.1f}"
        table.add_row(f.origin, str(len(f.accuracies)), f"{100 * f.predicted:.1f}", measured, f"{f.ram_bytes:,}")
    terminal().print(table)
    best = fitted.best
    print(f"trained: {best.scheme.describe()}")
    print(
        f"predicted {100 * best.predicted:.1f} %, measured {100 * best.measured:.1f} %; {best.ram_bytes:,} B of RAM, "
        f"{best.backward_macs:,} backward MAC"
    )


def valuation_json(found: "Valuation") -> dict[str, Any]:
    """Return what `mcu compile --per-joule` measured and chose; joules are estimates of the whole job."""
    return {
        "chosen": found.chosen.origin, "trained": found.chosen.scheme.describe(), "untrained": found.chosen.untrained,
        "candidates": [
            {
                "origin": valued.origin, "accuracy": valued.accuracy, "behind": valued.behind(found.best)[0],
                "behind_error": valued.behind(found.best)[1], "job_joules": valued.job_joules,
                "gain_per_joule": valued.gain_per_joule, **held_json(valued.fitted),
            }
            for valued in found.valued
        ],
        "refused": [{"origin": refused.origin, "reason": refused.reason} for refused in found.refused],
    }  # fmt: skip


def show_valuation(found: "Valuation") -> None:
    """Print what each candidate reaches and takes, and which was chosen by what rule."""
    from planner.ir.units import format_joules, format_seconds

    table = Table(box=None, pad_edge=False)
    for name in ("trained", "%", "behind", "job", "each", "RAM, B", "paged", "%/J"):
        table.add_column(name, justify="left" if name == "trained" else "right", no_wrap=True)
    for valued in found.valued:
        behind, error = valued.behind(found.best)
        medium = valued.fitted.memory.medium
        table.add_row(
            valued.origin, f"{100 * valued.accuracy:.1f}", f"{100 * behind:.1f} ± {100 * error:.1f}",
            format_joules(valued.job_joules), format_seconds(valued.fitted.seconds), f"{valued.fitted.memory.ram_bytes:,}",
            f"{0 if medium is None else medium.size_bytes:,}", f"{100 * valued.gain_per_joule:.3g}",
        )  # fmt: skip
    terminal().print(table)
    for refused in found.refused:
        print(f"{refused.origin}: {refused.reason}")
    print(
        f"chosen: {found.chosen.origin}, {found.chosen.scheme.describe()}; untrained {100 * found.chosen.untrained:.1f} %. "
        "The rule: within one standard error of the best, most points gained per joule (estimated)"
    )


def held_json(held: "FittedMemory") -> dict[str, Any]:
    """Return what a plan within a budget takes, as JSON; seconds and joules are estimates of one training sample."""
    medium = held.memory.medium
    return {
        "ram_bytes": held.memory.ram_bytes, "recomputed": held.memory.recomputed, "paged": held.memory.paged,
        "medium": None if medium is None else medium.name, "medium_bytes": 0 if medium is None else medium.size_bytes,
        "written_bytes": 0 if medium is None else medium.written_bytes,
        "banded": sum(row.part for row in held.memory.rows), "seconds": held.seconds,
        "joules": held.joules, "overhead": held.overhead,
    }  # fmt: skip


def show_held(held: "FittedMemory") -> None:
    """Say what a plan within a budget takes."""
    from planner.ir.units import format_joules, format_seconds

    again, paged = held.memory.recomputed, held.memory.paged
    bands = sum(row.part for row in held.memory.rows)
    how = "all is kept"
    if again or bands or paged:
        pages = f", {paged} pages read" if paged else ""
        how = f"{again} rows run again, {bands} in bands{pages}, {held.overhead:.1%} more energy"
    print(
        f"{held.memory.ram_bytes:,} B: {how}; {format_seconds(held.seconds)} and {format_joules(held.joules)} per sample "
        "(estimated)"
    )
    medium = held.memory.medium
    if medium is None:
        return
    home = ", two copies of what is trained among them" if held.memory.parameters.pages else ""
    line = f"{medium.name}: {medium.size_bytes:,} B{home}; {medium.written_bytes:,} B written per sample"
    if held.page_costs is not None and held.page_costs.endurance_cycles is not None:
        line += f", to the same blocks: they last some {held.page_costs.endurance_cycles:,.0f} samples"
    print(line)
