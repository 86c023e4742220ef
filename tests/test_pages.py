"""What means a page of memory comes from the system: pages have 4, 16 or 64 KiB, huge ones 2, 32 or 512 MiB."""

import ast
import re
from pathlib import Path

import pytest

from tests.house import ROOT, parse

SIZES = frozenset({4095, 4096})

NO_PAGES = {
    "agent/port_agent/facts/cpu_clusters.py": "the most cores",
    "agent/port_agent/guard/processes.py": "the longest path",
    "agent/port_agent/system/mounts.py": "the longest path",
    "planner/port_planner/exactness/half_products.py": "columns of a matrix",
    "agent/port_agent/finetuning/inputs/model_files.py": "a sample of a file",
    "agent/port_agent/mcu/board/simulate.py": "a read of a pipe",
    "agent/port_agent/peers/transfer.py": "entries of a cache",
    "agent/port_agent/prepare/placement/divide.py": "a read whose latency is measured",
    "agent/port_agent/prepare/pools.py": "a read whose latency is measured",
    "agent/port_agent/supervisor/job/log.py": "the least of a log",
    "agent/port_agent/system/helper_process.py": "a read of a pipe",
    "agent/port_agent/worker/attach.py": "the longest head of a message",
    "planner/port_planner/base/direct_io.py": "blocks of a medium",
    "planner/port_planner/ir/bundle/checksums.py": "blocks of a bundle",
    "planner/port_planner/ir/bundle/manifest.py": "the longest path",
    "planner/port_planner/ir/devices/cpu_teams.py": "the most cores",
    "planner/port_planner/mcu/page_costs.py": "sectors of a NOR flash",
    "planner/port_planner/operators/__init__.py": "entries of a cache",
    "planner/port_planner/profiling/operator_profile.py": "a read whose latency is measured",
    "agent/port_agent/guard/guard.c": "bins of sizes",
    "agent/port_agent/guard/store.c": "the longest path",
    "agent/port_agent/malloc/budget_malloc.c": "4096 divides every size of a page",
    "agent/port_agent/malloc/reservations.c": "a count of pages, and a text of the kernel's",
}
"""Files with such a number that is no page, and what it is."""


def sizes_in(path: Path) -> set[int]:
    """Return the numbers in a source that a size of a page may be."""
    if path.suffix == ".py":
        constants = (node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
        return {value for value in constants if type(value) is int} & SIZES
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
    return {int(word) for word in re.findall(r"\b\d+\b", code)} & SIZES


def sources() -> list[Path]:
    """Return what may map memory: Python and C of both packages."""
    roots = (ROOT / "agent/port_agent", ROOT / "planner/port_planner")
    return sorted(
        path
        for root in roots
        for kind in ("py", "c", "h")
        for path in root.rglob(f"*.{kind}")
        if "firmware" not in path.parts
    )


def test_no_size_of_a_page_is_written_down() -> None:
    named = {str(path.relative_to(ROOT)): sizes_in(path) for path in sources()}
    found = {name: sizes for name, sizes in named.items() if sizes and name not in NO_PAGES}
    assert not found, f"take PAGE_BYTES of port_planner.base.process_memory, or say what else it is: {found}"
    assert not [name for name in NO_PAGES if not named.get(name)], "listed, and without such a number"


@pytest.mark.parametrize(
    ("name", "text"), [("a.py", "PAGE = 4096"), ("b.c", "return a & 4095; /* 1 */"), ("c.h", "#define P 4096")]
)
def test_what_is_found(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert sizes_in(path)
