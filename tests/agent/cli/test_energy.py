"""The command line: tables, plot, CSV, JSON, HTML, sources, and an agent asked over its socket."""

import csv
import functools
import io
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.cli.energy import _ask, has_screen
from port_agent.energy.attribution.one_job import Charge, EnergyPhase
from port_agent.energy.attribution.timeline import GpuShare
from port_agent.energy.ledger import FILE_NAME, Ledger
from port_agent.energy.report import ReportOptions, ReportQueryError, read_report, report_from_dict, report_from_query
from port_agent.energy.sources.power_source import Kind
from port_planner.base.errors import PortError
from tests.agent.energy.simulated import write_afternoon
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a state directory with a ledger."""
    folder = tmp_path_factory.mktemp("state")
    write_afternoon(folder / FILE_NAME)
    return folder


def run(capsys: pytest.CaptureFixture[str], state_dir: Path, *more: str) -> str:
    """Return what `port-agent energy` prints."""
    assert main(["energy", "--state-dir", str(state_dir), *more]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_tables_and_plot(capsys: pytest.CaptureFixture[str], state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = run(capsys, state_dir, "--price", "0.3", "--currency", "EUR", "--co2", "380")
    for part in ("power, W", "by job, measured", "1 (camera-net)", "(idle)", "page out", "+12%", "measured by ina3221: what the test says", "idle power 2.70 W",
                 "no answer from the bus", "profile-corrected", "CO2"):  # fmt: skip
        assert part in text
    assert "\x1b" not in text, "no colours into a file"


def test_json_and_csv(capsys: pytest.CaptureFixture[str], state_dir: Path) -> None:
    report = json.loads(run(capsys, state_dir, "--json"))
    rows = list(csv.DictReader(io.StringIO(run(capsys, state_dir, "--csv"))))
    total = next(row for row in rows if row["table"] == "total")
    assert float(total["gross_joules"]) == report["total"][0]["gross_joules"]
    assert {row["name"] for row in rows if row["table"] == "job"} == {"", "1", "2"}


def test_html(capsys: pytest.CaptureFixture[str], state_dir: Path, tmp_path: Path) -> None:
    run(capsys, state_dir, "--html", str(tmp_path / "report.html"))
    assert "uPlot=" in (tmp_path / "report.html").read_text()


def test_sources(capsys: pytest.CaptureFixture[str], state_dir: Path) -> None:
    rows = json.loads(run(capsys, state_dir, "--sources", "--json"))
    estimated = next(row for row in rows if row["name"] == "estimated")
    assert estimated["ok"] and estimated["info"]["kind"] == "estimated"
    text = run(capsys, state_dir, "--sources")
    assert text.count("(in use)") == 1 and "estimated, every 1 s: " in text


def test_no_ledger_says_when_there_will_be_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["energy", "--state-dir", str(tmp_path)]) == 1
    assert "it is created once the agent has run" in capsys.readouterr().err


def test_no_agent_says_how_to_start_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["energy", "--runtime-dir", str(tmp_path)]) == 3
    assert "no agent is running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--html", "/nonexistent/report.html"], 2, "cannot write /nonexistent/report.html: No such file"),
        (["--price", "-1"], 2, "'-1' is not a valid number above zero"),
        (["--co2", "nan"], 2, "'nan' is not a valid number above zero"),
        (["--endurance", "lots"], 2, "cannot read the size 'lots'"),
        (["--json", "--csv"], 2, "not allowed with argument --json"),
        (["--job", "99"], 0, "no figures of job 99"),
    ],
)
def test_bad_arguments_are_named(
    capsys: pytest.CaptureFixture[str], state_dir: Path, words: list[str], code: int, said: str
) -> None:
    try:
        result = main(["energy", "--state-dir", str(state_dir), *words])
    except SystemExit as error:  # argparse's own refusals
        result = int(error.code or 0)
    captured = capsys.readouterr()
    assert (result, said in captured.out + captured.err) == (code, True), captured


def test_without_an_agent_the_ledger_itself_is_read(
    capsys: pytest.CaptureFixture[str], state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("port_agent.control.places.SYSTEM_RUNTIME_DIR", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("port_agent.control.places.SYSTEM_STATE_DIR", state_dir)
    assert main(["energy", "--csv"]) == 0
    assert "job,1,measured," in capsys.readouterr().out
    monkeypatch.setattr("port_agent.control.places.SYSTEM_STATE_DIR", tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["energy", "--csv"]) == 3
    assert "no agent is running" in capsys.readouterr().err


@pytest.mark.process
def test_dashboard_command_serves_until_interrupted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "port_agent.cli",
        "dashboard",
        "--port",
        "0",
        "--no-browser",
        "--runtime-dir",
        str(tmp_path),
    ]
    # A test run in the background of a shell inherits an ignored SIGINT, and so would the dashboard.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    assert process.stdout is not None
    try:
        match = re.search(r"(http://127\.0\.0\.1:\d+/)#key=(\S+)", process.stdout.readline())
        assert match
        request = urllib.request.Request(f"{match[1]}api/status", headers={"Authorization": f"Bearer {match[2]}"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == 503
        assert "no agent is running" in json.loads(caught.value.read())["error"]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_report_over_the_wire_is_the_same(state_dir: Path) -> None:
    def get(path: str) -> object:
        """Answer as GET /v1/energy of the control server would, JSON in between."""
        from urllib.parse import parse_qsl, urlsplit

        address = urlsplit(path)
        assert address.path == "/v1/energy"
        return json.loads(json.dumps(report_from_query(state_dir / FILE_NAME, dict(parse_qsl(address.query)))))

    options = ReportOptions(job="1", price_per_kwh=0.3, currency="EUR", flash_bytes_per_day=10**9)
    there = _ask(get, options)
    here = read_report(state_dir / FILE_NAME, options, there.generated_unix)
    assert there == here
    assert report_from_dict(here.as_dict()) == here
    with pytest.raises(PortError, match=r"report cannot be read.*restart the agent"):
        report_from_dict({**here.as_dict(), "total": "much"})


def test_bad_query_is_refused(state_dir: Path) -> None:
    with pytest.raises(ReportQueryError, match="since='soon' is not a valid number"):
        report_from_query(state_dir / FILE_NAME, {"since": "soon"})


def test_what_the_gpu_took_has_a_row_by_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    now = 1_760_011_200.0
    ledger = Ledger(tmp_path / FILE_NAME, now)
    ledger.add_charges([Charge(now + 5, "3", EnergyPhase.FORWARD, Kind.MEASURED, 5.0, 60.0, None)], 0.0)
    ledger.add_gpu(now + 5, 5.0, GpuShare(20.0, "VDD_SYS_GPU, which feeds the GPU alone"), {"3": 1.0})
    ledger.close(now + 6)
    text = run(capsys, tmp_path)
    assert "GPU, within the above" in text and "20.00 J" in text and "VDD_SYS_GPU, which feeds the GPU alone" in text


@pytest.mark.parametrize(
    ("environment", "screen"),
    [
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "a b"}, False),
    ],
)
def test_a_browser_is_started_where_somebody_sees_it(environment: dict[str, str], screen: bool) -> None:
    assert has_screen(environment) is screen
