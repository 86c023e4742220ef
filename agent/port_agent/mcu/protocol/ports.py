"""Find the serial port of a board: by USB identity and serial number, by path, and again after it was unplugged.

A path does not identify a board: /dev/ttyACM0 returns as ttyACM1 if it was still open. The system does not list ptys,
so simulated boards are given by path or found among the running simulators.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from serial.tools import list_ports

from port_agent.mcu.board.board_errors import PortNotFoundError
from port_agent.mcu.board.catalogue import FirmwareBoard, UsbId, boards_with_usb

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PortInfo:
    """One serial port that may lead to a board."""

    path: str
    usb: UsbId | None
    serial: str | None
    """USB serial number."""
    description: str
    boards: tuple[FirmwareBoard, ...]


@dataclass(frozen=True, slots=True)
class PortSelector:
    """Criteria for the wanted port: any of a path, a USB identity and a USB serial number."""

    path: str | None = None
    usb: UsbId | None = None
    serial: str | None = None

    def __str__(self) -> str:
        parts = [
            self.path,
            f"USB {self.usb}" if self.usb else None,
            f"serial number {self.serial}" if self.serial else None,
        ]
        return ", ".join(part for part in parts if part) or "any known board"

    def matches(self, port: PortInfo) -> bool:
        """Return whether `port` is the wanted one."""
        if self.path is not None and Path(self.path).resolve() != Path(port.path).resolve():
            return False
        if self.usb is not None and port.usb != self.usb:
            return False
        return self.serial is None or port.serial == self.serial


def simulator_folder() -> Path:
    """Return the directory with one folder per running simulator."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "port-agent" / "mcu"


def list_serial_ports() -> list[PortInfo]:
    """Return the USB serial ports of this machine, and the simulated boards."""
    found = []
    for port in list_ports.comports():
        if port.vid is None or port.pid is None:
            continue
        usb = UsbId(port.vid, port.pid)
        found.append(
            PortInfo(port.device, usb, port.serial_number, port.description, boards_with_usb(port.vid, port.pid))
        )
    return sorted(found, key=lambda port: port.path) + list(_simulated(simulator_folder()))


def _simulated(folder: Path) -> Iterable[PortInfo]:
    for link in sorted(folder.glob("*/port")) if folder.is_dir() else ():
        if link.exists():
            yield PortInfo(str(link), None, None, f"simulator {link.parent.name}", ())


def selector_of(port: PortInfo) -> PortSelector:
    """Return a selector that finds this port again after it is replugged.

    It never uses the path of a port that has an identity.
    """
    if port.serial is not None:
        return PortSelector(usb=port.usb, serial=port.serial)
    return PortSelector(path=port.path, usb=port.usb)


def find_port(selector: PortSelector, ports: Callable[[], list[PortInfo]] = list_serial_ports) -> PortInfo | None:
    """Return the port that matches `selector`; None if it is not plugged in.

    Raises PortNotFoundError if several match.
    """
    if selector.path is not None and selector.serial is None:
        exists = Path(selector.path).exists()
        return PortInfo(selector.path, selector.usb, None, "given", ()) if exists else None
    matching = [port for port in ports() if selector.matches(port)]
    if selector == PortSelector():
        matching = [port for port in matching if port.boards or port.usb is None]
    if len(matching) > 1:
        names = ", ".join(f"{port.path} ({port.serial or port.description})" for port in matching)
        raise PortNotFoundError(f"{len(matching)} ports match {selector}: {names}; choose one with --port")
    return matching[0] if matching else None


def require_port(selector: PortSelector, ports: Callable[[], list[PortInfo]] = list_serial_ports) -> PortInfo:
    """Return the port that matches `selector`.

    Raises PortNotFoundError, which lists the existing ports.
    """
    found = find_port(selector, ports)
    if found is None:
        names = ", ".join(port.path for port in ports()) or "none"
        raise PortNotFoundError(
            f"no port for {selector}; plugged in: {names}. Plug the board in, give --port, "
            "or try without a board: port-agent mcu simulate"
        )
    return found
