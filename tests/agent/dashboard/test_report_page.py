"""The energy report in a real browser: every chart drawn, readable at desktop and phone width."""

import struct
from pathlib import Path

import pytest

from port_agent.dashboard.page import render_report
from port_agent.energy.report import ReportOptions, read_report
from tests.agent.dashboard.browser import chromium, dump_dom, screenshot
from tests.agent.energy.simulated import write_afternoon

pytestmark = pytest.mark.long  # a browser takes seconds to start


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the report page of a simulated afternoon."""
    chromium()
    folder = tmp_path_factory.mktemp("report")
    end = write_afternoon(folder / "energy.sqlite")
    options = ReportOptions(price_per_kwh=0.3, currency="EUR", co2_grams_per_kwh=380.0, flash_endurance_bytes=10**13)
    path = folder / "report.html"
    path.write_text(render_report(read_report(folder / "energy.sqlite", options, end)))
    return path


@pytest.mark.parametrize("width", [1200, 390])
def test_all_charts_and_tables_are_drawn(page: Path, tmp_path: Path, width: int) -> None:
    dom = dump_dom(page.as_uri(), tmp_path, width)
    assert 'data-ready="yes"' in dom, "a script failed"
    assert dom.count("<canvas") == 5
    for text in ("camera-net", "not measured", "backward", "EUR", "profile-corrected", "no answer from the bus",
                 "Below each bar: job : epoch.", "at 0.3 EUR per kWh"):  # fmt: skip
        assert text in dom
    assert dom.count('<span class="badge measured">') == 4, "once per table and source, as all figures are measured"


@pytest.mark.parametrize(("width", "height"), [(1200, 2700), (390, 4000)])
def test_screenshot_is_drawn(page: Path, tmp_path: Path, width: int, height: int) -> None:
    image = screenshot(page.as_uri(), tmp_path / "profile", tmp_path / "page.png", width, height)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", image[16:24]) == (width, height)
    assert len(image) > 50_000, "a blank page compresses to a few kB"
