"""Asking paired devices through two running agents: what is shared, refused, solved, and who is cut off."""

import socket
from pathlib import Path

import psutil
import pytest

from port_agent.control.client import ControlClient
from port_agent.control.peer_exchange import PeerExchange
from port_agent.peers.connection.messages import ANSWER_LIMIT_BYTES
from port_agent.peers.exchange.answers import NotAnsweredError, Topic
from port_planner.search.plan_problem import PlanProblem, pack_answer, pack_problem
from tests.agent.paired_agents import history, paired_agents, row
from tests.planner.estimated_steps import budget, captured
from tests.waiting import until

NAME = "ab" * 32
ALLOWED = "share = true\nsolve = true"


@pytest.mark.process
def test_what_one_shares_the_other_has_and_a_plan_is_the_same_as_here(tmp_path: Path) -> None:
    graph, costs = captured()
    problem = PlanProblem(graph, costs, budget(0.4), time_limit_s=5.0)
    with paired_agents(tmp_path, ALLOWED, "") as (attic, cellar):
        PeerExchange(attic, "").share(Topic.PLAN, NAME, b"x" * ANSWER_LIMIT_BYTES)
        ask = PeerExchange(cellar, "attic")
        found = ask.shared(Topic.PLAN, NAME)
        assert (found.name, found.content) == ("attic", b"x" * ANSWER_LIMIT_BYTES)
        with pytest.raises(NotAnsweredError, match="attic: it has no such costs"):
            ask.shared(Topic.COSTS, NAME)
        answer = ask.solved(problem.name, pack_problem(problem), problem.time_limit_s)
        assert answer.content == pack_answer(problem.solved())
        assert "cellar: a plan to solve" in history(attic) and ": solved, " in history(attic)
        with pytest.raises(NotAnsweredError, match="attic: solving ended with exit code 2: not a planning problem"):
            ask.solved(problem.name, b"no problem", 1.0)
        with pytest.raises(NotAnsweredError, match="attic: it solves for at most 10 min"):
            ask.solved(problem.name, pack_problem(problem), 700.0)
        attic.post("/v1/pause")
        with pytest.raises(NotAnsweredError, match=r"attic: .*paused"):
            PeerExchange(cellar, "any").solved(problem.name, pack_problem(problem), 5.0)
        ask.accuse(found.device, "its plan does not fit")
        until(lambda: not row(cellar)["is_connected"])
        assert "attic: blocked for 5 minutes: its plan does not fit" in history(cellar)
        with pytest.raises(NotAnsweredError, match="attic: it is not connected"):
            ask.solved(NAME, b"a problem", 1.0)
        with pytest.raises(NotAnsweredError, match="no paired device is connected"):
            PeerExchange(cellar, "any").shared(Topic.PLAN, NAME)


@pytest.mark.process
def test_nothing_is_shared_or_solved_unless_the_owner_says_so(tmp_path: Path) -> None:
    with paired_agents(tmp_path, "", "") as (attic, cellar):
        with pytest.raises(NotAnsweredError, match=r"nothing is shared .* set share = true under"):
            PeerExchange(attic, "").share(Topic.PLAN, NAME, b"a plan")
        for on in ("any", "attic"):
            ask = PeerExchange(cellar, on)
            with pytest.raises(NotAnsweredError, match="attic: it shares nothing"):
                ask.shared(Topic.PLAN, NAME)
            with pytest.raises(NotAnsweredError, match="attic: it solves for no other device"):
                ask.solved(NAME, b"a problem", 1.0)
        with pytest.raises(NotAnsweredError, match="no paired device is called 'loft'; the paired devices are attic"):
            PeerExchange(cellar, "loft").solved(NAME, b"a problem", 1.0)
        assert row(cellar)["is_connected"], "a refusal is no offence"


def test_without_an_agent(tmp_path: Path) -> None:
    with pytest.raises(NotAnsweredError, match="no agent is running"):
        PeerExchange(ControlClient(tmp_path), "any").shared(Topic.PLAN, NAME)


def solves(root: Path) -> bool:
    """Return whether the agent there has a process that solves."""
    agent = psutil.Process(int((root / "state/port-agent.lock").read_text()))
    commands = [child.cmdline() for child in agent.children()]
    return any("port_planner.search.solve_problem" in words for words in commands)


@pytest.mark.process
def test_who_goes_away_ends_the_solver(tmp_path: Path) -> None:
    graph, costs = captured()
    hopeless = pack_problem(PlanProblem(graph, costs, budget(0.4), deadline_s=1e-6, time_limit_s=60.0))
    with paired_agents(tmp_path, ALLOWED, "") as (attic, cellar):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(cellar.path))
            head = f"PUT /v1/solve/{NAME}?on=attic&seconds=60 HTTP/1.1\r\nContent-Length: {len(hopeless)}\r\n\r\n"
            sock.sendall(head.encode() + hopeless)
            until(lambda: solves(tmp_path / "attic"))
        until(lambda: "abandoned: nobody waits for it any longer" in history(attic))
        with pytest.raises(NotAnsweredError, match="not a planning problem"):
            PeerExchange(cellar, "attic").solved(NAME, b"no problem", 1.0)
