"""The report as one page of HTML."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.dashboard.page import embed_json, render_report
from port_agent.energy.report import EnergyReport
from tests.agent.energy.simulated import priced_report, write_afternoon


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Give the ledger of a simulated afternoon and the time it ends."""
    path = tmp_path_factory.mktemp("state") / "energy.sqlite"
    return path, write_afternoon(path)


@pytest.fixture(scope="module")
def report(ledger: tuple[Path, float]) -> EnergyReport:
    """Give the report on that afternoon, with prices."""
    return priced_report(*ledger)


@pytest.mark.slow
def test_page_is_one_file_without_a_network(report: EnergyReport) -> None:
    page = render_report(report)
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page
    assert "/*data*/" not in page and "uPlot=" in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data and json.loads(data[1])["total"][0]["kind"] == "measured"


def test_hostile_names_stay_data(report: EnergyReport) -> None:
    evil = replace(report, jobs=(replace(report.jobs[0], name="</script><script>alert(1)</script>"),))
    page = render_report(evil)
    assert "<script>alert" not in page
    assert json.loads(embed_json("</script>&")) == "</script>&"
