"""A sensor that hangs is left out, by name, until it answers; the loop and the other sensors go on."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts import Facts, OwnUse, Power
from port_agent.facts.linux import LinuxPlatform
from port_agent.facts.sensor_thread import MAX_HUNG, SensorThread
from port_agent.facts.sysfs import Tree
from tests.agent.facts.machines import OPTIONS, hang, linux
from tests.agent.trees import write_tree
from tests.waiting import until

DEADLINE_S = 0.2
TEMPERATURE = "sys/class/thermal/thermal_zone0/temp"


async def read(thread: SensorThread, platform: LinuxPlatform) -> Facts:
    async with asyncio.timeout(60.0):
        facts = await thread.read(platform.tree, lambda: platform.read(OPTIONS, OwnUse(), 0.0))
    assert facts is not None
    return facts


def test_a_thermometer_that_hangs_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        thread, platform = SensorThread(DEADLINE_S), linux(tmp_path)
        assert (await read(thread, platform)).temperature_c == 45.0
        let_go = hang(tmp_path / TEMPERATURE)
        facts = await read(thread, platform)
        assert (facts.temperature_c, facts.power) == (None, Power.EXTERNAL)
        assert "temperature" in {fault.sensor for fault in facts.faults}
        again = await read(thread, platform)  # at once: the file is known to hang
        assert again.temperature_c is None and "temperature" in {fault.sensor for fault in again.faults}
        (tmp_path / TEMPERATURE).rename(tmp_path / "fifo")
        write_tree(tmp_path, {TEMPERATURE: "46000"})
        assert (await read(thread, platform)).temperature_c is None  # whoever hangs in it has not come back
        (tmp_path / TEMPERATURE).rename(tmp_path / "value")
        (tmp_path / "fifo").rename(tmp_path / TEMPERATURE)
        let_go()
        until(lambda: not platform.tree.silent)
        (tmp_path / "value").rename(tmp_path / TEMPERATURE)
        assert (await read(thread, platform)).temperature_c == 46.0
        thread.close()

    asyncio.run(run())


def test_past_so_many_that_hang_nothing_is_read(tmp_path: Path) -> None:
    async def run() -> None:
        thread, tree = SensorThread(0.01), Tree(sys=tmp_path)
        files = [tmp_path / str(number) for number in range(MAX_HUNG)]
        gates = [hang(file) for file in files]
        assert await thread.read(tree, lambda: [tree.text(file, "t") for file in files]) is None
        for let_go in gates:
            let_go()
        until(lambda: not tree.silent)
        thread.close()

    asyncio.run(run())


def test_what_goes_wrong_in_a_reader_is_told_to_who_waits(tmp_path: Path) -> None:
    async def run() -> None:
        thread = SensorThread()
        with pytest.raises(ZeroDivisionError):
            await thread.read(Tree(sys=tmp_path), lambda: 1 // 0)
        assert await thread.read(Tree(sys=tmp_path), lambda: 2) == 2
        thread.close()

    asyncio.run(run())
