"""Views of microcontrollers: tables, progress bars, and the same as JSON lines."""

import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from port_agent.cli.terminal import terminal
from port_agent.mcu.board.firmware import Firmware
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.ports import PortInfo
from port_agent.mcu.protocol.queries import DeviceInfo, DevicePages, DeviceStatus
from port_agent.mcu.trainer import BoardEvaluation, BoardInterrupted, BoardSaved, Event, SnapshotTaken
from port_agent.mcu.trainer import Progress as Trained
from port_planner.base.units import format_bytes, format_seconds

UNKNOWN = "unknown"


def show_json(content: object) -> None:
    """Print one JSON document, in which a number that is not finite becomes null."""
    print(msgspec.json.encode(content).decode())


def bytes_or_unknown(count: int | None) -> str:
    """Return a size with its unit, or a text that says it is unknown."""
    return UNKNOWN if count is None else f"{count:,} B"


@dataclass(frozen=True, slots=True)
class ListedPort:
    """One row of `mcu list`: a port, and what answered on it."""

    port: PortInfo
    info: DeviceInfo | None
    problem: str | None


def listed_json(row: ListedPort) -> dict[str, Any]:
    """Return a row of `mcu list` as JSON."""
    info = row.info
    return {
        "port": row.port.path, "usb": None if row.port.usb is None else str(row.port.usb), "serial": row.port.serial,
        "description": row.port.description, "known_as": [board.name for board in row.port.boards],
        "board": info and info.board, "firmware": info and info.firmware_version, "model": info and info.model,
        "model_hash": info and info.model_hash.hex(), "ram_bytes": info and info.ram_bytes,
        "flash_bytes": info and info.flash_bytes, "problem": row.problem,
    }  # fmt: skip


def show_list(rows: list[ListedPort]) -> None:
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
            row.port.path,
            info.board,
            info.firmware_version,
            info.model,
            info.model_hash.hex()[:12],
            format_bytes(info.ram_bytes),
            "ready",
        )
    terminal().print(table)


def firmware_json(firmware: Firmware) -> dict[str, Any]:
    """Return a build as JSON."""
    board = firmware.board
    return {
        "board": board.name,
        "elf": str(firmware.elf),
        "image": None if firmware.image is None else str(firmware.image),
        "static_ram_bytes": firmware.static_ram_bytes,
        "stack_reserved_bytes": board.stack_bytes,
        "ram_limit_bytes": board.ram_bytes,
        "flash_bytes": firmware.flash_bytes,
        "flash_limit_bytes": board.flash_bytes,
    }


def show_firmware(firmware: Firmware) -> None:
    """Print the sizes of a build."""
    board = firmware.board
    print(f"{board.title}: {firmware.image or firmware.elf}")
    if firmware.static_ram_bytes is None or firmware.flash_bytes is None:
        return
    print(
        f"  RAM    {firmware.static_ram_bytes:>9,} B static + {board.stack_bytes:,} B stack reserved, of {board.ram_bytes:,} B"
    )
    print(f"  flash  {firmware.flash_bytes:>9,} B of {board.flash_bytes:,} B")


def status_json(info: DeviceInfo, status: DeviceStatus, pages: DevicePages | None) -> dict[str, Any]:
    """Return identity and counters as JSON."""
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
        return f"the model needs {pages.needed_bytes:,} B of external memory, but none answers"
    state = "; a step was interrupted half way: restore a snapshot" if pages.torn else ""
    return (
        f"{pages.needed_bytes:,} B of {pages.medium} of {format_bytes(pages.medium_bytes)}; "
        f"{format_bytes(pages.read_bytes)} read, {format_bytes(pages.written_bytes)} written in blocks of "
        f"{pages.block_bytes:,} B, {pages.failed} transfers failed, {pages.damaged} pages damaged{state}"
    )


def judgement(found: BoardEvaluation) -> str:
    """Return accuracy and loss in words."""
    if found.explains:
        return f"explains {found.accuracy:6.1%} of the targets' variance, mean squared error {found.loss:.4g}"
    return f"accuracy {found.accuracy:6.1%}, loss {found.loss:.3f}"


class TrainView:
    """Shows a training run as a bar, or prints JSON lines."""

    def __init__(self, total: int, as_json: bool) -> None:
        self.evaluations: list[BoardEvaluation] = []
        self.interruptions = 0
        self._json = as_json
        console = terminal(stderr=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=as_json or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event of the trainer."""
        match event:
            case Trained():
                position = event.position
                mean = position.loss_sum / max(1, position.index)
                self._bar.update(self._task, completed=position.step, note=f"loss {mean:.3f}")
                self._line("step", step=position.step, loss=mean, samples=event.samples, wall_s=event.wall_s)
            case BoardEvaluation():
                self.evaluations.append(event)
                self._write(f"{event.step:>7} samples trained: {judgement(event)}")
                self._line("eval", step=event.step, accuracy=event.accuracy, loss=event.loss, samples=event.samples)
            case SnapshotTaken():
                self._line("snapshot", step=event.step, bytes=event.size_bytes, wall_s=event.wall_s)
            case BoardSaved():
                slots = f"kept on the board through power cuts (save {event.saves:,}; each of two slots lasts about 10,000 saves)"
                self._write(f"{event.step:>7} samples trained: {event.problem or slots}")
                self._line("saved", step=event.step, saves=event.saves, problem=event.problem)
            case BoardInterrupted():
                self.interruptions += event.resumed_at is None
                self._write(f"interrupted: {event.reason}")
                self._line("interrupted", reason=event.reason, resumed_at=event.resumed_at)

    def _write(self, text: str) -> None:
        if not self._json:
            self._bar.console.print(text, highlight=False)

    def _line(self, kind: str, **fields: object) -> None:
        if self._json:
            print(msgspec.json.encode({"event": kind, **fields}).decode(), flush=True)


def summary_of(device: Device, view: TrainView, steps: int, wall_s: float, begun: int) -> dict[str, Any]:
    """Return the figures of a finished run that began after `begun` samples.

    The accuracy before the run is None if the run began inside an epoch, where nothing was evaluated.
    """
    status, counters = device.status(), device.session.counters
    first = next((each for each in view.evaluations if each.step == begun), None)
    last = view.evaluations[-1] if view.evaluations else None
    best = max(view.evaluations, key=lambda each: each.accuracy, default=None)
    return {
        "board": device.info.board, "model": device.info.model, "steps": steps, "wall_s": wall_s,
        "accuracy_before": first and first.accuracy, "accuracy_after": last and last.accuracy,
        "accuracy_best": best and best.accuracy, "best_step": best and best.step,
        "explains": bool(last and last.explains),
        "ram_used_bytes": status.ram_used_bytes, "ram_limit_bytes": device.info.ram_bytes,
        "stack_used_bytes": status.stack_used_bytes, "retries": counters.retries,
        "damaged_replies": counters.damaged_replies, "frame_errors": status.frame_errors,
        "duplicates": status.duplicates, "interruptions": view.interruptions,
    }  # fmt: skip


def show_summary(figures: dict[str, Any]) -> None:
    """Print the table at the end of a run."""
    table = Table("", "before", "after", box=None, pad_edge=False)
    before, after = figures["accuracy_before"], figures["accuracy_after"]
    if after is not None:
        table.add_row(
            "explained variance" if figures["explains"] else "accuracy",
            "not measured" if before is None else f"{before:.1%}",
            f"{after:.1%}",
        )
    console = terminal()
    if table.rows:
        console.print(table)
    best = figures["accuracy_best"]
    if best is not None and after is not None and after < best:
        console.print(
            f"it fell from {best:.1%} after {figures['best_step']:,} samples; mcu export --best has those weights",
            highlight=False,
        )
    if before is not None and after is not None and after < before:
        console.print(
            "the result is worse than before: train at a lower --lr (mcu compile --choose-rate finds one), or with "
            "more data",
            highlight=False,
        )
    ram = bytes_or_unknown(figures["ram_used_bytes"])
    console.print(
        f"{figures['steps']:,} training steps on {figures['board']} in {format_seconds(figures['wall_s'])}; RAM {ram} "
        f"of {figures['ram_limit_bytes']:,} B (static data and deepest stack); {figures['retries']} retries, "
        f"{figures['duplicates']} answered from the reply cache, {figures['interruptions']} interruptions",
        highlight=False,
    )
