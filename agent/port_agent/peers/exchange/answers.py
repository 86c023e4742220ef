"""The topics about which a paired device can be asked, and the answering side.

This module uses no network, because the supervisor loads it before a device is paired.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from port_planner.base.errors import ExitCode, PortError

ANSWER_S = 30.0
"""Seconds to answer a question, or to continue with the next part; solving takes additional time."""
_SOLVING_FACTOR = 4.0
"""Factor by which the clock may exceed a solver's CPU time, because it yields to everything else."""


def solving_patience_s(seconds: float) -> float:
    """Return how long to wait for a solver with this much CPU time."""
    return ANSWER_S + _SOLVING_FACTOR * seconds


class Topic(StrEnum):
    """A kind of request; its name is the hash of the thing requested."""

    COSTS = "costs"
    """Costs of operators on one kind of machine."""
    PLAN = "plan"
    """A plan that was made for a step and a budget."""
    SOLVE = "solve"
    """A plan that must still be made, for the problem sent with the question."""
    FEDERATE = "federate"
    """The federation request sent with the question (`port_agent.peers.federation_requests`)."""
    MIGRATE = "move"
    """A migration request about a job that moves (`port_agent.peers.migration_requests`)."""
    INTRODUCE = "introduce"
    """The other devices that chose the asked device as introducer (`port_agent.peers.introductions`)."""


@dataclass(frozen=True, slots=True)
class PeerContent:
    """A paired device's answer: its id, its name, and the content as received."""

    device: str
    name: str
    content: bytes


class NotAnsweredError(PortError):
    """There is no answer, for the other device's own reason or because none arrived."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PeerClient:
    """A paired device that asks: its name and its id."""

    name: str
    id: str


class PeerServer(Protocol):
    """The answering side of a device; each method raises NotAnsweredError with the reason if there is no answer."""

    async def shared(self, topic: Topic, name: str) -> bytes:
        """Return what is shared under a name."""

    def check_solving(self) -> None:
        """Raise NotAnsweredError if nothing is solved now."""

    async def solve(self, client: str, problem: bytes, seconds: float) -> bytes:
        """Return a plan for the problem of the device `client`, found within this much CPU time."""

    async def federate(self, client: PeerClient, request: bytes) -> bytes:
        """Return this device's answer to a request of the device `client`, which leads a federation."""

    async def migrate(self, client: PeerClient, request: bytes) -> bytes:
        """Return this device's answer to a request of the device `client` about a job."""

    async def introduce(self, client: PeerClient) -> bytes:
        """Return the devices that this device introduces to the device `client`."""
