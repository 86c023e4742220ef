"""The floors of the house: every module imports downwards, in no circle; the supervisor never imports torch."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house import ROOT, parse

HEAVY = ("torch", "numpy", "rich", "transformers", "zeroconf")
"""What the idle daemon must not carry: `import torch` alone is 218 MB; zeroconf comes only where discovery is on."""


FLOORS: tuple[tuple[str, ...], ...] = (
    ("port_planner.operators",),
    ("port_planner.base", "port_planner.torch_compat"),
    ("port_planner.ir",),
    ("port_planner.ir.lowering", "port_planner.ir.bundle", "port_planner.proximal"),
    (
        "port_planner.capture",
        "port_planner.profiling",
        "port_planner.problem",
        "port_planner.job",
        "port_planner.script_loading",
        "port_planner.deadline",
        "port_planner.draw",
    ),
    ("port_planner.column_file",),
    ("port_planner.milp", "port_planner.sparse", "port_planner.tiling"),
    ("port_planner.search", "port_planner.exactness"),
    ("port_planner.mcu",),
    ("port_planner.kept_parts",),
    ("port_planner.batches", "port_planner.job_device", "port_planner.job_checks", "port_planner.schedules"),
    ("port_planner.plain_steps", "port_planner.repeatable_data", "port_planner.steps_ahead"),
    ("port_planner.make_bundle", "port_planner.job_sources"),
    ("port_agent.system", "port_agent.malloc", "port_agent.packing", "port_agent.facts"),
    ("port_agent.guard",),
    ("port_agent.energy.sources", "port_agent.peers", "port_agent.jobs", "port_agent.worker", "port_agent.backend"),
    ("port_agent.paging",),
    ("port_agent.energy", "port_agent.policy", "port_agent.training", "port_agent.mcu"),
    ("port_agent.intercept",),
    ("port_agent.health", "port_agent.dashboard", "port_agent.prepare", "port_agent.finetuning"),
    ("port_agent.federate",),
    ("port_agent.control",),
    ("port_agent.supervisor",),
    ("port_agent.planning",),
    ("port_agent.foreground",),
    ("port_agent.cli",),
    ("port_agent", "port_planner"),
)
"""The house from the ground up. A module belongs to the longest name that it begins with; inner rooms that are not
named belong to their outer one. A room imports its own modules and those of lower floors, nothing else."""

MODULES_IN_A_ROOM = 40

FOR_AGENTS = (
    "port_planner.base",
    "port_planner.ir",
    "port_planner.operators",
    "port_planner.exactness",
    "port_planner.torch_compat",
)
"""Rooms of planner that every room of agent may import: its language, torch's private parts, and what proves that tiles
have the bits of the whole.
"""

PLANNING_ROOMS = (
    "port_agent.prepare",
    "port_agent.planning",
    "port_agent.intercept",
    "port_agent.cli",
    "port_agent.mcu.project",
    "port_agent.mcu.project_weights",
)
"""Who captures, plans or compiles on the device, and the commands: only these import planner beyond `FOR_AGENTS`."""


def name_of(path: Path) -> str:
    """Return the dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path
    for top in ("planner/port_planner", "agent/port_agent")
    for path in sorted((ROOT / top).rglob("*.py"))
}


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the imports of a file, wherever they stand: inside functions and for types alike."""
    found: list[ast.Import | ast.ImportFrom] = []
    bodies: list[ast.AST] = [parse(path)]
    while bodies:
        statement = bodies.pop()
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(statement)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(statement, field, ())
            bodies += inner if isinstance(inner, list) else ()  # the body of a lambda is an expression
    return tuple(found)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return our modules that `module` imports."""
    names: set[str] = set()
    for node in import_statements(SOURCES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0 and node.module is not None, f"{module} has a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in SOURCES else node.module for name in full}
    return frozenset(name for name in names if name in SOURCES and name != module)


def inside(module: str, room: str) -> bool:
    """Return whether a module is a room or lies in one."""
    return module == room or module.startswith(room + ".")


def room_of(module: str) -> tuple[str, int]:
    """Return the room of a module, and its floor."""
    rooms = [(room, level) for level, floor in enumerate(FLOORS) for room in floor if inside(module, room)]
    return max(rooms, key=lambda found: len(found[0]))


def test_every_module_that_is_imported_is_there() -> None:
    """An import inside a function, or for types alone, fails nowhere else."""
    gone = set()
    for path in [*SOURCES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in import_statements(path):
            names = {node.module or ""} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            ours = {name for name in names if name.split(".")[0] in ("port_agent", "port_planner")}
            gone |= {(str(path.relative_to(ROOT)), name) for name in ours - SOURCES.keys()}
    assert not gone


def test_every_module_imports_downwards() -> None:
    level = {module: room_of(module) for module in SOURCES}
    for module, (room, floor) in level.items():
        above = {name for name in imports_of(module) if level[name][0] != room and level[name][1] >= floor}
        assert not above, f"{module} (floor {floor}) imports {sorted(above)}, which are not below it"


def test_every_room_stands_on_a_named_floor() -> None:
    top = {module for module in SOURCES if room_of(module)[0] in FLOORS[-1]}
    assert top == set(FLOORS[-1]), "a new room: give it a floor"
    assert all(any(inside(module, room) for module in SOURCES) for floor in FLOORS for room in floor)


def test_only_planning_rooms_import_planner_beyond_its_language() -> None:
    planners = {n for n in SOURCES if inside(n, "port_planner") and not any(inside(n, room) for room in FOR_AGENTS)}
    for module in SOURCES:
        if not inside(module, "port_planner") and not any(inside(module, room) for room in PLANNING_ROOMS):
            beyond = imports_of(module) & planners - ({"port_planner.job"} if module == "port_agent" else set())
            assert not beyond, f"{module} imports {sorted(beyond)}"


def test_no_module_imports_itself_through_others() -> None:
    order = TopologicalSorter({module: imports_of(module) for module in SOURCES})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_no_module_imports_two_of_one_name() -> None:
    """A package and a module in it may have one name, and a command's module may have that of what it starts."""
    met = {}
    for module in SOURCES:
        files = [m for m in imports_of(module) if SOURCES[m].name != "__init__.py"]
        names = Counter(m.rpartition(".")[2] for m in files)
        own = module.rpartition(".")[2]
        if not inside(module, "port_agent.cli") and SOURCES[module].name != "__init__.py":
            names[own] += 1
        if twice := sorted(name for name, count in names.items() if count > 1):
            met[module] = twice
    assert not met, "give one of them the name of its room"


def unit_of(module: str, room: str) -> str:
    """Return the folder of a room that a module lies in; "" for one that lies in the room itself."""
    rest = module.removeprefix(room).strip(".").split(".")
    return rest[0] if len(rest) > 1 or SOURCES[module].name == "__init__.py" else ""


def test_folders_inside_a_room_have_a_direction() -> None:
    """A folder and its neighbour, or the room's own modules, do not import each other: else it is no folder."""
    found: dict[tuple[str, str, str], str] = {}
    for module in SOURCES:
        for name in imports_of(module):
            common = [a for a, b in zip(module.split("."), name.split("."), strict=False) if a == b]
            same = next(
                (n for n, (a, b) in enumerate(zip(module.split("."), name.split("."), strict=False)) if a != b),
                len(common),
            )
            room = ".".join(module.split(".")[:same])
            one, other = unit_of(module, room), unit_of(name, room)
            if room and one != other:
                found[room, one, other] = f"{module} imports {name}"
    both = [(what, found[room, b, a]) for (room, a, b), what in found.items() if a < b and (room, b, a) in found]
    assert not both


def test_no_room_needs_a_list() -> None:
    sizes = Counter(path.parent for path in SOURCES.values() if path.name != "__init__.py")
    assert {str(room): size for room, size in sizes.items() if size > MODULES_IN_A_ROOM} == {}


@pytest.mark.process
@pytest.mark.parametrize(
    "modules",
    [
        "port_agent.supervisor.daemon",
        "port_agent.cli",
        "port_agent.supervisor.http_api, port_agent.control.client, port_agent.control.http",
        "port_agent.facts, port_agent.facts.linux, port_agent.facts.macos, port_agent.facts.jetson",
        "port_agent.policy.decide, port_agent.policy.config, port_agent.jobs.job, port_agent.jobs.store, "
        "port_agent.supervisor.timers, port_agent.system.cgroup, port_agent.health.conditions",
        "port_planner.ir.bundle.bundle",
    ],
)
def test_the_supervisor_side_never_imports_torch(modules: str) -> None:
    program = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    allowed = {"numpy"} if modules == "port_planner.ir.bundle.bundle" else set()
    assert set(done.stdout.split()) <= allowed, f"{modules}: {done.stdout}"


@pytest.mark.process
def test_building_the_command_line_stays_light() -> None:
    program = "import sys, port_agent.cli; port_agent.cli.build_parser(); print('torch' in sys.modules or 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.process
def test_the_daemon_does_without_tls_other_commands_and_what_few_need(tmp_path: Path) -> None:
    words = [
        "run",
        "--state-dir",
        str(tmp_path),
        "--runtime-dir",
        str(tmp_path / "run"),
        "--config",
        str(tmp_path / "wrong.toml"),
    ]
    names = (
        "asyncio",
        "_ssl",
        "port_agent.cli.plan.command",
        "apscheduler",
        "psutil",
        "importlib.metadata",
        "typing_extensions",
    )
    (tmp_path / "wrong.toml").write_text("[when]\nidle_for = 'soon'\n")
    program = f"import sys; from port_agent.cli import main; print(main({words!r}), *[name in sys.modules for name in {names!r}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["78", "True", *["False"] * 6]
