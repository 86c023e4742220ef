"""A program that takes its limits before it begins: what it finds when it looks at itself."""

import json
import os
import resource
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.system.python_process import module_command, module_environment

pytestmark = pytest.mark.process

LOOK = """
import json, os, resource, sys
from pathlib import Path
def read(name):
    try: return Path(name).read_text().strip()
    except OSError: return None
found = {
    "words": sys.argv[1:], "nice": os.nice(0), "data": resource.getrlimit(resource.RLIMIT_DATA),
    "core": resource.getrlimit(resource.RLIMIT_CORE), "oom": read("/proc/self/oom_score_adj"), "pid": os.getpid(),
}
print(json.dumps(found))
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def launch(*words: str, program: str = LOOK) -> "subprocess.CompletedProcess[str]":
    """Run a program behind the launcher."""
    command = [
        *module_command("port_agent.system.exec_with_limits"),
        *words,
        "--",
        sys.executable,
        "-c",
        program,
        "-x",
        "--",
    ]
    return subprocess.run(command, capture_output=True, text=True, env=module_environment())


def found(*words: str) -> dict[str, Any]:
    done = launch(*words)
    assert done.returncode == 0, done.stderr
    look: dict[str, Any] = json.loads(done.stdout)
    return look


def test_the_program_gets_its_own_words_gives_way_and_leaves_no_core() -> None:
    look = found()
    assert look["words"] == ["-x", "--"] and look["core"] == [0, 0]
    assert look["nice"] == min(os.nice(0) + 10, 19)
    assert look["data"] == list(resource.getrlimit(resource.RLIMIT_DATA)), "no limit unless asked for"


@LINUX
def test_it_goes_first_when_the_machine_runs_out_of_memory() -> None:
    assert found()["oom"] == "800"


def test_a_limit_on_data_holds_from_the_first_allocation_and_can_be_widened_again() -> None:
    soft, hard = found("--data-limit", str(3 << 30))["data"]
    assert soft == 3 << 30 and hard == resource.getrlimit(resource.RLIMIT_DATA)[1]


@LINUX
def test_a_limit_that_is_too_small_stops_it() -> None:
    done = launch("--data-limit", str(64 << 20), program="x = bytearray(256 << 20)")
    assert done.returncode == 1 and "MemoryError" in done.stderr


def test_it_enters_its_group_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    assert (tmp_path / "cgroup.procs").read_text() == ""
    look = found("--cgroup", str(tmp_path))
    assert (tmp_path / "cgroup.procs").read_text() == str(look["pid"]), "the same process, before and after exec"


@pytest.mark.parametrize(
    ("words", "reason"), [(("--cgroup", "/no/such/group"), "No such file"), (("--data-limit", "much"), "invalid int")]
)
def test_what_cannot_be_limited_is_not_run(words: tuple[str, ...], reason: str) -> None:
    done = launch(*words)
    assert done.returncode != 0 and done.stdout == "" and reason in done.stderr


def test_a_program_that_is_not_there_is_said() -> None:
    command = [*module_command("port_agent.system.exec_with_limits"), "--", "/no/such/program"]
    done = subprocess.run(command, capture_output=True, text=True, env=module_environment())
    assert done.returncode == 1 and "No such file" in done.stderr


@LINUX
def test_it_does_not_outlive_who_started_it() -> None:
    """If the supervisor is killed, its worker receives SIGTERM."""
    middle = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    waiting = "import signal, sys; print('ready', flush=True); sys.stdin.read()"
    command = [*module_command("port_agent.system.exec_with_limits"), "--", sys.executable, "-c", waiting]
    with subprocess.Popen(
        [sys.executable, "-c", middle, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # gone already
        assert select.select([descriptor], [], [], 30.0)[0], "the worker is still there"
        os.close(descriptor)
