"""The energy meter as the supervisor sees it."""

from collections.abc import Mapping
from dataclasses import asdict

from agent.energy.meter import EnergyMeter as Counter
from agent.energy.meter import open_meter as open_counter
from agent.energy.metrics import energy_metrics_text
from agent.policy.config import Config
from agent.supervisor.context import MeterView, Settings


def open_meter_view(config: Config, settings: Settings) -> MeterView:
    """Return this machine's meter; raises PortError or OSError when its settings or its ledger are unusable."""
    counter = open_counter(settings.state_dir, config.energy)
    return MeterView(
        meter=counter,
        snapshot=lambda: counter.snapshot().as_dict(),
        metrics=lambda: energy_metrics_text(counter),
        issues=lambda: _issues(counter),
        events=counter.take_events,
        flush=counter.flush,
    )


def _issues(counter: Counter) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for issue in counter.health():
        values: Mapping[str, object] = asdict(issue)
        found.append(
            {
                "code": values["code"],
                "key": "",
                "severity": values["severity"],
                "title": "energy metering",
                "text": values["text"],
                "remedy": values["remedy"],
                "since": values["since_unix"],
            }
        )
    return found
