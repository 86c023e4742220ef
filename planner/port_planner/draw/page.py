"""A plan as a page for a browser: the figures, the drawing with tooltips, and the bundle's other plans."""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from port_planner.base.errors import ExitCode, PortError
from port_planner.draw.drawing import Drawing
from port_planner.draw.frontier import Mark, frontier_svg
from port_planner.draw.svg import svg


class DrawError(PortError):
    """A drawing cannot be created."""

    exit_code = ExitCode.IMPOSSIBLE


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2733;--faint:#68788a;--rule:#dde3ea}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#dfe6ee;--faint:#8b9bab;--rule:#2b333c}}
body{margin:0 auto;padding:1.2rem;max-width:90rem;background:var(--paper);color:var(--ink);font:14px system-ui,sans-serif}
h1{font-size:1.2rem;margin:0 0 .8rem}dl{display:flex;flex-wrap:wrap;gap:.6rem 1.8rem;margin:0 0 1rem}
dt{color:var(--faint);font-size:.8rem}dd{margin:0;font-size:1.05rem;font-variant-numeric:tabular-nums}
figure{margin:0}figure svg{width:100%;height:auto;display:block}figure.narrow{display:none}
@media (max-width:50rem){figure.narrow{display:block}figure.wide{display:none}}
#here{position:sticky;top:0;background:var(--paper);border-bottom:1px solid var(--rule);padding:.3rem 0;min-height:1.3rem;
color:var(--faint);font-variant-numeric:tabular-nums}#here b{color:var(--ink);font-weight:600}.small{max-width:42rem}
"""

_SCRIPT = """
const step=JSON.parse(document.getElementById('step').textContent),here=document.getElementById('here'),first=here.innerHTML;
for(const chart of document.querySelectorAll('svg[data-chart]')){
const line=document.createElementNS(chart.namespaceURI,'line'),
box=chart.viewBox.baseVal,left=+chart.dataset.left,wide=+chart.dataset.chart,total=step.moments.at(-1)||1;
line.setAttribute('stroke','currentColor');line.setAttribute('stroke-opacity','.4');line.setAttribute('pointer-events','none');
line.setAttribute('y1',60);line.setAttribute('y2',box.height-40);
chart.addEventListener('pointermove',event=>{
  const at=new DOMPoint(event.clientX,event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
  if(at<left||at>left+wide){line.remove();here.innerHTML=first;return}
  const moment=(at-left)/wide*total;let low=0,high=step.memory.length-1;
  while(low<high){const middle=(low+high+1)>>1;if(step.moments[middle]<=moment)low=middle;else high=middle-1}
  line.setAttribute('x1',at);line.setAttribute('x2',at);chart.append(line);
  here.textContent='';const name=document.createElement('b');name.textContent=step.operators[low]??'';
  here.append(name,` operator ${low} of ${step.memory.length}, ${(step.memory[low]/2**20).toFixed(1)} MiB resident, at ${moment.toPrecision(3)} s`);
});
chart.addEventListener('pointerleave',()=>{line.remove();here.innerHTML=first});
}
"""


def page(picture: Drawing, marks: Sequence[Mark] = (), chosen: int = 0) -> str:
    """Return an HTML page with the drawing, and with the frontier of `marks` if there are any."""
    plot = f'<figure class="small">{frontier_svg(marks, chosen)}</figure>' if len(marks) > 1 else ""
    figures = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in picture.figures
    )
    drawings = (("wide", svg(picture, titled=False)), ("narrow", svg(picture, titled=False, narrow=True)))
    charts = "".join(f'<figure class="{width}">{drawing}</figure>' for width, drawing in drawings)
    step = json.dumps({"moments": picture.moments, "memory": picture.memory, "operators": picture.operators})
    step = step.replace("</", "<\\/")  # would end the script
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(picture.title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(picture.title)}</h1>"
        f'<dl>{figures}</dl><div id="here">Point at a tensor, or at a time of the step.</div>{charts}{plot}'
        f'<script type="application/json" id="step">{step}</script><script>{_SCRIPT}</script></body></html>\n'
    )


def write_drawing(picture: Drawing, path: Path, marks: Sequence[Mark] = (), chosen: int = 0) -> None:
    """Write the drawing in the format of the suffix of `path`; an .html page also shows figures and the frontier.

    Raises DrawError for any other suffix, and if the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix == ".svg":
        text = svg(picture)
    elif suffix in (".html", ".htm"):
        text = page(picture, marks, chosen)
    else:
        raise DrawError(f"cannot draw to {path}; name a file that ends in .svg or .html")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DrawError(f"cannot write {path}: {error.strerror}; choose a writable file") from error
