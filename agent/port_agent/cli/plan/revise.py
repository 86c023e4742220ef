"""Make the plans of a bundle again beside the worker that runs it: `python -m port_agent.cli.plan.revise BUNDLE ...`.

Run by the agent in a process of its own, on this device or, where the owner named one, with a paired device that solves.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from port_agent.control.client import ControlClient
from port_agent.control.peer_exchange import PeerExchange
from port_agent.prepare.peer_plans import PeerPlans
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import write_revision
from port_planner.ir.costs import Speeds
from port_planner.search.pareto import choice_of
from port_planner.search.revise import revise, solved_here

_LEAST_NICE = 19


def main(argv: Sequence[str] | None = None) -> int:
    """Write the revision and print what it saves as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="port_agent.cli.plan.revise")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", type=int, default=0, help="the plan that is in use")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of compute over those planned")
    parser.add_argument("--read", type=float, help="bytes per second")
    parser.add_argument("--write", type=float, help="bytes per second")
    parser.add_argument("--solve-on", metavar="PEER", help="a paired device, or any")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="of the agent that asks it")
    told = parser.parse_args(argv)
    os.nice(_LEAST_NICE)
    try:
        bundle = Bundle(told.bundle)
        solve, peers = solved_here, None
        if told.solve_on is not None:
            peers = PeerPlans(PeerExchange(ControlClient(told.runtime_dir), told.solve_on), shares=False, solves=True)
            solve = peers.solved
        revision = revise(bundle, Speeds(told.compute, told.read, told.write), solve=solve)
        write_revision(told.out, revision)
    except (PortError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    old = choice_of(0, bundle.plans[told.plan], bundle.graphs, revision.costs, bundle.manifest.accumulate)
    new = revision.choices[told.plan]
    sys.stdout.write(
        json.dumps({"old": asdict(old), "new": asdict(new), "peers": peers.told() if peers is not None else []}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
