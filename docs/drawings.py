"""Draw the concepts: `python docs/drawings.py` writes docs/images/NAME.svg, one for each page of docs/concepts.

A drawing is boxes on a grid and arrows between them. Colours follow the reader's light or dark page.
"""

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
COLUMN, ROW, WIDE, HIGH, MARGIN = 196, 92, 158, 58, 12
"""Pixels from one box to the next, of a box, and around all."""
STYLE = (
    "<style>text{fill:#222}.box{fill:#eef3f8;stroke:#5b7a99}.strong{fill:#dcefe2;stroke:#2c8a4b}.away{fill:#f6ece8;stroke:#b5583c}"
    ".arrow{stroke:#555;fill:none}.head{fill:#555}.note{font-size:11px;fill:#555}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e4e4}.box{fill:#22303d}.strong{fill:#1f3a29}.away{fill:#402a22}"
    ".arrow{stroke:#bbb}.head{fill:#bbb}.note{fill:#bbb}}</style>"
)


@dataclass(frozen=True, slots=True)
class Box:
    """A box at column and row of the grid; `kind` is its colour."""

    column: float
    row: float
    text: tuple[str, ...]
    kind: str = "box"


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one box to another, with a note alongside it."""

    start: str
    end: str
    note: str = ""
    both: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes by name, arrows between them, and what the picture says in a sentence, for who cannot see it."""

    title: str
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...] = field(default=())


DRAWINGS = {
    "guarded-memory": Drawing(
        "Tensors that the next operators need are resident. Others lie in a page file behind protected addresses; a "
        "touch brings them back.",
        {
            "program": Box(0, 0, ("your program", "operators, C++, threads")),
            "resident": Box(1.35, 0, ("resident", "readable, writable"), "strong"),
            "away": Box(2.7, 0, ("away", "same address, protected"), "away"),
            "policy": Box(0, 1.3, ("eviction policy", "knows earlier steps")),
            "prefetcher": Box(1.35, 1.3, ("prefetcher", "reads ahead")),
            "file": Box(2.7, 1.3, ("page file", "checksum for each page")),
        },
        (
            Arrow("program", "resident", "reads"),
            Arrow("resident", "away", "evict"),
            Arrow("away", "file", "write"),
            Arrow("file", "prefetcher", "read"),
            Arrow("prefetcher", "resident", "in time"),
            Arrow("policy", "prefetcher", "next uses"),
        ),
    ),
    "planning": Drawing(
        "A script is recorded, measured, planned, tried out and compared with itself before it becomes a bundle.",
        {
            "script": Box(0, 0, ("script", "port_job()")),
            "graph": Box(1, 0, ("step graph", "recorded twice")),
            "costs": Box(2, 0, ("costs", "measured here")),
            "search": Box(3, 0, ("search", "heuristics, greedy, MILP")),
            "plan": Box(3, 1.2, ("plan", "keep, page or recompute")),
            "dry": Box(2, 1.2, ("dry run", "peak and time measured")),
            "referee": Box(1, 1.2, ("referee", "the script alone, beside it")),
            "bundle": Box(0, 1.2, ("bundle", "one file, no code"), "strong"),
        },
        (
            Arrow("script", "graph"),
            Arrow("graph", "costs"),
            Arrow("costs", "search"),
            Arrow("search", "plan"),
            Arrow("plan", "dry"),
            Arrow("dry", "referee"),
            Arrow("referee", "bundle"),
        ),
    ),
    "exactness": Drawing(
        "Plain PyTorch and the planned step run on the same batches; losses, weights, optimizer state and random "
        "numbers must be equal to the bit.",
        {
            "batch": Box(0, 0.6, ("the same batches", "the same seed")),
            "plain": Box(1.2, 0, ("your script alone", "plain PyTorch")),
            "ours": Box(1.2, 1.2, ("the bundle", "within its budget")),
            "equal": Box(2.4, 0.6, ("equal to the bit?", "losses, weights, state")),
            "yes": Box(3.5, 0, ("bundle is written",), "strong"),
            "no": Box(3.5, 1.2, ("refused by name",), "away"),
        },
        (
            Arrow("batch", "plain"),
            Arrow("batch", "ours"),
            Arrow("plain", "equal"),
            Arrow("ours", "equal"),
            Arrow("equal", "yes", "yes"),
            Arrow("equal", "no", "no"),
        ),
    ),
    "energy": Drawing(
        "Readings of the best sensor, or an estimate, are shared among the machine at rest, jobs and their phases, and "
        "kept in a ledger.",
        {
            "source": Box(0, 0, ("power source", "measured or estimated")),
            "meter": Box(1, 0, ("meter", "intervals of readings")),
            "share": Box(2, 0, ("attribution", "rest, job, phase")),
            "ledger": Box(3, 0, ("ledger", "minutes, hours, days"), "strong"),
            "steps": Box(2, 1.2, ("worker's steps", "compute, page, pack")),
            "report": Box(3, 1.2, ("port-agent energy", "live page, /metrics")),
        },
        (
            Arrow("source", "meter"),
            Arrow("meter", "share"),
            Arrow("share", "ledger"),
            Arrow("steps", "share"),
            Arrow("ledger", "report"),
        ),
    ),
    "policy": Drawing(
        "Readings and your configuration go into one pure decision; it says what may run and why.",
        {
            "facts": Box(0, 0, ("facts", "power, use, heat, memory")),
            "config": Box(0, 1.2, ("config.toml", "hours, limits")),
            "decide": Box(1.25, 0.6, ("decide()", "pure, no side effects"), "strong"),
            "worker": Box(2.6, 0, ("workers", "run, pause, leave")),
            "why": Box(2.6, 1.2, ("status, why", "every reason")),
        },
        (
            Arrow("facts", "decide"),
            Arrow("config", "decide"),
            Arrow("decide", "worker", "state"),
            Arrow("decide", "why", "reasons"),
        ),
    ),
    "federation": Drawing(
        "The leader sends weights; each member trains on its own data and returns its change, which the leader "
        "averages.",
        {
            "leader": Box(1.35, 0, ("leader", "averages changes"), "strong"),
            "attic": Box(0, 1.4, ("attic", "its own data")),
            "desk": Box(1.35, 1.4, ("desk", "its own data")),
            "kitchen": Box(2.7, 1.4, ("kitchen", "its own data")),
        },
        (
            Arrow("leader", "attic", both=True),
            Arrow("leader", "desk", "weights, changes", both=True),
            Arrow("leader", "kitchen", both=True),
        ),
    ),
}


def main() -> None:
    """Write all drawings."""
    for name, drawing in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(svg(drawing))


def svg(drawing: Drawing) -> str:
    """Return a drawing as SVG."""
    boxes = drawing.boxes
    width = max(box.column for box in boxes.values()) * COLUMN + WIDE + 2 * MARGIN
    height = max(box.row for box in boxes.values()) * ROW + HIGH + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(drawing.title)}</title>",
        STYLE,
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for arrow in drawing.arrows:
        parts += _arrow(arrow, boxes)
    for box in boxes.values():
        parts += _box(box)
    return "\n".join([*parts, "</svg>\n"])


def _box(box: Box) -> list[str]:
    x, y = MARGIN + box.column * COLUMN, MARGIN + box.row * ROW
    parts = [f'<rect class="{box.kind}" x="{x:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" rx="6"/>']
    first = y + HIGH / 2 + 5 - 9 * (len(box.text) - 1)
    for index, line in enumerate(box.text):
        look = ' class="note"' if index else ""
        parts.append(
            f'<text{look} x="{x + WIDE / 2:.0f}" y="{first + 18 * index:.0f}" '
            f'text-anchor="middle">{escape(line)}</text>'
        )
    return parts


def _arrow(arrow: Arrow, boxes: dict[str, Box]) -> list[str]:
    (x1, y1), (x2, y2) = _ends(boxes[arrow.start], boxes[arrow.end])
    begin = ' marker-start="url(#head)"' if arrow.both else ""
    parts = [f'<path class="arrow" d="M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"{begin} marker-end="url(#head)"/>']
    if arrow.note:
        level = abs(y1 - y2) < 1
        x, y = (x1 + x2) / 2 + (0 if level else 6), (y1 + y2) / 2 - (5 if level else -4)
        parts.append(
            f'<text class="note" x="{x:.0f}" y="{y:.0f}" '
            f'text-anchor="{"middle" if level else "start"}">{escape(arrow.note)}</text>'
        )
    return parts


def _ends(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return where an arrow leaves one box and reaches the other: at sides that face each other."""
    across, down = end.column - start.column, end.row - start.row
    (x1, y1), (x2, y2) = _centre(start), _centre(end)
    if abs(across) >= 1 and (abs(down) < 0.9 or abs(across) < 1.3) and across:
        side = WIDE / 2 if across > 0 else -WIDE / 2
        return (x1 + side, y1), (x2 - side, y2)
    side = HIGH / 2 if down > 0 else -HIGH / 2
    return (x1, y1 + side), (x2, y2 - side)


def _centre(box: Box) -> tuple[float, float]:
    return MARGIN + box.column * COLUMN + WIDE / 2, MARGIN + box.row * ROW + HIGH / 2


if __name__ == "__main__":
    main()
