"""A paired device in this process: what goes to it and comes back is bytes all the same."""

from collections.abc import Callable

from port_agent.peers.exchange.answers import NotAnsweredError, PeerContent, Topic
from port_planner.search.plan_problem import PlanProblem, unpack_problem

Solve = Callable[[PlanProblem], bytes]


class Others:
    """A paired device with contents and a solver, in this process: what goes to it and comes
    back is bytes all the same.
    """

    def __init__(self, solve: Solve | None = None) -> None:
        self.contents: dict[tuple[Topic, str], bytes] = {}
        self.accused: list[str] = []
        self.asked = 0
        self._solve = solve

    def shared(self, topic: Topic, name: str) -> PeerContent:
        if (topic, name) not in self.contents:
            raise NotAnsweredError(f"attic: it has no such {topic.value}")
        return PeerContent("ID", "attic", self.contents[topic, name])

    def solved(self, name: str, problem: bytes, seconds: float) -> PeerContent:
        self.asked += 1
        if self._solve is None:
            raise NotAnsweredError("attic: on battery 64 %")
        return PeerContent("ID", "attic", self._solve(unpack_problem(problem)))

    def share(self, topic: Topic, name: str, content: bytes) -> None:
        self.contents[topic, name] = content

    def accuse(self, device: str, reason: str) -> None:
        self.accused.append(f"{device}: {reason}")
