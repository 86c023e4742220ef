"""What a simulated board holds after training."""

from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from tests.agent.mcu.simulated_board import QUICK


def read_result(simulator: Simulator, patience: Patience = QUICK) -> bytes:
    """Return the parameters as they are on the device."""
    session = Session(SerialTransport(str(simulator.port)), patience)
    try:
        return Device(session).read_parameters()
    finally:
        session.close()
