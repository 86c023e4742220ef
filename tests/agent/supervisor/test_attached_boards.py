"""Which boards `status` shows: known ones and simulators, from a list of ports and from a running agent."""

import asyncio
import threading
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.mcu.board.catalogue import UsbId, boards_with_usb
from port_agent.mcu.protocol.ports import PortInfo
from port_agent.supervisor import attached_boards
from port_agent.supervisor.attached_boards import AttachedBoards, Row, rows
from tests.agent.live_daemon import daemon


def test_known_boards_and_simulators_are_shown_and_modems_are_not() -> None:
    microbit = UsbId(0x0D28, 0x0204)
    ports = [
        PortInfo("/dev/ttyACM0", microbit, "9904", "DAPLink", boards_with_usb(microbit.vendor, microbit.product)),
        PortInfo("/dev/ttyUSB0", UsbId(0x12D1, 0x1506), None, "modem", ()),
        PortInfo("/run/user/1/port-agent/mcu/m4/port", None, None, "simulator m4", ()),
    ]
    assert rows(ports) == [
        {
            "name": "BBC micro:bit v1 (nRF51822, Cortex-M0)",
            "port": "/dev/ttyACM0",
            "usb": "0d28:0204",
            "serial": "9904",
        },
        {"name": "simulator m4", "port": "/run/user/1/port-agent/mcu/m4/port", "usb": None, "serial": None},
    ]


def test_a_look_that_hangs_does_not_hold_up_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_boards, "_PATIENCE_S", 0.05)
    row: Row = {"name": "m4", "port": "/dev/ttyACM0", "usb": None, "serial": None}
    hang, looks = threading.Event(), 0

    def look() -> list[Row]:
        nonlocal looks
        looks += 1
        if looks == 2:
            hang.wait(30.0)
        return [row] * looks

    async def ask() -> None:
        seen = AttachedBoards(look)
        while not await seen.newest():  # a busy machine may take longer than the patience
            pass
        assert await seen.newest() == [row] and await seen.newest() == [row] and looks == 2
        hang.set()
        while len(await seen.newest()) < 2:
            pass

    asyncio.run(ask())


@pytest.mark.process
def test_a_running_agent_tells_what_is_plugged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    with daemon(tmp_path) as client:
        before = client.get("/v1/status")["mcus"]
        folder = tmp_path / "xdg/port-agent/mcu/bench"
        folder.mkdir(parents=True)
        (folder / "port").symlink_to("/dev/null")
        (seen,) = [row for row in client.get("/v1/status")["mcus"] if row not in before]
        assert (seen["name"], seen["port"]) == ("simulator bench", str(folder / "port"))
        assert main(["status", "--runtime-dir", str(tmp_path / "run")]) == 0
        assert "simulator bench" in capsys.readouterr().out
