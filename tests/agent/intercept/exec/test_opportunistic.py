"""`port-agent exec --opportunistic`: unchanged programs that a real daemon pauses, resumes, cancels and loses."""

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from port_agent.cli import main
from port_agent.control.client import ControlClient, ControlError
from port_agent.worker.protocol import ResumeTraining
from tests import waiting
from tests.agent.intercept.programs import OURS, beside_process, exec_words, plain
from tests.agent.live_daemon import CONFIG, start_agent
from tests.agent.supervisor.job.attached_program import attached
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree

pytestmark = pytest.mark.process

MIB = 1 << 20
PATIENCE_S = 120.0
WIDE, NARROW = 3000, 300

TRAIN = """
import sys, torch
torch.manual_seed(0)
rounds, steps, width = map(int, sys.argv[1:])
model = torch.nn.Sequential(torch.nn.Linear(1000, width), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(width, 1000))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(rounds):
    for _ in range(steps):
        loss = model(torch.randn(8, 1000)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
    sys.stdin.readline()
print(sum(p.sum().item() for p in model.parameters()).hex())
"""
"""At a width of 3,000 70 MiB of weights, gradients and state; asks for a line after each round, so that
a test keeps step with it.
"""


def until(condition: Callable[[], Any], explain: Callable[[], object] = lambda: "waited in vain") -> Any:
    """Return what `condition` gives once it is true; what the daemon answers while it starts is none."""

    def look() -> Any:
        with contextlib.suppress(ControlError):
            return condition()
        return None

    return waiting.until(look, explain, patience_s=PATIENCE_S)


class Rig:
    """A daemon with a plug, and programs that attach to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.client = root, ControlClient(root / "run")
        self.place = ["--runtime-dir", str(root / "run")]
        (root / "config.toml").write_text(CONFIG)
        self.plug(online=True)
        self.daemon = start_agent(root)
        self.programs: list[subprocess.Popen[str]] = []

    def plug(self, *, online: bool) -> None:
        battery = LAPTOP_BATTERY.format(status="Charging" if online else "Discharging", capacity=80)
        supply_tree(self.root / "sys", ACAD=MAINS.format(online=int(online)), BAT0=battery)

    def start(self, text: str, *words: object, name: str = "train") -> "subprocess.Popen[str]":
        (self.root / f"{name}.py").write_text(text)
        bound = (*beside_process(275), "--opportunistic", *self.place)
        pages = self.root / "pages"
        pages.mkdir(exist_ok=True)
        program = subprocess.Popen(
            [*exec_words(bound, pages), f"{name}.py", *map(str, words)],
            cwd=self.root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.root / f"{name}.err").open("w"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.programs.append(program)
        return program

    def said(self, name: str = "train") -> str:
        return (self.root / f"{name}.err").read_text()

    def run_of(self, name: str = "train") -> Any:
        """Return the run of that name, or None."""
        run = self.client.get("/v1/status")["job"]
        return run if run is not None and run["name"] == name else None

    def wait_for_training(self, name: str = "train") -> Any:
        return until(lambda: (run := self.run_of(name)) and run["phase"] == "training" and run, lambda: self.said(name))

    def wait_for_release(self) -> None:
        until(lambda: self.client.get("/v1/status")["job"] is None, lambda: self.client.get("/v1/status"))

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()
        self.daemon.terminate()
        self.daemon.wait(30.0)


@contextmanager
def rig(root: Path) -> Iterator[Rig]:
    made = Rig(root)
    try:
        yield made
    finally:
        made.close()


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def go_on(program: "subprocess.Popen[str]") -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def test_paused_by_plug_user_and_loss_of_the_daemon_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        program = it.start(TRAIN, 4, 6, WIDE)
        assert program.stdout is not None
        losses = [program.stdout.readline()]
        it.wait_for_training()
        full = resident(program.pid)

        it.plug(online=False)
        it.wait_for_release()
        assert resident(program.pid) < full - 50 * MIB
        go_on(program)  # into an operator, where it waits
        it.plug(online=True)
        losses.append(program.stdout.readline())

        go_on(program)
        it.wait_for_training()
        assert main(["pause", "train", *it.place]) == 0
        it.wait_for_release()
        assert resident(program.pid) < full - 50 * MIB
        assert it.client.get("/v1/jobs/train")["state"] == "paused"
        assert main(["resume", "train", *it.place]) == 0
        losses.append(program.stdout.readline())

        number = it.wait_for_training()["id"]
        it.daemon.kill()
        it.daemon.wait()
        until(lambda: "is offline; paused until it is back" in it.said())
        go_on(program)
        until(lambda: resident(program.pid) < full - 50 * MIB)
        it.daemon = start_agent(tmp_path)
        losses.append(program.stdout.readline())
        assert it.wait_for_training()["id"] == number
        rest, _ = program.communicate("\n")
        assert program.returncode == 0, it.said()
        assert until(lambda: (job := it.client.get("/v1/jobs/train"))["state"] == "finished" and job)["step"] == 24
        report = it.client.get("/v1/energy?since=0")
        row = next(row for row in report["jobs"] if row["name"] == str(number))
        assert row["steps"] > 0 and row["gross_joules"] > 0
        assert list((tmp_path / "pages").iterdir()) == []
        expected = plain("train.py", "4", "6", str(WIDE), folder=tmp_path, given="\n" * 4)
        assert "".join(losses) + rest == expected.output
        ours = [line.removeprefix(OURS) for line in it.said().splitlines()]
        assert (
            "paused: on battery 80 %" in ours and "paused: you paused the job" in ours and "the agent is back" in ours
        )


PAST_OPERATORS = {
    "an operator that takes long": """
x = torch.ones(3000, 3000)
stop = False
while not stop:
    stop = os.path.exists("stop")
    total = torch.linalg.matrix_power(x, 9).sum().item()
print(total)
""",
    "the interpreter's lock is held": """
x = torch.ones(5_000_000)
values = memoryview(x.numpy())
stop = False
while not stop:
    stop = os.path.exists("stop")
    total = sum(values[::512])
print(total, x.sum().item())
""",
    "the interpreter's lock is seldom given": """
sys.setswitchinterval(0.1)
x = torch.ones(5_000_000)
values = memoryview(x.numpy())
stop = False
while not stop:
    stop = os.path.exists("stop")
    total = sum(values[::512])
print(total, x.sum().item())
""",
    "a thread of the program": """
x = torch.ones(5_000_000)
values = x.numpy()
def add():
    global total
    stop = False
    while not stop:
        stop = os.path.exists("stop")
        total = values.sum()
thread = threading.Thread(target=add)
thread.start()
thread.join()
print(total)
""",
}


@pytest.mark.parametrize("what", PAST_OPERATORS)
def test_a_program_is_held_past_the_operators_too(what: str, tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        program = it.start("import os, sys, threading, torch\nprint('begins', flush=True)\n" + PAST_OPERATORS[what])
        assert program.stdout is not None
        program.stdout.readline()
        it.wait_for_training()
        until(lambda: waiting.used_ticks(program.pid) > 0)
        it.plug(online=False)
        it.wait_for_release()
        until(lambda: waiting.used_ticks(program.pid) == 0)
        assert "does not give" not in it.said()
        it.plug(online=True)
        it.wait_for_training()
        (tmp_path / "stop").touch()
        rest, _ = program.communicate()
        assert program.returncode == 0, it.said()
        assert "begins\n" + rest == plain("train.py", folder=tmp_path).output


def test_ctrl_c_ends_a_program_that_waits_where_it_touches_a_tensor(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        program = it.start(
            "import os, threading, torch\nprint('begins', flush=True)\n"
            + PAST_OPERATORS["the interpreter's lock is held"]
        )
        assert program.stdout is not None
        program.stdout.readline()
        it.wait_for_training()
        it.plug(online=False)
        it.wait_for_release()
        until(lambda: waiting.used_ticks(program.pid) == 0)
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=PATIENCE_S)
        assert program.returncode == -signal.SIGINT and "KeyboardInterrupt" in it.said(), it.said()


LOADS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        torch.manual_seed(i)
        return torch.randn(1000)
torch.manual_seed(0)
model = torch.nn.Linear(1000, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k, batch in enumerate(DataLoader(Rows(), 4, num_workers=2)):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
    if k == 1:
        sys.stdin.readline()
"""


@pytest.mark.long
def test_workers_of_a_loader_are_stopped_with_the_program(tmp_path: Path) -> None:
    def workers() -> list[psutil.Process]:
        return [p for p in psutil.Process(program.pid).children() if "train.py" in p.cmdline()]

    with rig(tmp_path) as it:
        program = it.start(LOADS)
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(2)]
        it.wait_for_training()
        stopped = workers()
        assert len(stopped) == 2
        it.plug(online=False)
        it.wait_for_release()
        until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in stopped))
        go_on(program)  # into an operator, where it waits
        it.plug(online=True)
        rest, _ = program.communicate()
        assert program.returncode == 0, it.said()
        assert "".join(lines) + rest == plain("train.py", folder=tmp_path, given="\n").output
        assert not any(p.is_running() for p in stopped)


@pytest.mark.long
def test_ctrl_c_while_workers_are_stopped_ends_all(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        program = it.start(LOADS)
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)]
        it.wait_for_training()
        children = psutil.Process(program.pid).children()
        it.plug(online=False)
        it.wait_for_release()
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=PATIENCE_S)
        assert program.returncode == -signal.SIGINT, it.said()
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children))


CLEANS_UP = """
import torch
x = torch.ones(1000, 1000)
print("begins", flush=True)
try:
    while True:
        x = x @ torch.eye(1000)
except KeyboardInterrupt:
    torch.save(x, "saved.pt")
    print("cleaned up", flush=True)
    raise
"""


def test_cancel_is_ctrl_c_for_the_program_also_while_it_waits(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        program = it.start(CLEANS_UP)
        assert program.stdout is not None and program.stdout.readline() == "begins\n"
        it.plug(online=False)
        it.wait_for_release()
        assert main(["cancel", "train", *it.place]) == 0
        rest, _ = program.communicate()
        assert (rest, program.returncode) == ("cleaned up\n", -signal.SIGINT), it.said()
        assert "KeyboardInterrupt" in it.said() and (tmp_path / "saved.pt").stat().st_size > 4_000_000
        until(lambda: it.client.get("/v1/jobs/train")["state"] == "cancelled")


def test_killed_it_leaves_nothing_and_the_next_program_runs(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        first = it.start(TRAIN, 10**6, 1, WIDE)
        assert first.stdout is not None
        first.stdout.readline()
        with attached(it.client.path, name="second") as second:
            assert second.heard == [] and it.run_of("train") is not None
            first.kill()
            assert "killed" in until(lambda: it.client.get("/v1/jobs/train")["reason"])
            second.wait_for(ResumeTraining)
        assert list((tmp_path / "pages").iterdir()) == []


def test_without_an_agent_or_a_size_it_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    for words, code, said in (
        (("--ram", "500M"), 3, "no agent is running"),
        (("--tensors", "1M"), 2, "--opportunistic needs --ram"),
    ):
        bound = (*words, "--opportunistic", "--runtime-dir", str(tmp_path / "nowhere"))
        done = subprocess.run(
            [*exec_words(bound, tmp_path), "train.py"], cwd=tmp_path, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (code, "") and said in done.stderr, done.stderr


@pytest.mark.long
def test_one_that_ignores_both_signals_is_held_for_good(tmp_path: Path) -> None:
    stubborn = "import signal\nfor n in (2, 15):\n    signal.signal(n, lambda *_: None)\n" + TRAIN
    with rig(tmp_path) as it:
        program = it.start(stubborn, 10**6, 10**6, WIDE)
        it.wait_for_training()
        until(lambda: it.run_of()["step"] > 0)
        assert main(["cancel", "train", *it.place]) == 0
        until(lambda: "does not end; kill it" in it.said())
        it.wait_for_release()
        assert waiting.used_ticks(program.pid) == 0


@pytest.mark.long
def test_two_hundred_pauses_leave_no_trace_in_the_bits(tmp_path: Path) -> None:
    pauses, numbers = 200, random.Random(7)
    with rig(tmp_path) as it:
        program = it.start(TRAIN, pauses + 1, 6, NARROW)
        assert program.stdout is not None
        losses = []
        for _ in range(pauses):
            losses.append(program.stdout.readline())
            it.wait_for_training()
            go_on(program)
            waiting.wait_until_drawn_moment(numbers, 0.1)
            it.plug(online=False)
            it.wait_for_release()
            it.plug(online=True)
        rest, _ = program.communicate("\n")
        assert program.returncode == 0, it.said()
        assert it.said().count("paused: ") == pauses
        expected = plain("train.py", str(pauses + 1), "6", str(NARROW), folder=tmp_path, given="\n" * (pauses + 1))
        assert "".join(losses) + rest == expected.output
