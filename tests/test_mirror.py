"""Tests stand where their modules stand: `a/b/c.py` is tested by `tests/a/b/test_c.py`, and no test imports a test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ROOMS = ("agent/follow",)
"""Rooms that are being built: their tests go through whole programs until their modules settle."""

TESTED_WITH = {
    "tests/agent/follow/test_exec.py": (
        "agent/cli/exec",
        "agent/follow/exec/exec_budget",
        "agent/follow/exec/launch",
        "agent/follow/exec/tracebacks",
    ),
    "tests/agent/cli/test_daemon.py": ("agent/cli/daemon_views", "agent/cli/follow_job"),
    "tests/agent/cli/test_mcu.py": ("agent/cli/mcu_views", "agent/mcu/job"),
    "tests/agent/cli/test_plan_and_train.py": ("agent/cli/progress", "planner/job"),
    "tests/agent/energy/test_meter.py": (
        "agent/energy/issues",
        "agent/energy/ledger_writer",
        "agent/energy/metrics",
        "agent/energy/sampler",
    ),
    "tests/agent/energy/sources/test_registry.py": ("agent/energy/sources/base",),
    "tests/agent/energy/sources/test_ina3221.py": ("agent/energy/sources/jetson_rails",),
    "tests/agent/energy/sources/test_background.py": ("agent/system/energy_clock",),
    "tests/agent/facts/test_power_supply.py": ("agent/facts/model", "agent/facts/sysfs"),
    "tests/agent/mcu/protocol/test_device.py": ("agent/mcu/errors",),
    "tests/agent/mcu/board/test_simulate.py": ("agent/mcu/project",),
    "tests/agent/peers/test_announcement.py": ("agent/peers/state",),
    "tests/agent/peers/test_discovery.py": ("agent/supervisor/peer_discovery",),
    "tests/agent/supervisor/test_http_api.py": ("agent/supervisor/service", "agent/supervisor/status"),
    "tests/agent/supervisor/test_daemon.py": (
        "agent/supervisor/context",
        "agent/supervisor/dispatch",
        "agent/supervisor/old_worker",
        "agent/system/exec_with_limits",
    ),
    "tests/agent/supervisor/test_admission.py": ("agent/system/clock",),
    "tests/agent/supervisor/job/test_runner.py": (
        "agent/supervisor/job/run_state",
        "agent/supervisor/job/worker_process",
    ),
    "tests/agent/train/test_executor.py": (
        "agent/train/resident_state",
        "agent/train/step_paging",
        "agent/train/step_values",
        "planner/ir/lowering/update_slices",
    ),
    "tests/agent/train/test_pager.py": ("agent/train/buffers",),
    "tests/agent/train/test_trainer.py": ("agent/train/bundle_samples",),
    "tests/agent/train/test_worker.py": ("agent/train/run",),
    "tests/agent/train/test_incoming_samples.py": ("planner/ir/bundle/safetensors_io",),
    "tests/agent/prepare/test_bundle.py": ("planner/ir/costs", "planner/make_bundle"),
    "tests/agent/worker/test_contract.py": ("agent/worker/channel", "agent/worker/control", "agent/worker/start"),
    "tests/planner/capture/test_step.py": ("planner/capture/assemble", "planner/ir/errors"),
    "tests/planner/ir/bundle/test_bundle.py": ("planner/ir/bundle/codec", "planner/ir/plan"),
    "tests/planner/ir/lowering/test_lower.py": (
        "planner/ir/program",
        "planner/ir/lowering/emit",
        "planner/ir/lowering/placement",
        "planner/ir/lowering/residency",
    ),
    "tests/planner/mcu/test_arena.py": ("planner/mcu/memory",),
    "tests/planner/mcu/test_frontend.py": ("planner/mcu/ir", "planner/mcu/zoo"),
    "tests/planner/mcu/test_host.py": ("planner/mcu/quantize",),
    "tests/planner/milp/test_formulation.py": (
        "planner/milp/columns",
        "planner/milp/fate_rows",
        "planner/milp/highs",
        "planner/milp/limit_rows",
        "planner/milp/memory_rows",
        "planner/milp/time_rows",
    ),
    "tests/planner/search/test_plan_step.py": (
        "planner/search/anytime",
        "planner/search/baselines",
        "planner/search/incumbent",
        "planner/search/neighbourhood",
        "planner/search/recipes",
    ),
    "tests/planner/search/test_solve.py": (
        "planner/problem/model",
        "planner/problem/replay",
        "planner/problem/intermediates",
    ),
}
"""Modules that are tested together with another, by the test module that does it. It only ever gets shorter."""


def modules() -> list[Path]:
    """Return the modules of the product, relative to the root."""
    found = (path.relative_to(ROOT) for room in ("agent", "planner") for path in (ROOT / room).rglob("*.py"))
    return sorted(path for path in found if path.name not in ("__init__.py", "__main__.py"))


def own_test(module: Path) -> Path:
    """Return where the tests of a module belong."""
    return ROOT / "tests" / module.with_name(f"test_{module.name}")


def test_each_module_has_a_test_module_by_its_name() -> None:
    together = {name for names in TESTED_WITH.values() for name in names}
    missing = [
        str(module)
        for module in modules()
        if not own_test(module).is_file()
        and str(module.with_suffix("")) not in together
        and module.parent.as_posix() not in ROOMS
    ]
    assert not missing, "no test module by their name: " + ", ".join(missing)


@pytest.mark.parametrize("test", TESTED_WITH)
def test_what_is_tested_together_is_there_and_has_no_test_module_of_its_own(test: str) -> None:
    assert (ROOT / test).is_file()
    for name in TESTED_WITH[test]:
        module = Path(f"{name}.py")
        assert (ROOT / module).is_file(), f"{module} is gone; take it off the list"
        assert not own_test(module).is_file(), f"{module} has its own test module; take it off the list"


def test_no_test_imports_a_test() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively"
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            tests = [name for name in names if name.startswith("tests.") and name.split(".")[-1].startswith("test_")]
            assert not tests, f"{path.relative_to(ROOT)} imports {', '.join(tests)}"
