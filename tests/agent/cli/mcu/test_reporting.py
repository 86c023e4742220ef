"""A report of layers: its rows, and a page that holds whatever a layer is called."""

from pathlib import Path

from port_agent.cli.mcu.reporting import report_page, report_rows, write_report
from port_planner.mcu.report import LayerCost, LayerFigures

COST = LayerCost(1000.0, 3000.0, 0.001, 0.003, 0.002, 0.006)
LAYER = LayerFigures("<b>&", "conv", "4x4x2", 288, 32, 40, 52, 0.0123, 0.5, {"nrf52840": COST})


def test_a_row_says_bytes_errors_and_what_each_core_takes(tmp_path: Path) -> None:
    head, (row,) = report_rows([LAYER])
    assert len(head) == len(row) and head[-1] == "nrf52840: mJ"
    assert row[3:] == ("288", "32", "40", "52", "1.23%", "50.00%", "1,000 / 3,000", "1 / 3", "2 / 6")
    page = report_page([LAYER], "a < b")
    assert "&lt;b&gt;&amp;" in page and "<title>a &lt; b</title>" in page and "<b>" not in page
    write_report([LAYER], "net", tmp_path)
    assert (tmp_path / "report.json").read_bytes().startswith(b'[{"name":"<b>&"')
