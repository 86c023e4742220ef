"""What can be asked: names that go over the wire, waits that grow with the solver's time, and no TLS
before a device is paired.
"""

import subprocess
import sys

import pytest

from port_agent.peers.exchange.answers import ANSWER_S, Topic, solving_patience_s


def test_names_on_the_wire_never_change() -> None:
    assert [topic.value for topic in Topic] == ["costs", "plan", "solve", "federate", "move", "introduce"]


def test_who_waits_for_a_solver_waits_longer_than_it_may_take() -> None:
    assert solving_patience_s(0.0) == ANSWER_S and solving_patience_s(10.0) > ANSWER_S + 10.0


@pytest.mark.process
def test_the_supervisor_carries_no_tls_and_no_planner_for_it() -> None:
    heavy = (
        "port_agent.peers.connection.link",
        "port_agent.peers.exchange.exchange",
        "port_planner.search",
        "port_planner.ir.bundle",
    )
    program = f"import sys, port_agent.supervisor.daemon; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
