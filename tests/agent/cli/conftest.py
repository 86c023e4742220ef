"""The simulated board for the tests of `port-agent mcu`."""

from tests.agent.mcu.simulated_board import built, model, simulator

__all__ = ["built", "model", "simulator"]
