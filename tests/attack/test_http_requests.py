"""No request, however odd, ends in a traceback."""

import socket
import threading
from functools import partial
from pathlib import Path

import pytest

from port_agent.dashboard.server import Dashboard
from port_agent.energy.report import report_from_query
from tests.agent.energy.simulated import write_afternoon
from tests.agent.live_daemon import CONFIG, start_agent
from tests.attack.http_requests import attack_http
from tests.attack.outcome import Survived

TIMEOUT_S = 20.0
COUNTS = (400, pytest.param(20_000, marks=pytest.mark.long))


@pytest.mark.parametrize("count", COUNTS)
def test_the_control_socket_answers_every_request(tmp_path: Path, count: int, survived: Survived) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    with (tmp_path / "said").open("wb") as said:
        process = start_agent(tmp_path, stderr=said.fileno())
    try:
        outcome = attack_http("HTTP, control socket", lambda: _unix(tmp_path / "run/control.sock"), count=count)
        assert process.poll() is None, "it ended"
    finally:
        process.terminate()
        process.wait(30.0)
    survived(outcome)
    assert (tmp_path / "said").read_text() == ""
    assert "closed" in outcome.notes and "200" in outcome.notes and "400" in outcome.notes


class _Agent:
    """Answers what the page asks of the control socket."""

    def get(self, path: str) -> object:
        return {"path": path}

    def post(self, path: str, **fields: object) -> object:
        return {"path": path}


@pytest.mark.parametrize("count", COUNTS)
def test_the_live_page_answers_every_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int, survived: Survived
) -> None:
    write_afternoon(tmp_path / "energy.sqlite")
    page = Dashboard(_Agent(), partial(report_from_query, tmp_path / "energy.sqlite"), 0)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", page.port), timeout=TIMEOUT_S)

    try:
        outcome = attack_http("HTTP, live page", connect, count=count, seed=2, key=page.key)
    finally:
        page.stop()
        thread.join()
    survived(outcome)
    assert " 200" in outcome.notes and " 400" in outcome.notes
    assert capfd.readouterr().err == ""


def _unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(str(path))
    return sock
