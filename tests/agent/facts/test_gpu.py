"""A GPU is seen by its device nodes, and its use by a Jetson's load file or nvidia-smi."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts import Answer, OwnUse
from port_agent.facts.gpu import SENSOR, gpu_signal, jetson_load_percent, parse_utilization, present_kinds
from port_agent.facts.sysfs import Tree
from tests.agent.facts.machines import OPTIONS, fake_program, linux, on_path
from tests.agent.trees import write_tree

IDLE, TRAINING = OwnUse(), OwnUse(training=True)


def signals(tmp_path: Path, own: OwnUse = IDLE) -> dict[str, Answer]:
    facts = linux(tmp_path).read(OPTIONS, own, 0.0)
    return {signal.name: signal.idle for signal in facts.idle_signals}


def test_a_machine_without_a_gpu_says_nothing_of_one(tmp_path: Path) -> None:
    assert linux(tmp_path).read(OPTIONS, OwnUse(), 0.0).devices == frozenset()
    assert SENSOR not in signals(tmp_path)


@pytest.mark.parametrize("node", ["nvidia0", "nvhost-gpu", "nvmap"])
def test_a_device_node_is_a_gpu(tmp_path: Path, node: str) -> None:
    write_tree(tmp_path / "dev", {node: ""})
    assert linux(tmp_path).read(OPTIONS, OwnUse(), 0.0).devices == {"cuda"}


@pytest.mark.parametrize("name", ["17000000.gpu", "17000000.ga10b", "17000000.gv11b", "gpu.0", "57000000.gpu"])
@pytest.mark.parametrize(("load", "idle"), [("12", Answer.YES), ("730", Answer.NO)])
def test_a_jetsons_gpu_in_use_is_a_device_in_use(tmp_path: Path, name: str, load: str, idle: Answer) -> None:
    write_tree(tmp_path / "sys/class/devfreq", {f"{name}/device/load": load, "15340000.vic/device/load": "1000"})
    assert jetson_load_percent(Tree(tmp_path / "sys")) == int(load) / 10
    assert signals(tmp_path)[SENSOR] is idle
    assert signals(tmp_path, TRAINING)[SENSOR] is Answer.UNKNOWN


@pytest.mark.process
def test_nvidia_smi_is_asked_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "dev", {"nvidia0": ""})
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "nvidia-smi", "printf '3\\n97\\n'")
    on_path(monkeypatch, programs)
    platform = linux(tmp_path)
    asyncio.run(platform.refresh())

    def said(own: OwnUse) -> Answer | None:
        facts = platform.read(OPTIONS, own, 1.0)
        return next((s.idle for s in facts.idle_signals if s.name == SENSOR), None)

    assert said(OwnUse()) is Answer.NO
    assert said(TRAINING) is None and said(OwnUse()) is None, "what our own worker did is forgotten"
    fake_program(programs, "nvidia-smi", "echo 'Failed to initialize NVML' >&2; exit 9")
    asyncio.run(platform.refresh())
    assert [fault.sensor for fault in platform.read(OPTIONS, OwnUse(), 1.0).faults] == [SENSOR]


@pytest.mark.process
@pytest.mark.parametrize(("other", "idle"), [("suspended", Answer.YES), ("active", Answer.NO)])
def test_a_card_that_sleeps_is_not_woken_to_be_asked(
    other: str, idle: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "dev", {"nvidia0": ""})
    status = {"0000:01:00.0/power/runtime_status": "suspended\n", "0000:02:00.0/power/runtime_status": f"{other}\n"}
    write_tree(tmp_path / "sys/bus/pci/drivers/nvidia", {**status, "new_id": "", "module/refcnt": "3\n"})
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "nvidia-smi", f"touch {tmp_path}/asked; echo 97")
    on_path(monkeypatch, programs)
    platform = linux(tmp_path)
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert next(s.idle for s in facts.idle_signals if s.name == SENSOR) is idle and not facts.faults
    assert (tmp_path / "asked").exists() == (other == "active")


def test_what_a_card_does_not_say_is_not_known(tmp_path: Path) -> None:
    assert parse_utilization("[N/A]\n") is None and parse_utilization("") is None
    assert parse_utilization("7\n[N/A]\n") == 7.0
    assert gpu_signal(None, OPTIONS, OwnUse()) == ()
    assert present_kinds(Tree(dev=tmp_path / "nowhere")) == frozenset()
