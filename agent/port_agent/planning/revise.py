"""Plan a bundle again alongside the worker that runs it: `python -m port_agent.planning.revise`.

The agent runs it in a separate process, on this device or, if the owner chose one, with a paired device that solves.
"""

import os
import sys
from pathlib import Path

import msgspec

from port_agent.control.client import ControlClient
from port_agent.control.peer_exchange import PeerExchange
from port_agent.prepare.peer_plans import PeerPlans
from port_agent.supervisor.job.plan_revision import RevisedPlans, RevisionRequest
from port_agent.system.helper_process import helper_exit_code, requests, send_event
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import write_revision
from port_planner.search.pareto import choice_of
from port_planner.search.revise_plans import revise, solved_here

_MIN_NICE = 19


def make_revision(request: RevisionRequest) -> RevisedPlans:
    """Write the revision and return its savings; raises PortError, OSError."""
    bundle = Bundle(Path(request.bundle))
    solve, peers, solving = solved_here, None, request.solving
    if solving is not None:
        client = ControlClient(Path(solving.runtime_dir))
        peers = PeerPlans(PeerExchange(client, solving.peer), shares=False, solves=True)
        solve = peers.solved
    revision = revise(bundle, request.speeds, solve=solve)
    write_revision(Path(request.out), revision)
    old = choice_of(0, bundle.plans[request.plan], bundle.graphs, revision.costs, bundle.manifest.accumulate)
    new = revision.choices[request.plan]
    return RevisedPlans(
        old.joules + old.wear_joules,
        new.joules + new.wear_joules,
        old.written_bytes,
        new.written_bytes,
        tuple(peers.report()) if peers is not None else (),
    )


def main() -> int:
    """Execute the request and send the savings; return the exit code."""
    os.nice(_MIN_NICE)
    request = next(requests(msgspec.json.Decoder(RevisionRequest)))
    return helper_exit_code(lambda: send_event(make_revision(request)))


if __name__ == "__main__":
    sys.exit(main())
