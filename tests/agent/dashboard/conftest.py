"""An agent for the page to show: a training job on a simulated board, without a daemon behind it."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from port_agent.dashboard.server import Dashboard
from port_agent.energy.report import ReportOptions, read_report
from port_agent.peers.announcement import Announcement
from port_agent.peers.sightings import Peer
from port_agent.peers.state import PublicState
from port_agent.supervisor.peers.peer_discovery import row
from port_planner.base.errors import PortError
from tests.agent.energy.simulated import write_afternoon

ATTIC = Peer(
    Announcement("3f09c1d2aa10", "attic-pi <b>", "Raspberry Pi 5 Model B Rev 1.0", "0.1.0", PublicState.TRAINING),
    ("192.168.1.23",),
    1000.0,
    1084.0,
)


def status(time_unix: float) -> dict[str, object]:
    """Return the status of an agent in the middle of a job."""
    job = {
        "id": 1, "name": "camera-net", "kind": "train", "phase": "training", "wish": "train", "pid": 4711, "step": 620,
        "total_steps": 900, "loss": 0.6125, "step_s": 2.01, "eta_s": 562.0, "plan": 1, "plans": 4,
        "planned_peak_bytes": 150 << 20, "memory_limit_bytes": 300 << 20, "peak_rss_bytes": 214 << 20,
        "planned_joules": 2980.7, "deadline_at": None,
    }  # fmt: skip
    waiting = {"id": 2, "name": "<b>imu</b>", "eta_s": 7200.0, "retry_in_s": None, "deadline_at": time_unix + 86400.0}
    return {
        "v": 1, "time": time_unix, "uptime_s": 7200.0, "state": "training", "may_train": True,
        "reasons": ["on mains", "idle for 14 min"], "codes": ["go"], "job": job, "running": [job], "waiting": [waiting],
        "paused_until": None, "next_window": None, "sleep": "held off while a job may run",
        "facts": {"power": "external", "battery_percent": 87.0, "temperature_c": 58.4, "throttled": "no"},
        "flash_written_today_bytes": 18_600_000_000, "flash_budget_bytes": 30_000_000_000,
        "energy": {
            "source": "ina3221", "kind": "measured", "watts": 5.43, "baseline_watts": 2.7, "job_gross_joules": 6612.0,
            "job_net_joules": 3340.0, "last_step_joules": 10.9, "last_step_planned_joules": 9.7,
        },
        "health": [{
            "code": "under-voltage", "severity": "warning", "title": "Supply voltage too low",
            "text": "the board saw less than 4.63 V", "remedy": "use a 5.1 V supply and a short cable",
        }],
        "mcus": [
            {"name": "Nordic nRF52840 DK (Cortex-M4F)", "port": "/dev/ttyACM0", "usb": "1366:1015", "serial": "683604527"},
            {"name": "simulator m0", "port": "/run/user/1000/port-agent/mcu/m0/port", "usb": None, "serial": None},
        ],
        "peers": [row(ATTIC, 1004.0)],
    }  # fmt: skip


NIGHT = (
    (80_000, "the agent started"),
    (79_990, "free to train, no job"),
    (60_000, "on battery 64 %"),
    (41_000, "the device is in use: last input 3 s ago (tty1)"),
    (36_000, "training"),
    (24_000, "76 °C is too hot (limit 75); resumes at 65 °C"),
    (23_000, "training"),
    (9_000, "the agent stopped"),
    (6_000, "the agent started"),
    (5_990, "training"),
)
"""What was so from how many seconds ago on."""


class FakeAgent:
    """Answers as the control socket does."""

    def __init__(self, folder: Path) -> None:
        self._ledger = folder / "energy.sqlite"
        self._end = write_afternoon(self._ledger)
        self._asked = 0
        self.wishes: list[tuple[str, dict[str, object]]] = []
        self.dead = False

    def get(self, path: str) -> object:
        """Return the JSON at `path`."""
        self._check_alive()
        address = urlsplit(path)
        if address.path == "/v1/status":
            self._asked += 1
            return status(self._end - 60 + 2 * self._asked)
        if address.path == "/v1/jobs":
            job = {"id": 1, "name": "camera-net", "state": "running", "reason": "", "step": 620, "total_steps": 900,
                   "loss": 0.6125, "eta_s": 562.0}  # fmt: skip
            waiting = job | {
                "id": 2,
                "name": "<b>imu</b>",
                "state": "waiting_data",
                "step": 0,
                "loss": None,
                "eta_s": None,
            }
            return {"v": 1, "jobs": [job, waiting]}
        if address.path == "/v1/why":
            return {
                "v": 1,
                "entries": [{"at": time.time() - ago_s, "text": text, "codes": []} for ago_s, text in NIGHT],
            }
        raise AssertionError(f"the page asked for {path}")

    def post(self, path: str, **fields: object) -> object:
        """Note what was asked for."""
        self._check_alive()
        self.wishes.append((path, fields))
        return {"v": 1}

    def _check_alive(self) -> None:
        if self.dead:
            raise PortError("no agent is listening at /run/port-agent/control.sock; start it with systemctl")

    def energy(self, query: Mapping[str, str]) -> Mapping[str, object]:
        """Return the energy report."""
        assert query.keys() == {"since"}
        return read_report(self._ledger, ReportOptions(), self._end).as_dict()


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> FakeAgent:
    """Give an agent with a ledger."""
    return FakeAgent(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def dashboard(agent: FakeAgent) -> Iterator[Dashboard]:
    """Give the page of that agent, being served."""
    page = Dashboard(agent, agent.energy, 0)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    yield page
    agent.dead = False
    page.stop()
    thread.join()
