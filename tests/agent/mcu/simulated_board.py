"""A real device for every test: the firmware of a small model, as a process and in QEMU."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from port_agent.mcu.board.firmware import Firmware, build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from tests.agent.mcu.proxy import FaultyLine
from tests.agent.mcu.small_model import write_model

QUICK = Patience(first_s=0.03, longest_s=0.4, give_up_s=30.0, wire_bytes_per_s=1e6)
"""The process answers within a millisecond; a loaded machine needs the long end."""


def require_board_tools() -> None:
    """Skip where the cross compiler or QEMU is absent."""
    for tool in ("arm-none-eabi-gcc", "qemu-system-arm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's directory."""
    return write_model(tmp_path_factory.mktemp("small_model"))


@pytest.fixture(scope="session")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Firmware]:
    """Build the small model for a board, once per test run."""
    folder = tmp_path_factory.mktemp("firmware")
    made: dict[str, Firmware] = {}

    def make(board: str) -> Firmware:
        if board != "posix":
            require_board_tools()
        if board not in made:
            made[board] = build_firmware(board, model, folder)
        return made[board]

    return make


@pytest.fixture
def simulator(built: Callable[[str], Firmware], tmp_path: Path) -> Iterator[Simulator]:
    """The firmware as a process, running."""
    with Simulator(built("posix"), tmp_path / "simulator") as running:
        yield running


@pytest.fixture
def device(simulator: Simulator) -> Iterator[Device]:
    """A session with the process."""
    session = Session(SerialTransport(str(simulator.port)), QUICK)
    yield Device(session)
    session.close()


@pytest.fixture
def line(simulator: Simulator, tmp_path: Path) -> Iterator[FaultyLine]:
    """A line to the process that can be cut and made noisy."""
    with FaultyLine(simulator.port, tmp_path / "line") as running:
        yield running
