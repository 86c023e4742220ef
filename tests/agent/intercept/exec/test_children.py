"""Stopping a program's children and letting them go on, also where the program is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from port_agent.intercept.exec.children import Children
from tests.waiting import until

pytestmark = pytest.mark.process

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
PARENT = [sys.executable, "-S", "-c", f"import subprocess; subprocess.run({SLEEPER!r})"]

KILLED = """
import signal, subprocess, sys, os
from port_agent.intercept.exec.children import Children
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
Children().stop()
print(child.pid, flush=True)
signal.pause()
"""


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.mark.skipif(sys.platform != "linux", reason="looks at states in /proc")
def test_children_and_theirs_are_stopped_and_go_on() -> None:
    with subprocess.Popen(PARENT) as parent, subprocess.Popen(SLEEPER) as other:
        process = psutil.Process(parent.pid)
        until(lambda: process.children())
        (grandchild,) = process.children()
        family = [parent.pid, grandchild.pid, other.pid]
        children = Children()
        assert children.stop() >= len(family)
        until(lambda: all(map(stopped, family)))
        count = children.stop()
        assert count >= len(family), "again changes nothing"
        children.go_on()
        until(lambda: not any(map(stopped, family)))
        left = {child.pid for child in psutil.Process(os.getpid()).children()}
        assert children.stop() >= len(family)
        other.kill()
        children.go_on()
        assert {child.pid for child in psutil.Process(os.getpid()).children()} <= left, "the guard is gone"
        grandchild.kill()
        parent.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at states in /proc")
def test_who_is_killed_meanwhile_leaves_nobody_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        until(lambda: stopped(child))
        program.send_signal(signal.SIGKILL)
        until(lambda: not stopped(child))
        os.kill(child, signal.SIGKILL)


def test_a_process_without_children_stops_none(tmp_path: Path) -> None:
    code = "from port_agent.intercept.exec.children import Children; c = Children(); print(c.stop()); c.go_on()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
