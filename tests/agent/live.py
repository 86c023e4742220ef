"""Run a real daemon with the pure-Python worker: in this process for tests, as a program for kills and benchmarks.

python -m tests.agent.live STATE_DIR RUNTIME_DIR CONFIG SYSFS_ROOT
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from port_agent.jobs.job import JobKind
from port_agent.supervisor.context import DaemonSeams, Settings
from port_agent.supervisor.daemon import Daemon
from port_agent.supervisor.job.plan_choice import PlanFigures
from port_agent.supervisor.job.worker_kinds import BundleFacts, WorkerKind, no_environment
from port_planner.base.errors import PortError

WORKER = Path(__file__).with_name("worker_program.py")


OFFER_EVERY_S = 0.2


class BadBundleError(PortError):
    """A test bundle that is not a valid JSON."""


def read_json_plans(bundle: Path) -> BundleFacts:
    """Return the plans of a test bundle, its steps and the deadline it was planned for."""
    try:
        content = json.loads(bundle.read_text())
    except ValueError as error:
        raise BadBundleError(f"{bundle}: {error}") from error
    plans = enumerate(content.get("plans", []))
    figures = tuple(PlanFigures(i, p["peak_bytes"], p["seconds"], p["joules"]) for i, p in plans)
    return BundleFacts(
        figures,
        steps_per_epoch=content.get("steps"),
        deadline_at=content.get("deadline_at"),
        device_kind=content.get("device", "cpu"),
        reads_files=tuple(content.get("reads", ())),
    )


KINDS = {kind: WorkerKind((sys.executable, str(WORKER)), read_json_plans, no_environment) for kind in JobKind}


def seams(**changes: Any) -> DaemonSeams:
    """Return the seams of a test daemon: the test worker, quick looks."""
    values: dict[str, Any] = {"kinds": KINDS, "offer_every_s": OFFER_EVERY_S, "away_look_s": 0.2}
    values |= dict.fromkeys(("inbox_scan_s", "waiting_look_s", "training_look_s"), 0.1)
    return DaemonSeams(**{**values, **changes})


def main(argv: list[str]) -> int:
    """Serve until told to stop."""
    state, runtime, config, sysfs = (Path(word) for word in argv)
    try:
        asyncio.run(Daemon(Settings(state, runtime, config, sysfs), seams()).run())
    except PortError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
