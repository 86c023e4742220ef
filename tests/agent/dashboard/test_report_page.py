"""The energy report in a real browser: every chart drawn, readable at desktop and phone width."""

import struct
from pathlib import Path

import pytest

import port_agent.dashboard
from port_agent.dashboard.page import render_report
from port_agent.energy.report import ReportOptions, read_report
from tests.agent.dashboard.browser import chromium, dump_dom, screenshot
from tests.agent.energy.simulated import write_afternoon

STATIC = Path(port_agent.dashboard.__file__).parent / "static"

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


@pytest.mark.process
@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ("[2.3, 2.4]", '["2.30","2.40"]'),
        ("[2.3021, 2.3022]", '["2.3021","2.3022"]'),
        ("[1, 1]", '["1.0000000","1.0000000"]'),
    ],
)
def test_marks_that_lie_close_together_read_differently(values: str, shown: str, tmp_path: Path) -> None:
    charts = (STATIC / "charts.js").read_text()
    call = f"labels({values}, (value, digits) => value.toPrecision(digits || 3))"
    page = tmp_path / "page.html"
    page.write_text(f"<body><script>{charts}\ndocument.body.textContent = JSON.stringify({call});</script></body>")
    assert shown in dump_dom(page.as_uri(), tmp_path / "profile", 400)
