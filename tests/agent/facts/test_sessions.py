"""What a desktop says of its user reaches the agent by the times of a file, and no longer than its helper lives."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from port_agent.facts import Answer, OwnUse
from port_agent.facts.linux import LinuxPlatform
from port_agent.facts.sessions import (
    MAX_SILENCE_S,
    MONITORS,
    IdleMonitor,
    SessionError,
    SessionHelper,
    ask_desktop,
    ask_x_server,
    session_file,
    session_stamps,
)
from port_agent.facts.sysfs import Tree
from tests.agent.facts.machines import OPTIONS, fake_program, linux, on_path
from tests.waiting import until

GNOME, KDE = MONITORS


class Desktop:
    """Answers for one service, or not at all."""

    def __init__(self, monitor: IdleMonitor, idle_s: float | None) -> None:
        self.monitor, self.idle_s = monitor, idle_s

    def __call__(self, monitor: IdleMonitor) -> float | None:
        return self.idle_s if monitor is self.monitor else None


def answer(platform: LinuxPlatform, now_s: float) -> Answer:
    signals = platform.read(OPTIONS, OwnUse(), now_s).idle_signals
    return next(signal.idle for signal in signals if signal.name == "session")


@pytest.mark.parametrize("monitor", MONITORS)
def test_an_input_is_seen_and_forgotten_after_a_minute(tmp_path: Path, monitor: IdleMonitor) -> None:
    platform, shared = linux(tmp_path), tmp_path / "dev/shm"
    shared.mkdir(parents=True)
    assert answer(platform, 0.0) is Answer.UNKNOWN
    desktop = Desktop(monitor, 295.0)
    helper, now = SessionHelper(desktop, ()), time.time()
    with session_file(shared) as file:
        helper.look(file, now - 5.0)
        desktop.idle_s = 300.0
        helper.look(file, now)
        assert answer(platform, 1.0) is Answer.YES
        desktop.idle_s = 305.4  # what an answer takes differs
        helper.look(file, now + 5.0)
        assert answer(platform, 2.0) is Answer.YES, "no input, though the answers differ a little"
        desktop.idle_s = 0.2
        helper.look(file, now + 10.0)
        assert answer(platform, 3.0) is Answer.NO
        desktop.idle_s = 70.0
        helper.look(file, now + 80.0)
        assert answer(platform, 73.0) is Answer.YES
        desktop.idle_s = None  # the desktop hangs: nothing new is said
        helper.look(file, now + 85.0)
        assert answer(platform, 78.0) is Answer.YES
    assert not list(shared.iterdir())
    assert answer(platform, 79.0) is Answer.UNKNOWN, "a session that ended says nothing"


def test_a_helper_that_hangs_or_was_killed_says_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    with session_file(shared) as file:
        desktop = Desktop(GNOME, 5.0)
        helper = SessionHelper(desktop, ())
        helper.look(file, time.time() - 5.0)
        desktop.idle_s = 10.0
        helper.look(file, time.time())
        (stamp,) = session_stamps(Tree(dev=tmp_path), time.time()).values()
        assert time.time() - stamp == pytest.approx(10.0, abs=5.0)
        for wall_s in (time.time() + MAX_SILENCE_S + 1.0, time.time() - MAX_SILENCE_S - 1.0):  # also by another clock
            assert session_stamps(Tree(dev=tmp_path), wall_s) == {}


@pytest.mark.parametrize("unit_s", [0.0, 0.001])
def test_a_desktop_that_does_not_count_is_not_believed(tmp_path: Path, unit_s: float) -> None:
    """It answers 0 whatever is done, as KDE on Wayland does, or in seconds what is read as milliseconds."""
    shared = tmp_path / "shm"
    shared.mkdir()
    desktop = Desktop(KDE, 0.0)
    helper, now = SessionHelper(desktop, ()), time.time()
    with session_file(shared) as file:
        begun_s = os.fstat(file).st_mtime
        for number in range(20):
            desktop.idle_s = 5.0 * number * unit_s
            helper.look(file, now + 5.0 * number)
        assert os.fstat(file).st_mtime == begun_s, "whoever logged in was there, and no more is known"
        assert session_stamps(Tree(dev=tmp_path), begun_s + MAX_SILENCE_S + 1.0) == {}


def test_other_files_there_are_nobody(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm/sem.other").touch()
    (tmp_path / "shm/port-agent-session-gone").symlink_to("nowhere")
    tree = Tree(dev=tmp_path)
    assert session_stamps(tree, time.time()) == {} and not tree.take_faults()


def test_servers_are_asked_before_desktops(tmp_path: Path) -> None:
    """They count input themselves; some desktops beside them answer for their screen savers, in seconds."""
    (tmp_path / "shm").mkdir()
    idle_s, now = [0.0], time.time()
    helper = SessionHelper(Desktop(KDE, 0.0), (lambda: None, lambda: idle_s[0]))
    with session_file(tmp_path / "shm") as file:
        for idle_s[0] in (0.0, 5.0, 10.0):
            helper.look(file, now + idle_s[0])
        assert os.fstat(file).st_mtime == pytest.approx(now, abs=0.01)


def test_no_x_server_answers_for_a_wayland_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":4711")
    assert ask_x_server() is None, "nobody listens there"
    monkeypatch.delenv("DISPLAY")
    assert ask_x_server() is None


@pytest.mark.process
@pytest.mark.slow
def test_a_real_x_server_says_when_the_pointer_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("Xvfb") is None or shutil.which("xdotool") is None:
        pytest.skip("needs Xvfb and xdotool (Debian: apt-get install xvfb xdotool libxss1)")
    ours, theirs = os.pipe()
    with subprocess.Popen(
        ["Xvfb", "-displayfd", str(theirs), "-noreset", "-nolisten", "tcp"],
        pass_fds=[theirs],
        stderr=subprocess.DEVNULL,
    ) as server:
        os.close(theirs)
        with os.fdopen(ours) as line:
            monkeypatch.setenv("DISPLAY", f":{line.readline().strip()}")
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        until(lambda: (idle_s := ask_x_server()) is not None and idle_s > 0.5)
        monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
        assert ask_x_server() is None
        monkeypatch.delenv("WAYLAND_DISPLAY")
        places = itertools.count(100)

        def is_seen_to_move() -> bool:
            subprocess.run(["xdotool", "mousemove", str(next(places)), "100"], check=True)
            idle_s = ask_x_server()
            return idle_s is not None and idle_s < 0.5

        until(is_seen_to_move)
        server.terminate()
    assert ask_x_server() is None


def test_a_session_without_a_desktop_is_said() -> None:
    with pytest.raises(SessionError, match=f"nor {GNOME.service} nor {KDE.service} on this session's bus answers"):
        SessionHelper(Desktop(GNOME, None), ())


@pytest.mark.process
def test_busctl_is_asked_for_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path)
    fake_program(tmp_path, "busctl", f'echo "$*" > {tmp_path}/asked; echo "t 90500"')
    assert ask_desktop(GNOME) == 90.5
    words = (GNOME.service, GNOME.path, GNOME.interface, "GetIdletime")
    assert (tmp_path / "asked").read_text().split() == ["--user", "--auto-start=no", "call", *words]
    fake_program(tmp_path, "busctl", 'echo "Call failed: The name is not activatable" >&2; exit 1')
    assert ask_desktop(KDE) is None
    (tmp_path / "busctl").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_desktop(KDE) is None


@pytest.mark.process
def test_the_command_leaves_word_until_it_is_ended(tmp_path: Path) -> None:
    """The program as the unit runs it, with a desktop that answers, and another place for its file."""
    from tests.agent.live_daemon import until

    fake_program(tmp_path, "busctl", 'echo "u 1000"')

    async def run() -> None:
        program = (
            "import sys; from pathlib import Path; from port_agent import cli; from port_agent.cli import session\n"
            "session.SHARED_MEMORY = Path(sys.argv[1]); sys.exit(cli.main(['session']))"
        )
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        (tmp_path / "shm").mkdir()
        command = (sys.executable, "-c", program, str(tmp_path / "shm"))
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        await until(lambda: bool(session_stamps(Tree(dev=tmp_path), time.time())))
        process.terminate()
        assert await process.wait() == 0 and not list((tmp_path / "shm").iterdir())

    asyncio.run(run())
