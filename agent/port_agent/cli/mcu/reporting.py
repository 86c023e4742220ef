"""`mcu compile --report`: the cost of each layer and what quantization loses in it, as a
table, as JSON and as a page.
"""

import html
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.table import Table

from port_agent.cli.terminal import terminal
from port_agent.system.atomic_file import write_atomically
from port_planner.mcu.report import LayerFigures

COLUMNS = ("layer", "kind", "output", "MACs", "output, B", "trained, B", "flash, B", "error", "clipped")
JSON_NAME, PAGE_NAME = "report.json", "report.html"


def report_rows(figures: Sequence[LayerFigures]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a report's table.

    Time and energy are given for each core, for inference / training.
    """
    cores = list(figures[0].costs) if figures else []
    head = (*COLUMNS, *(f"{core}: {what}" for core in cores for what in ("instructions", "ms", "mJ")))
    rows = []
    for layer in figures:
        cells = [
            layer.name, layer.kind, layer.shape, f"{layer.macs:,}", f"{layer.output_bytes:,}", f"{layer.parameter_bytes:,}",
            f"{layer.flash_bytes:,}", f"{layer.error:.2%}", f"{layer.clipped:.2%}",
        ]  # fmt: skip
        for cost in layer.costs.values():
            cells += [
                f"{cost.instructions:,.0f} / {cost.trained_instructions:,.0f}",
                f"{1000 * cost.seconds:.3g} / {1000 * cost.trained_seconds:.3g}",
                f"{1000 * cost.joules:.3g} / {1000 * cost.trained_joules:.3g}",
            ]
        rows.append(tuple(cells))
    return head, rows


def show_report(figures: Sequence[LayerFigures], core: str) -> None:
    """Print the table of a report, for one core."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(
        ("layer", "output", "MACs", "trained, B", "flash, B", "error", "clipped", "ms", "mJ")
    ):
        table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for layer, row in zip(figures, report_rows(figures)[1], strict=True):
        cost = layer.costs[core]
        table.add_row(
            row[0], *row[2:4], *row[5:9], f"{1000 * cost.trained_seconds:.3g}", f"{1000 * cost.trained_joules:.3g}"
        )
    terminal().print(table)
    print(f"ms and mJ: of one training sample on {core}, estimated; all figures are in {JSON_NAME} and {PAGE_NAME}")


def write_report(figures: Sequence[LayerFigures], name: str, out: Path) -> None:
    """Write a report next to the tables of its model: report.json, and report.html for people."""
    write_atomically(out / JSON_NAME, msgspec.json.encode([asdict(layer) for layer in figures]) + b"\n")
    write_atomically(out / PAGE_NAME, report_page(figures, name).encode())


def report_page(figures: Sequence[LayerFigures], name: str) -> str:
    """Return a report as a page without scripts or external resources."""
    head, rows = report_rows(figures)
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = html.escape(name)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif }} td, th {{ padding: 2px 8px; text-align: right }} td:nth-child(-n+3) {{ text-align: left }}</style>
<h1>{title}</h1>
<p>Bytes are those of the tables. Instructions, time and energy are estimates of one sample, inference / training. Error: the root
mean squared difference to PyTorch, as a share of PyTorch's values; clipped: values outside of what int8 holds there.</p>
<table><tr>{cells}</tr>
{body}
</table>
</html>
"""
