"""`port-agent peer federate`: what it says, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.cli.arguments import UsageError
from port_agent.cli.peers.federate import _STRATEGIES, _lines, _plot, _spent
from port_agent.federate.orders import ServerStrategy, StrategySettings
from tests.agent.federate.agents import local_devices
from tests.agent.federate.jobs import gestures_bundle, needs_flower

RUN: dict[str, Any] = {
    "job": 1, "name": "digits", "kind": "train", "state": "running", "done": 1, "abandoned": 1, "waits": "", "training": ["this device", "cellar"], "awaited": {"cellar": "not reached: it is not connected"},
    "weights": "/state/global.safetensors", "without": ["shed"], "settings": {"rounds": 20, "secure": False, "clip": 1.5, "noise": 0.8},
    "history": [
        {"number": 1, "seconds": 12.0, "devices": 2, "loss": 0.5, "abandoned": "", "lost": {"shed": "no reply in time"}, "names": ["this device", "cellar"]},
        {"number": 2, "seconds": 60.0, "devices": 0, "loss": None, "abandoned": "1 of 3 devices replied", "lost": {}, "names": []},
    ],
}  # fmt: skip


def test_a_federation_in_words() -> None:
    assert _lines(RUN) == [
        "Job 1 (digits): running, 1 of 20 rounds, 1 abandoned. Changes clipped to 1.5, noise 0.8: epsilon 5.68 at "
        "delta 1e-05 for each device's data (its change in the average, or none), against all but this leader, over 1 "
        "round.",
        "  now: round 2 on this device, cellar",
        "  waiting for cellar: not reached: it is not connected",
        "  round 1: 2 devices in 12.0 s, loss 0.5000; without shed (no reply in time)",
        "  round 2: abandoned after 1 min 00 s: 1 of 3 devices replied",
        "  weights: /state/global.safetensors; on each device: port-agent job result digits -o FILE",
        "  shed: has not received these weights; lead another round to bring them",
    ]
    waiting = {**RUN, "training": [], "waits": "1 of 2 devices are ready; cellar: not charging", "history": []}
    assert _lines(waiting)[1] == "  waiting: 1 of 2 devices are ready; cellar: not charging"


def test_one_federation_is_drawn(tmp_path: Path) -> None:
    _plot([RUN], tmp_path / "rounds.svg")
    drawn = (tmp_path / "rounds.svg").read_text()
    assert "digits: 1 of 20 rounds" in drawn and "round 1: shed, no reply in time" in drawn
    with pytest.raises(UsageError, match="name its JOB, of digits, digits"):
        _plot([RUN, RUN], tmp_path / "rounds.svg")
    with pytest.raises(UsageError, match="does not lead this federation"):
        _plot([], tmp_path / "rounds.svg")


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        (None, ""),
        ({"epsilon": 0.0, "rounds": 0, "bare": 0, "budget": 8.0}, ""),
        (
            {"epsilon": 5.68, "rounds": 1, "bare": 0, "budget": None},
            "has spent epsilon 5.68 at delta 1e-05 in 1 round",
        ),
        ({"epsilon": 5.68, "rounds": 1, "bare": 0, "budget": 8.0}, "in 1 round, 2.32 left of 8"),
        ({"epsilon": None, "rounds": 1, "bare": 2, "budget": 8.0}, "was in 2 rounds without noise"),
    ],
)
def test_what_is_spent_in_words(privacy: dict[str, Any] | None, words: str) -> None:
    assert words in _spent(privacy) and bool(words) == bool(_spent(privacy))


def test_every_strategy_has_a_row_with_the_values_that_an_agent_takes_without_one() -> None:
    assert sorted(_STRATEGIES) == sorted(strategy.value for strategy in ServerStrategy)
    agents = StrategySettings()
    assert _STRATEGIES["fedadam"] == {"server_rate": 0.1, "server_betas": agents.betas, "server_tau": agents.tau}
    assert _STRATEGIES["fedavgm"] == {"server_rate": agents.rate, "server_momentum": agents.momentum}


@pytest.mark.process
@needs_flower
def test_started_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = gestures_bundle(tmp_path, 0)
    with local_devices(tmp_path, "attic") as (attic,):
        places = ["--runtime-dir", str(attic.root / "run")]

        def command(*words: str) -> str:
            main([*words, *places])
            note = capsys.readouterr()
            return note.out + note.err

        assert command("submit", str(bundle), "--name", "alone").startswith("Job 1 (alone) is queued")
        assert "waits for rounds" in command("submit", str(bundle), "--federated")
        assert "submit it with --federated here and on the other devices" in command(
            "federate", "start", "alone", "--rounds", "2"
        )
        for words, refusal in (
            (["--noise", "1.0"], "noise without --clip gives no privacy"),
            (["--secure", "--clip", "1"], "--secure and --clip cannot be combined yet"),
            (["--strategy", "fedavgm", "--clip", "1"], "--strategy fedavgm cannot be combined with --secure or --clip"),
            (
                ["--strategy", "fedadam", "--server-momentum", "0.5"],
                "--server-momentum does not apply to --strategy fedadam",
            ),
            (["--strategy", "fedprox"], "--strategy fedprox needs --proximal-mu"),
            (["--proximal-mu", "1"], "--proximal-mu does not apply to --strategy fedavg"),
            (
                ["--strategy", "fedprox", "--proximal-mu", "1"],
                "trains without a proximal term, and not 1; lead with another --strategy",
            ),
            (["--epsilon-budget", "8"], "without --noise every round spends the whole"),
            (["--secure"], "give --min-devices 3"),
            (["--min-share", "2"], "--min-share is 2"),
        ):
            assert refusal in command("federate", "start", "gestures0", "--rounds", "2", *words)
        assert "Leading a federation of job 2 (gestures0), 3 rounds" in command(
            "federate", "start", "gestures0", "--rounds", "3"
        )
        assert "is in progress; stop it with port-agent peer federate stop 2" in command(
            "federate", "start", "gestures0", "--rounds", "3"
        )
        assert "Job 2 (gestures0): running, 0 of 3 rounds" in command("federate", "status")
        assert "ended after 0 rounds" in command("federate", "stop", "gestures0")
        assert "stopped, 0 of 3 rounds" in command("federate", "status", "2")
        assert "no federation of job 2 (gestures0) is in progress" in command("federate", "stop", "2")
