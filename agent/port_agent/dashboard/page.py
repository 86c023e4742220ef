"""The energy report as one HTML file that needs nothing else: styles, charts and figures inside."""

import importlib.resources
import json
import re

from port_agent.energy.report import EnergyReport

_PLACES = {
    "/*uplot-css*/": "uPlot.min.css",
    "/*page-css*/": "page.css",
    "/*uplot-js*/": "uPlot.iife.min.js",
    "/*charts-js*/": "charts.js",
    "/*report-js*/": "report.js",
}


def static_text(name: str) -> str:
    """Return a file of the package's `static` folder."""
    return importlib.resources.files("port_agent.dashboard").joinpath("static", name).read_text(encoding="utf-8")


def render_report(report: EnergyReport) -> str:
    """Return the report as one page that works offline."""
    parts = {place: static_text(name) for place, name in _PLACES.items()}
    parts["/*data*/"] = embed_json(report.as_dict())
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], static_text("report.html"))


def embed_json(value: object) -> str:
    """Return JSON that is safe inside a script element, which no text in it can close."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
