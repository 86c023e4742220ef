"""List the microcontroller boards that are plugged in, for `status` and the live page, without opening them."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from port_agent.mcu.protocol.ports import PortInfo

Row = dict[str, str | None]
_PATIENCE_S = 1.0


class AttachedBoards:
    """Looks for boards on request, in a thread; while a failing disk blocks all threads, returns the last result."""

    def __init__(self, look: Callable[[], list[Row]] | None = None) -> None:
        self._look = look or attached_boards
        self._newest: list[Row] = []
        self._looking: asyncio.Task[list[Row]] | None = None

    async def newest(self) -> list[Row]:
        """Return the boards; at most a second old, unless no thread is free."""
        self._collect()
        looking = self._looking = self._looking or asyncio.create_task(asyncio.to_thread(self._look))
        await asyncio.wait({looking}, timeout=_PATIENCE_S)
        self._collect()
        return self._newest

    def _collect(self) -> None:
        if self._looking is not None and self._looking.done():
            self._newest, self._looking = self._looking.result(), None


def attached_boards() -> list[Row]:
    """Return known boards on USB and running simulators as plain values.

    Other serial devices are left out.

    It reads sysfs for a few milliseconds, so it must not run on the event loop.
    """
    from port_agent.mcu.protocol.ports import list_serial_ports  # 1 MB, loaded on first use

    return rows(list_serial_ports())


def rows(ports: "Iterable[PortInfo]") -> list[Row]:
    """Return the ports of known boards and simulators as plain values."""
    return [
        {
            "name": " or ".join(board.title for board in port.boards) or port.description,
            "port": port.path,
            "usb": None if port.usb is None else str(port.usb),
            "serial": port.serial,
        }
        for port in ports
        if port.boards or port.usb is None
    ]
