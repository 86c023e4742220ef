"""What can be asked of a paired device, and who answers. Without network: the supervisor carries it before a device is paired."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from port_planner.base.errors import ExitCode, PortError

ANSWER_S = 30.0
"""Within this time a question is answered, or what follows goes on; solving takes longer by what it was given."""
_SOLVING_FACTOR = 4.0
"""The clock may run so much longer than the CPU time that a solver was given: it gives way to everything else."""


def solving_patience_s(seconds: float) -> float:
    """Return how long to wait for a solver that was given so much CPU time."""
    return ANSWER_S + _SOLVING_FACTOR * seconds


class Topic(StrEnum):
    """What can be asked for, by the hash of what it is of."""

    COSTS = "costs"
    """What operators cost on one kind of machine."""
    PLAN = "plan"
    """A plan that was made for a step and a budget."""
    SOLVE = "solve"
    """A plan that is still to be made, for the problem that comes with the question."""
    FEDERATE = "federate"
    """What the request says that comes with the question (`port_agent.peers.federation_requests`)."""
    MOVE = "move"
    """Likewise, about a job that moves (`port_agent.peers.migration_requests`)."""
    INTRODUCE = "introduce"
    """Who else chose the device that is asked as the introducer (`port_agent.peers.introductions`)."""


@dataclass(frozen=True, slots=True)
class PeerContent:
    """What a paired device answered: its id, how it is called, the content as it came."""

    device: str
    name: str
    content: bytes


class NotAnsweredError(PortError):
    """There is no answer, for the other device's own reason or because none came."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PeerClient:
    """A paired device that asks: how it is called, and its id."""

    name: str
    id: str


class PeerServer(Protocol):
    """What a device answers; each raises NotAnsweredError with the reason for which it does not."""

    async def shared(self, topic: Topic, name: str) -> bytes:
        """Return what is shared under a name."""

    def check_solving(self) -> None:
        """Raise NotAnsweredError where nothing is solved now."""

    async def solve(self, client: str, problem: bytes, seconds: float) -> bytes:
        """Return a plan for the problem of the device `client`, found within so much CPU time."""

    async def federate(self, client: PeerClient, request: bytes) -> bytes:
        """Return what this device answers to a request of the device `client` that leads a federation."""

    async def move(self, client: PeerClient, request: bytes) -> bytes:
        """Return what this device answers to a request about a job of the device `client`."""

    async def introduce(self, client: PeerClient) -> bytes:
        """Return whom this device introduces to the device `client`."""
