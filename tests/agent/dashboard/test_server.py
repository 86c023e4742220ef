"""The live page: who may ask, what is handed on, and what a real browser makes of it."""

import contextlib
import http.client
import json
import socket
import struct
import threading
from datetime import datetime
from pathlib import Path

import pytest

from port_agent.dashboard.page import static_text
from port_agent.dashboard.server import MAX_CONNECTIONS, Dashboard, DashboardError
from port_planner.base.units import format_bytes, format_joules, format_seconds
from tests.agent.dashboard.browser import chromium, dump_dom, screenshot
from tests.agent.dashboard.conftest import FakeAgent
from tests.zones import clock_in


def ask(page: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def with_key(page: Dashboard) -> dict[str, str]:
    """Return the header that opens the figures."""
    return {"Authorization": f"Bearer {page.key}"}


@pytest.mark.slow
def test_figures_need_the_key(dashboard: Dashboard) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer ümlaut".encode().decode("latin-1")},
    ):
        status, _, body = ask(dashboard, "/api/status", **headers)
        assert status == 401 and b"camera-net" not in body
    status, headers, body = ask(dashboard, "/api/status", **with_key(dashboard))
    assert status == 200
    assert json.loads(body)["job"]["name"] == "camera-net"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_other_host_names_are_refused(dashboard: Dashboard) -> None:
    assert ask(dashboard, "/", Host="evil.example")[0] == 403
    assert ask(dashboard, "/api/status", Host="evil.example", **with_key(dashboard))[0] == 403
    assert ask(dashboard, "/", Host=f"localhost:{dashboard.port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/page.py", "/api/jobs/1/cancel", "/v1/status", "//x"]
)
def test_nothing_else_is_served(dashboard: Dashboard, path: str) -> None:
    assert ask(dashboard, path, **with_key(dashboard))[0] == 404


@pytest.mark.slow
def test_silent_connections_take_so_many_threads_and_no_more(dashboard: Dashboard) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(2 * MAX_CONNECTIONS):
            held.enter_context(socket.create_connection(("127.0.0.1", dashboard.port)))
        last = held.enter_context(socket.create_connection(("127.0.0.1", dashboard.port)))
        assert last.recv(1) == b""  # closed at once
        assert threading.active_count() - before == MAX_CONNECTIONS


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/not-now", ("/v1/pause", {"for_s": 7200.0})),
        ("/api/resume", ("/v1/resume", {})),
        ("/api/run-now/12", ("/v1/jobs/12/run-now", {"for_s": None})),
    ],
)
def test_a_wish_is_handed_on_from_who_has_the_key(
    dashboard: Dashboard, agent: FakeAgent, path: str, asked: tuple[str, dict[str, object]]
) -> None:
    agent.wishes.clear()
    assert ask(dashboard, path, "POST")[0] == 401
    assert ask(dashboard, path, "POST", Host="evil.example", **with_key(dashboard))[0] == 403
    assert ask(dashboard, path, **with_key(dashboard))[0] == 404, "a link does nothing"
    assert agent.wishes == []
    assert ask(dashboard, path, "POST", **with_key(dashboard))[0] == 200
    assert agent.wishes == [asked]
    agent.dead = True
    assert ask(dashboard, path, "POST", **with_key(dashboard))[0] == 503


@pytest.mark.parametrize(
    "path", ["/api/status", "/v1/pause", "/api/run-now/1/../2", "/api/run-now/x", "/api/cancel/1", "/"]
)
def test_no_other_wish_is_taken(dashboard: Dashboard, agent: FakeAgent, path: str) -> None:
    agent.wishes.clear()
    assert ask(dashboard, path, "POST", **with_key(dashboard))[0] == 404 and agent.wishes == []


def test_page_and_its_files_come_without_a_key(dashboard: Dashboard) -> None:
    status, headers, body = ask(dashboard, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"//" not in body.replace(b"<!DOCTYPE", b""), "the page asks no other host"
    for name in ("uPlot.min.css", "page.css", "uPlot.iife.min.js", "charts.js", "dashboard.js"):
        assert ask(dashboard, f"/static/{name}")[0] == 200


def test_agent_that_does_not_answer_is_said(dashboard: Dashboard, agent: FakeAgent) -> None:
    agent.dead = True
    status, _, body = ask(dashboard, "/api/status", **with_key(dashboard))
    assert status == 503
    assert "start it with" in json.loads(body)["error"]


def test_taken_port_names_the_remedy(dashboard: Dashboard, agent: FakeAgent) -> None:
    with pytest.raises(DashboardError, match="another one with --port"):
        Dashboard(agent, agent.energy, dashboard.port)
    with pytest.raises(DashboardError, match=r"port 99999 .*0-65535"):
        Dashboard(agent, agent.energy, 99999)


@pytest.mark.long
@pytest.mark.parametrize("width", [1200, 390])
def test_page_in_a_browser(dashboard: Dashboard, tmp_path: Path, width: int) -> None:
    chromium()
    dom = dump_dom(dashboard.url, tmp_path, width)
    assert 'data-ready="yes"' in dom and 'data-energy="yes"' in dom
    for text in (
        "Training",
        "idle for 14 min",
        "camera-net",
        "plan 2 of 4",
        "5.43 W",
        "58 °C",
        "Supply voltage too low",
        "nRF52840",
        "attic-pi",
        "peak 214.0 MiB of 300.0 MiB, its limit; 150.0 MiB planned",
        "3.34 kJ",
        "2.98 kJ as planned so far",
        "about 9 min 22 s of training left",
        "Then job 2",
        "Sleep is held off",
        "too hot",
        "Not now, for 2 hours",
        "Run now",
    ):
        assert text in dom
    assert "<b>imu</b>" not in dom, "a job's name is text, not markup"
    assert dom.count("<canvas") >= 4, "loss from the ledger, power, temperature, phases"


@pytest.mark.long
def test_figures_read_as_on_the_command_line(tmp_path: Path) -> None:
    chromium()
    figures = [
        0.0,
        0.0123,
        0.9,
        1.0,
        59.4,
        61.0,
        1000.0,
        1023.0,
        3599.6,
        3661.0,
        86_400.0,
        359_999.0,
        360_001.0,
        1 << 20,
        3.3e9,
        7e15,
    ]
    script = f"document.body.textContent = JSON.stringify({figures}.map((v) => [formatBytes(v), formatSeconds(v), formatJoules(v)]))"
    page = tmp_path / "figures.html"
    page.write_text(f"<body></body><script>{static_text('charts.js')}</script><script>{script}</script>")
    dom = dump_dom(page.as_uri(), tmp_path / "profile", 800)
    shown = json.loads(dom[dom.index("[[") : dom.rindex("]]") + 2])
    assert shown == [[format_bytes(value), format_seconds(value), format_joules(value)] for value in figures]


@pytest.mark.long
def test_times_are_local_and_of_24_hours_in_every_language_of_a_browser(tmp_path: Path) -> None:
    chromium()
    with clock_in("Europe/Berlin"):
        midnight, evening = datetime(2026, 11, 29, 0, 5, 9), datetime(2026, 11, 29, 22, 30)
        moments = [midnight.timestamp(), evening.timestamp()]
        marks = [datetime(2026, 11, 28, 18).timestamp(), datetime(2026, 11, 29).timestamp(), evening.timestamp()]
        script = f"""const labels = (step) => timeAxis().values(null, {marks}, 0, 0, step);
            document.body.textContent = JSON.stringify([
            {moments}.map(formatClock), {moments}.map(formatClockSeconds), {moments}.map(formatWeekday), {moments}.map(formatTime),
            labels(3600), labels(86400), labels(15)])"""
        page = tmp_path / "times.html"
        page.write_text(f"<body></body><script>{static_text('charts.js')}</script><script>{script}</script>")
        for language in ("en-US", "ar-EG"):
            dom = dump_dom(page.as_uri(), tmp_path / language, 800, f"--lang={language}")
            assert json.loads(dom[dom.index("[[") : dom.rindex("]]") + 2]) == [
                ["00:05", "22:30"],
                ["00:05:09", "22:30:00"],
                ["Sun 29 Nov 00:05", "Sun 29 Nov 22:30"],
                ["29 Nov 2026, 00:05", "29 Nov 2026, 22:30"],
                ["18:00\n28 Nov", "00:00\n29 Nov", "22:30"],
                ["28 Nov", "29 Nov", "29 Nov"],
                ["18:00:00\n28 Nov", "00:00:00\n29 Nov", "22:30:00"],
            ]


@pytest.mark.long
def test_page_without_an_agent(dashboard: Dashboard, agent: FakeAgent, tmp_path: Path) -> None:
    chromium()
    agent.dead = True
    dom = dump_dom(dashboard.url, tmp_path, 390)
    assert "No answer" in dom and "start it with systemctl" in dom


@pytest.mark.long
@pytest.mark.parametrize(("width", "height"), [(1200, 1700), (390, 2600)])
def test_screenshot_is_drawn(dashboard: Dashboard, tmp_path: Path, width: int, height: int) -> None:
    chromium()
    image = screenshot(dashboard.url, tmp_path / "profile", tmp_path / "page.png", width, height)
    assert struct.unpack(">II", image[16:24]) == (width, height)
    assert len(image) > 40_000
