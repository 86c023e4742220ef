"""`--place` names devices or teams of threads, by numbers and by the clusters that the kernel tells of."""

from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.facts.cpu_clusters import CpuCluster
from port_agent.planning import placement
from port_agent.planning.placement import names_teams, wanted_teams
from port_agent.planning.request import RequestError
from port_planner.ir.devices.cpu_teams import CpuTeam

BIG = CpuCluster((4, 5, 6, 7), "Cortex-A76", 2.4e9, 1024)
LITTLE = CpuCluster((0, 1, 2, 3), "Cortex-A55", 1.8e9, 400)


@pytest.fixture(autouse=True)
def rock5(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board with two clusters."""
    monkeypatch.setattr(placement, "read_clusters", lambda tree, usable: (BIG, LITTLE))
    monkeypatch.setattr(placement, "usable_core_numbers", lambda: frozenset(range(8)))
    monkeypatch.setattr(placement, "usable_cores", lambda: 8)


def test_teams_are_numbers_of_threads_and_clusters() -> None:
    assert not wanted_teams(None) and not wanted_teams("cuda") and not names_teams("cpu")
    assert wanted_teams("cpu:1,cpu:8") == (CpuTeam(1), CpuTeam(8))
    assert wanted_teams("cpu:4xA76,cpu:2xcortex-a55") == (CpuTeam(4, BIG.cores), CpuTeam(2, LITTLE.cores))
    assert wanted_teams("cpu:1xcluster1,cpu:4xcluster2") == (CpuTeam(1, BIG.cores), CpuTeam(4, LITTLE.cores))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("cpu:1", "among 2 to 16 teams, such as cpu:1,cpu:8"),
        ("cpu:1,cpu:1", "among 2 to 16 teams"),
        ("cpu:9,cpu:1", "there are 8 such cores"),
        ("cpu:5xA76,cpu:1", "there are 4 such cores"),
        ("cpu:0,cpu:1", "from 1 to 8"),
        ("cpu:4xA72,cpu:1", "no cluster A72; the kernel reports cluster1, 4 x Cortex-A76 at 2.4 GHz"),
        ("cpu:4xcluster3,cpu:1", "no cluster cluster3"),
        ("cpu:four,cpu:1", "a team is cpu:N, or cpu:NxCLUSTER"),
    ],
)
def test_teams_that_cannot_be_are_refused(place: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        wanted_teams(place)


def test_what_does_not_go_with_teams_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("def port_job(): ...")
    for words, said in (
        (["--threads", "2"], "sets the numbers of threads"),
        (["--board", "pi5"], "only one core of an unavailable board is known"),
    ):
        assert main(["plan", str(script), "--ram", "900M", "--place", "cpu:1,cpu:2", *words]) != 0
        assert said in capsys.readouterr().err
