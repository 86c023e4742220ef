"""Forks of a process that has loaded torch end in the same way as the processes that they replace."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.cli.plan.small_script import SCRIPT, run_forked
from tests.torch_forks import forks

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="a fork is handed over by Linux")]

SHOW = (sys.executable, "-m", "port_agent.cli", "show", "nothing.port")


def test_code_output_folder_and_environment_are_those_of_a_process(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(SHOW, cwd=tmp_path, env=environment, capture_output=True, text=True)
    with forks():
        fork = subprocess.run(SHOW, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 2 and "cannot read nothing.port" in process.stderr
    assert (fork.returncode, fork.stdout, fork.stderr) == (process.returncode, process.stdout, process.stderr)


def test_a_signal_ends_it_and_it_is_a_child_of_ours(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "port_agent.cli",
        "run",
        f"--state-dir={tmp_path}",
        f"--runtime-dir={tmp_path / 'run'}",
    ]
    with forks(), subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as agent:
        assert Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        assert b"tests.torch_forks" in Path(f"/proc/{agent.pid}/cmdline").read_bytes()
        agent.send_signal(signal.SIGKILL)
        assert agent.wait() == -signal.SIGKILL


def test_what_a_nested_one_starts_is_a_fork_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    started = tmp_path / "started"
    customized = f"import sys\nopen({str(started)!r}, 'a').write(' '.join(sys.orig_argv) + '\\n')"
    (tmp_path / "sitecustomize.py").write_text(customized)
    words = ("plan", "train.py", "--ram", "20M", "--strategy", "greedy")
    done = run_forked(tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "no plan fits" in done.stderr
    (process,) = started.read_text().splitlines()  # the one whose loading of torch is measured
    assert process.endswith("-m port_agent.system.torch_loading")
