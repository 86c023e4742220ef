"""`mcu list`, `build`, `flash` and `logs`: boards and their firmware."""

import argparse
import json
import time

from rich.table import Table

from port_agent.cli.mcu.views import (
    ListedPort,
    firmware_json,
    listed_json,
    show_firmware,
    show_json,
    show_list,
    show_status,
    status_json,
)
from port_agent.cli.terminal import terminal
from port_agent.mcu.board.board_errors import McuError
from port_agent.mcu.board.catalogue import BOARDS
from port_agent.mcu.board.firmware import Firmware, build_firmware
from port_agent.mcu.board.flash import advice, flash
from port_agent.mcu.library import Framework, write_library
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.ports import POLL_S, PortInfo, PortSelector, list_serial_ports
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_planner.base.units import format_bytes


def run_list(arguments: argparse.Namespace) -> int:
    """Show what is plugged in."""
    if arguments.boards:
        return _list_boards(arguments.json)
    before: list[PortInfo] | None = None
    while True:
        ports = _ports(arguments.port)
        if ports != before:
            _show_ports(ports, arguments.json)
        if not arguments.watch:
            return 0
        before = ports
        time.sleep(POLL_S)


def _ports(given: str | None) -> list[PortInfo]:
    ports = list_serial_ports()
    if given is None:
        return ports
    return [PortInfo(given, None, None, "given", ())] + [port for port in ports if port.path != given]


def _show_ports(ports: list[PortInfo], as_json: bool) -> None:
    rows = [_ask(port) for port in ports]
    if as_json:
        print(json.dumps([listed_json(row) for row in rows]), flush=True)
    elif not rows:
        print("no board on any serial port; try one without hardware: port-agent mcu simulate MODEL")
    else:
        show_list(rows)


def _ask(port: PortInfo) -> ListedPort:
    try:
        session = Session(SerialTransport(port.path), Patience(give_up_s=1.5))
    except McuError as error:
        return ListedPort(port, None, str(error))
    session.close()
    return ListedPort(port, session.info, None)


def _list_boards(as_json: bool) -> int:
    if as_json:
        show_json(
            [{"name": b.name, "title": b.title, "ram_bytes": b.ram_bytes, "flash_bytes": b.flash_bytes} for b in BOARDS]
        )
        return 0
    table = Table("name", "board", "RAM", "flash", "flashed with", box=None, pad_edge=False)
    for board in BOARDS:
        methods = ", ".join(method.value for method in board.methods)
        table.add_row(board.name, board.title, format_bytes(board.ram_bytes), format_bytes(board.flash_bytes), methods)
    terminal().print(table)
    return 0


def run_build(arguments: argparse.Namespace) -> int:
    """Build an image."""
    firmware = _build(arguments)
    if arguments.json:
        show_json(firmware_json(firmware))
    else:
        show_firmware(firmware)
    return 0


def _build(arguments: argparse.Namespace) -> Firmware:
    out = getattr(arguments, "out", None) or arguments.model / "firmware"
    return build_firmware(arguments.board, arguments.model, out)


def run_library(arguments: argparse.Namespace) -> int:
    """Write a model as a library."""
    out = write_library(
        read_model(arguments.model), Framework(arguments.framework), arguments.out or arguments.model / "library"
    )
    if arguments.json:
        show_json({"library": str(out), "framework": arguments.framework})
    else:
        print(f"wrote a library for {arguments.framework} to {out}; its interface: {out / 'src' / 'port_library.h'}")
        print("compile it with -ffp-contract=off, as its sources demand; port_library_begin reports an error otherwise")
    return 0


def run_flash(arguments: argparse.Namespace) -> int:
    """Build and write an image."""
    firmware = _build(arguments)
    if arguments.dry_run:
        print(advice(firmware.board, firmware, arguments.port))
        return 0
    report = flash(firmware.board, firmware, arguments.port, arguments.drive)
    if arguments.json:
        show_json({"method": report.method.value, "copied_to": report.copied_to and str(report.copied_to)})
    else:
        print(f"flashed with {report.method.value}; see it with: port-agent mcu list")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Show a board's counters."""
    link = Link(PortSelector(path=arguments.port, serial=arguments.serial))
    device = link.connect()
    while True:
        status, pages = device.status(), device.pages()
        if arguments.json:
            print(json.dumps(status_json(device.info, status, pages)), flush=True)
        else:
            show_status(device.info, status, pages)
        if not arguments.follow:
            link.close()
            return 0
        time.sleep(1.0)
