"""plan, show and train as a user runs them, on a small script in an empty directory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.system.checksum import bytes_checksum
from tests.agent.paired_agents import history, paired_agents

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from planner.job import TrainingJob

def loss_fn(model, x, y):
    out = model(x)
    return functional.cross_entropy(out, y), (out.argmax(1) == y).float().mean()

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = [torch.randn(20, 3, 16, 16), torch.randint(0, 10, (20,))]
    return TrainingJob(model, loss_fn, optimizer, data, 8, eval_data=[c[:6] for c in data])
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agent.cli", *words]


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text(SCRIPT)
    done = run(folder, "plan", "train.py", "--ram", "700M", "-o", "job.port", "--verify", "2", "--strategy", "greedy", "--medium", "sd", "--deadline", "3d", "--charging", "22:00-07:00", "--writes-per-step", "20M", "--epochs", "2", "--json", "--write-model", "model.lp")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def undisturbed(planned: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state, out = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("out") / "w.safetensors"
    done = run(planned[0], "train", "job.port", "--epochs", "3", "--out", str(out), "--state-dir", str(state), "--verify", "2", "--json", "--digest")  # fmt: skip
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**last, "weights": out.read_bytes()}


def test_plan_writes_its_model_where_asked(planned: tuple[Path, dict[str, Any]]) -> None:
    text = (planned[0] / "model.lp").read_text()
    assert text.startswith("\\ The planning model of a step") and "eq7_total_stall" in text


def test_plan_says_what_it_made(planned: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = planned
    assert facts["budget_bytes"] == 700 << 20
    assert 0 < facts["measured_peak_bytes"] <= facts["budget_bytes"]
    assert facts["planned_peak_bytes"] <= facts["budget_bytes"]
    assert (facts["threads"], list(facts["step_s_by_threads"]), facts["steps"]) == (1, ["1"], 6)
    assert facts["limits"]["charging"] == ["22:00", "07:00"] and facts["limits"]["written_bytes"] == 20 << 20
    assert 0.0 < facts["limits"]["step_s"] <= 27 * 3600 / 6 and facts["limits"]["deadline_at"] > 0.0
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("__")) == [
        "job.port",
        "model.lp",
        "train.py",
    ]


def test_show(planned: tuple[Path, dict[str, Any]]) -> None:
    facts = json.loads(run(planned[0], "show", "job.port", "--json").stdout)
    assert facts["planned_peak_bytes"] == planned[1]["planned_peak_bytes"]
    shown = run(planned[0], "show", "job.port")
    assert shown.returncode == 0 and "planned peak" in shown.stdout and "budget" in shown.stdout
    words = " ".join(shown.stdout.replace("│", " ").split())
    assert "training 22:00 to 07:00" in words and "20.0 MiB written a step" in words and "threads 1" in words
    assert facts["recordings"]["count"] == 3 and "3 times, varying the rows of the batch" in words
    assert facts["compared_steps"] == 2 and facts["compared_tensors"] > 0 and "equal to the bit" in words
    assert (facts["medium"], facts["endurance_bytes"], facts["flash_lasts_steps"]) == ("SD card", 19.2e12, None)
    missing = run(planned[0], "show", "job.port", "--plan", "5")
    assert missing.returncode != 0 and "no plan 5" in missing.stderr and "Traceback" not in missing.stderr


def test_train_writes_weights(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["event"] == "finished" and undisturbed["step"] == 9
    assert len(undisturbed["weights"]) > 4 * 2048 * 10


def test_ctrl_c_and_the_same_command_again(
    planned: tuple[Path, dict[str, Any]], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "w.safetensors"
    words = [
        "train",
        "job.port",
        "--epochs",
        "3",
        "--out",
        str(out),
        "--state-dir",
        str(tmp_path / "s"),
        "--json",
        "--digest",
    ]
    process = subprocess.Popen(
        command(*words), cwd=planned[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] == 2:
            process.send_signal(signal.SIGINT)
            break
    rest = [json.loads(line) for line in process.stdout]
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "goes on" in errors and "Traceback" not in errors
    done = [e["step"] for e in rest if e["event"] == "checkpoint"]
    assert not out.exists() and done and done[-1] < 9
    again = run(planned[0], *words)
    assert again.returncode == 0, again.stderr
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert events[0]["step"] == done[-1], "it goes on from the last checkpoint"
    assert events[-1]["digest"] == undisturbed["digest"]
    assert out.read_bytes() == undisturbed["weights"]


def test_a_budget_below_the_possible(planned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "plan", "train.py", "--ram", "20M", "-o", "job.port", "--strategy", "greedy")
    assert done.returncode == 2
    assert "raise" in done.stderr and "iB" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("__")] == ["train.py"], "nothing is left behind"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1", "port_job"),
        ("def port_job():\n    return 5", "returned int"),
        ("def port_job(:", "SyntaxError|invalid syntax"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
    ],
)
def test_scripts_that_describe_no_job(content: str, message: str, tmp_path: Path) -> None:
    import re

    (tmp_path / "train.py").write_text(content)
    done = run(tmp_path, "plan", "train.py", "--ram", "700M")
    assert done.returncode != 0 and re.search(message, done.stderr)
    assert not list(tmp_path.glob("*.port"))


def test_files_that_do_not_exist(tmp_path: Path) -> None:
    for words in (["plan", "none.py", "--ram", "1G"], ["show", "none.port"], ["train", "none.port"]):
        done = run(tmp_path, *words)
        assert (
            done.returncode == 2
            and "No such file or directory; name a file" in done.stderr
            and "Traceback" not in done.stderr
        )


def test_how_long_a_medium_lasts_that_does_not_wear_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("plan", "train.py", "--ram", "700M", "--flash-life", "3y", "--medium", "disk")
    done = run(tmp_path, *words)
    assert done.returncode == 2 and "does not wear out a disk that turns; name the --medium" in done.stderr


def test_several_media(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--page-dir", "card", "--page-dir", "stick", "--cpus", "1"]
    words = ["train.py", "--ram", "700M", "-o", "job.port", "--verify", "0", "--strategy", "greedy", "--json"]
    done = run(tmp_path, "plan", *words, *where)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["media"]) == 2
    done = run(tmp_path, "train", "job.port", "--steps", "2", *where)
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "plan", *words, *where, "--board", "pi5")
    assert done.returncode == 2 and "one medium" in done.stderr
    if Path("/dev/shm").is_dir():
        done = run(tmp_path, "plan", *words, *where, "--page-dir", "/dev/shm/port-agent-pages")
        assert done.returncode == 2 and "is itself in RAM (tmpfs)" in done.stderr


PAGING_SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from planner.job import TrainingJob

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(10) for part in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 4))
    data = [torch.randn(8192, 512), torch.randint(0, 4, (8192,))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainingJob(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, 8192)
"""


_ABOVE_FLOOR_MIB = 62


@pytest.mark.long
def test_pages_go_to_several_media_and_the_numbers_stay(tmp_path: Path) -> None:
    """What lives within a step goes to the faster second medium, weights and optimizer state to the first."""
    (tmp_path / "train.py").write_text(PAGING_SCRIPT)
    where = ["--page-dir", "card", "--page-dir", "stick"]
    digests, ram = [], "800M"
    for media in ([], where):
        words = ["train.py", "--ram", ram, "-o", "job.port", "--strategy", "greedy", "--flash-write", "50M", "--json"]
        done = run(tmp_path, "plan", *words, *media)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        written = [medium["written_bytes"] for medium in told["media"]]
        assert written == [0] if not media else min(written) > 8 << 20
        done = run(
            tmp_path, "train", "job.port", "--steps", "3", "--state-dir", f"state-{ram}", "--json", "--digest", *media
        )
        assert done.returncode == 0, done.stderr
        digests.append(json.loads(done.stdout.splitlines()[-1])["digest"])
        ram = f"{(told['floor_bytes'] >> 20) + _ABOVE_FLOOR_MIB}M"  # the process takes more where its code lies in large folios
    assert digests[0] == digests[1]


def test_more_cores_than_there_are(planned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for words in (["plan", "train.py", "--ram", "700M", "-o", str(tmp_path / "job.port")], ["train", "job.port"]):
        done = run(planned[0], *words, "--cpus", "9999")
        assert done.returncode == 2 and "--cpus 9999: this process may use 1 to " in done.stderr


def peered(folder: Path, runtime_dir: Path, *words: str) -> dict[str, Any]:
    """Plan with the agent in `runtime_dir`, costs kept in a cache of this folder's own; returns what `plan` says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    asked = command("plan", str(folder / "train.py"), "--ram", "700M", "--time-limit", "4s", "--verify", "0", *words)
    done = subprocess.run(
        [*asked, "--runtime-dir", str(runtime_dir), "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_planning_with_paired_devices(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
    with paired_agents(tmp_path, "share = true\nsolve = true", "share = true") as (attic, cellar):
        runs = attic.path.parent, cellar.path.parent
        refused = peered(tmp_path / "one", runs[0], "--solve-on", "cellar")["peers"]
        assert any(line.startswith("solved here: cellar: it solves for no other device") for line in refused)
        told = peered(tmp_path / "two", runs[1], "--solve-on", "any")["peers"]
        assert any("solved on attic" in line or "a plan of attic for the same step" in line for line in told), told
        assert any("operators from attic, a sample of them measured here too" in line for line in told), told
        for file in (tmp_path / "attic/state/shared/plan").iterdir():
            content = b"\x80\x04K\x01."
            file.write_bytes(bytes_checksum(content).encode() + b"\n" + content)
        told = peered(tmp_path / "two", runs[1])["peers"]
        assert any(line.startswith("attic gave a wrong answer and is cut off for a while: no plan") for line in told), (
            told
        )
        assert "attic: cut off for 5 minutes: no plan (5 bytes)" in history(cellar)
