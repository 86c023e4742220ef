"""Costs of paired devices, as planning takes them: believed after a sample was measured here, and
one's own given in return.
"""

from pathlib import Path

import msgspec
import pytest

from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.peers import PlanPeers
from port_planner.profiling.kept_costs import KeptCost
from port_planner.profiling.shared_costs import pack_shared, unpack_shared
from tests.agent.prepare.other_device import Others
from tests.planner.steps import tiny_step

pytestmark = pytest.mark.process


def test_costs_are_given_taken_over_and_contradicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    graphs = {"step": tiny_step().graphs["step"]}
    others = Others()

    def profiled() -> list[str]:
        peers = PlanPeers(others, shares=True, solves=False)
        measured = MeasurementWorker().measure(graphs.values(), 1, 1.0, lambda stage, share: None, peers.costs(1))
        peers.judge_costs(1, measured)
        return peers.report()

    assert profiled() == ["operator costs measured here: attic: it has no such costs"]
    ((key, content),) = others.contents.items()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    (told,) = profiled()
    assert told.startswith("costs of ") and "operators from attic, a sample of them measured here too" in told
    costs = unpack_shared(content, 2e9) or unpack_shared(content, _measured_at(content))
    lies = {name: KeptCost(60.0, cost.workspace_bytes, cost.measured_at) for name, cost in costs.items()}
    for wrong, words in (
        (pack_shared(lies), "is reported to take 60 s"),
        (content[:-1], "not a table of operator costs"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"other {len(others.accused)}"))
        others.contents[key] = wrong
        (told,) = profiled()
        assert words in told and words in others.accused[-1]
    assert len(others.accused) == 2


def _measured_at(content: bytes) -> float:
    records: dict[str, list[float]] = msgspec.msgpack.decode(content)
    return max(record[2] for record in records.values()) + 1.0
