"""A ledger of an afternoon on a small board, written by the real meter from a simulated sensor and worker."""

import math
from pathlib import Path

from port_agent.energy.ledger import Ledger
from port_agent.energy.meter import EnergyMeter, MeterSeams
from port_agent.energy.report import EnergyReport, ReportOptions, read_report
from port_agent.energy.sources.estimated import PowerModel
from port_agent.energy.sources.registry import EnergyConfig, SourceChoice
from port_agent.energy.wear_account import WearAccount
from port_agent.worker.protocol import CheckpointWritten, StepDone, WorkerPaused, WorkerResumed
from tests.agent.energy.recordings import ScriptedSource

START_UNIX = 1_762_160_400.0
IDLE_WATTS = 2.7
MODEL = PowerModel("simulated board", IDLE_WATTS, 6.4, 2e-9, 4e-9)


class Afternoon:
    """Half an hour idle, a paging job of six epochs with a pause and a dead sensor, a quick second job, idle again."""

    def __init__(self, path: Path) -> None:
        self.now_s = 500.0
        self.source = ScriptedSource("ina3221")
        self.source.value = IDLE_WATTS
        seams = MeterSeams(self.unix, lambda: 0.02)
        ledger, self.wear = Ledger(path, self.unix()), WearAccount(self.unix)
        choice = SourceChoice((self.source,), ())
        self.meter = EnergyMeter(choice, ledger, EnergyConfig(), MODEL, seams=seams, wear=self.wear)

    def unix(self) -> float:
        """Return the wall-clock time of this afternoon."""
        return START_UNIX + self.now_s

    def idle(self, seconds: float) -> None:
        """Let nothing happen."""
        self.source.value = IDLE_WATTS
        for _ in range(int(seconds / 10)):
            self.now_s += 10
            self.meter.tick(self.now_s)

    def train(self, job: str, first: int, steps: int, epoch: int, wall_s: int = 2, paged: int = 30_000_000) -> None:
        """Run steps; the sensor stays as the test set it if it is broken."""
        for number in range(first, first + steps):
            for _ in range(wall_s):
                self.now_s += 1
                if not isinstance(self.source.value, str):
                    self.source.value = 5.4 + 0.5 * math.sin(number / 9) + (0.4 if number % 50 < 4 else 0)
                self.meter.tick(self.now_s)
            share = {
                "forward": 0.27,
                "backward": 0.47,
                "update": 0.05,
                "recompute": 0.09,
                "stall": 0.07,
                "packing": 0.02,
            }
            event = StepDone(
                step=number,
                epoch=epoch,
                loss=2.3 * math.exp(-number / 400) + 0.2,
                wall_s=float(wall_s),
                cpu_s=float(wall_s),
                phases_s={k: v * wall_s for k, v in share.items()} | {"page_in": 0.5, "page_out": 0.6},
                paged_in_bytes=paged,
                paged_out_bytes=paged,
                planned_s=1.9,
                planned_joules=9.7,
            )
            self.meter.on_event(job, event, self.now_s)
            self.wear.add(paged)

    def run(self) -> None:
        """Write the whole afternoon."""
        self.idle(1800)
        self.meter.on_worker_start("1", self.now_s, "1 (camera-net)")
        for epoch in range(6):
            if epoch == 2:
                self.meter.on_event("1", WorkerPaused(step=300), self.now_s)
                self.idle(600)
                self.meter.on_event("1", WorkerResumed(step=300), self.now_s)
            if epoch == 4:
                self.source.value = "no answer from the bus"
                self.train("1", epoch * 150, 100, epoch)
                self.source.value = 5.0
                self.train("1", epoch * 150 + 100, 50, epoch)
            else:
                self.train("1", epoch * 150, 150, epoch)
            self.meter.on_event("1", CheckpointWritten(step=1, bytes=45_000_000, wall_s=1.0), self.now_s)
            self.wear.add(45_000_000)
        self.meter.on_worker_stop("1", self.now_s)
        self.idle(900)
        self.meter.on_worker_start("2", self.now_s, "2 (imu)")
        self.train("2", 0, 400, 0, wall_s=1, paged=0)
        self.meter.on_worker_stop("2", self.now_s)
        self.idle(1200)
        self.meter.close(self.now_s)


def write_afternoon(path: Path) -> float:
    """Write the ledger to `path` and return the Unix time at which it ends."""
    afternoon = Afternoon(path)
    afternoon.run()
    return afternoon.unix()


def priced_report(path: Path, now_unix: float) -> EnergyReport:
    """Return the report on that afternoon, with prices."""
    options = ReportOptions(
        price_per_kwh=0.36,
        currency="EUR",
        co2_grams_per_kwh=360.0,
        flash_endurance_bytes=10**13,
        flash_bytes_per_day=10**10,
    )
    return read_report(path, options, now_unix)
