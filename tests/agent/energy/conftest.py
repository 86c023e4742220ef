"""The full recordings for every test of this room."""

from tests.agent.energy.recordings import shared

__all__ = ["shared"]
