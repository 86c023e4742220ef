"""The simulated board for every test of this room."""

from tests.agent.mcu.simulated_board import built, device, line, model, simulator

__all__ = ["built", "device", "line", "model", "simulator"]
