"""Wrong arguments of every command: one line with cause and remedy, exit code 2, before anything is done."""

import argparse
import os
import re
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.cli.arguments import host_and_port, pause_duration, use_cores
from port_agent.control.requests import PauseRequest, decode_control_request
from port_agent.system import VERSION

SIZES = ("abc", "-5", "1e400", "", "0", "9" * 5000)
DURATIONS = ("99999999d", "abc", "1e400", "", "0", "nan")
MOMENTS = ("99999999d", "abc", "1e400", "", "5", "2001-01-01")
COUNTS = ("0", "-1", "abc", "1e400", "", "1.5", str(2**63))

CASES = [
    *[(("plan", "train.py", "--ram", text), "write it like 300M|such as 300M") for text in SIZES],
    *[(("train", "job.port", "--read-limit", text), "write it like 300M|such as 300M") for text in SIZES],
    *[(("mcu", "compile", "p", "--sparse-update", text), "write it like 300M|such as 300M") for text in SIZES],
    *[(("energy", "--endurance", text), "write it like 300M|such as 300M") for text in SIZES],
    *[
        (("plan", "train.py", "--ram", "1G", "--time-limit", text), "such as 90s|write it like 90s")
        for text in DURATIONS
    ],
    *[(("pause", "--for", text), "such as 90s|write it like 90s") for text in DURATIONS],
    *[(("plan", "train.py", "--ram", "1G", "--deadline", text), "write it like") for text in MOMENTS],
    *[(("frontier", "job.port", "--deadline", text), "write it like") for text in MOMENTS],
    *[(("submit", "job.port", "--deadline", text), "write it like") for text in MOMENTS],
    *[(("deadline", "1", text), "write it like") for text in MOMENTS],
    *[(("energy", "--since", text), "write it like") for text in ("99999999d", "abc", "1e400", "", "5", "2999-01-01")],
    *[(("plan", "train.py", "--ram", "1G", "--charging", text), "22:00-07:00") for text in ("", "22-7", "abc")],
    *[(("train", "job.port", "--epochs", text), "give 1 or more|from 1 to") for text in COUNTS],
    *[(("train", "job.port", "--steps", text), "give 1 or more") for text in (*COUNTS, "-5")],
    *[(("train", "job.port", "--checkpoint-every", text), "give 1 or more") for text in COUNTS],
    *[(("submit", "job.port", "--epochs", text), "give 1 or more") for text in COUNTS],
    *[(("mcu", "train", "job", "--snapshot-every", text), "give 1 or more") for text in COUNTS],
    (("mcu", "train", "job", "--shard", "4/3"), "write it as 2/3"),
    (("mcu", "train", "job", "--lr", "inf"), "not a valid number above zero"),
    (("priority", "1", "101"), "from -100 to 100"),
    (("dashboard", "--port", "65536"), "from 0 to 65535"),
    (("train", "job.port", "\x1b[2J"), r"unrecognized arguments: \\x1b\[2J"),
    (("plan",), "the following arguments are required"),
]


@pytest.fixture(autouse=True)
def files_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only the other arguments be wrong."""
    for name in ("train.py", "job.port", "job"):
        (tmp_path / name).touch()
    (tmp_path / "p").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "remedy"), CASES)
def test_one_line_with_the_remedy(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.count("\n") == 1 and said.endswith("--help\n") and len(said) < 320, said
    assert re.search(remedy, said), said


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux binds processes to cores")
def test_a_process_is_bound_to_so_many_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        use_cores(1)
        assert len(os.sched_getaffinity(0)) == 1 and os.sched_getaffinity(0) <= before
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.2", ("10.0.0.2", None)),
        ("attic.local:9479", ("attic.local", 9479)),
        ("fd00::7", ("fd00::7", None)),
        ("fe80::1%eth0", ("fe80::1%eth0", None)),
        ("[fe80::1%eth0]:9479", ("fe80::1%eth0", 9479)),
        ("[::1]", ("::1", None)),
    ],
)
def test_places_of_other_devices(text: str, place: tuple[str, int | None]) -> None:
    assert host_and_port(text) == place


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:65536", "a:b", "[::1", "::1]:2", "a b", "-x", "a/b", "²:1"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a valid address; write it like"):
        host_and_port(text)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"port-agent {VERSION}\n"


def test_what_the_agent_would_not_pause_for_is_refused_with_words() -> None:
    year_s = pause_duration("366d")
    assert decode_control_request({"for_s": year_s}, PauseRequest).for_s == year_s
    for text in ("366d1s", "2y"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"longer than a year; for no end"):
            pause_duration(text)
