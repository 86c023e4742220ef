"""A microcontroller job in the real daemon: the same queue, log, status and result as every other job."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from port_agent.cli import main
from port_agent.jobs.job import JobKind, JobState
from port_agent.mcu.board.firmware import Firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.job import BoardJobSpec, open_job, with_settings
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS
from port_agent.worker.shard import Shard
from tests.agent.live import KINDS
from tests.agent.live_daemon import LONG, running
from tests.agent.mcu.device_memory import read_result
from tests.agent.mcu.proxy import FaultyLine
from tests.agent.mcu.small_model import make_samples

pytestmark = pytest.mark.process

EPOCHS = 2
PULL_AFTER = 8000
"""Bytes on the wire: the first evaluation takes 3,200, a request of 39 samples 1,050."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory of samples, as the daemon sees it."""
    rows, labels = make_samples(600)
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "a.npz", codes=np.frombuffer(b"".join(rows), np.int8).reshape(600, -1), y=np.array(labels))
    return folder


def undisturbed(model: Path, data: Path, folder: Path, shard: Shard | None = None) -> Path:
    """Return the result file of the same job on a board of its own, outside the daemon."""
    spec = with_settings(BoardJobSpec(model, data, board="posix", simulate=True, shard=shard), epochs=EPOCHS)
    trainer, simulator = open_job(spec, folder, lambda event: None, lambda seconds: None)
    assert simulator is not None
    with simulator:
        trainer.start()
        assert trainer.run(lambda: False)
        trainer.write_result(folder / "out.safetensors")
        trainer.close()
    return folder / "out.safetensors"


@pytest.mark.long
def test_a_board_job_survives_unplug_and_kill_in_the_daemon(
    model: Path, simulator: Simulator, data: Path, tmp_path: Path
) -> None:
    async def run(line: FaultyLine) -> None:
        async with running(tmp_path / "daemon", kinds=DEFAULT_KINDS) as live:
            where = ["--runtime-dir", str(live.settings.runtime_dir)]
            job_words = ["--name", "wrist", "--port", str(line.port), "--data", str(data), "--epochs", str(EPOCHS)]
            assert await live.ask(main, ["submit", str(model), "--kind", "mcu", *job_words, *where]) == 0
            assert await asyncio.to_thread(line.pulled.wait, 60.0)
            await live.until_step(1, 1)
            status = await live.ask(live.client.get, "/v1/status")
            assert status["job"]["name"] == "wrist"
            os.kill(live.context.runners.of_job(1).pid, signal.SIGKILL)
            job = await live.until_state(1, JobState.BACKOFF)
            assert 0 < job.step < EPOCHS * 480
            await asyncio.to_thread(line.unplug)
            await asyncio.to_thread(line.plug)
            assert await live.ask(main, ["resume", "wrist", *where]) == 0
            job = await live.until_state(1, JobState.FINISHED)
            assert (job.step, job.total_steps, job.attempts) == (EPOCHS * 480, EPOCHS * 480, 2)
            out = tmp_path / "result.safetensors"
            assert await live.ask(main, ["result", "wrist", "-o", str(out), *where]) == 0
            log = await live.ask(live.client.text, "/v1/jobs/wrist/logs")
            assert f"evaluated at step {EPOCHS * 480}" in log and "finished" in log
            detail = await live.ask(live.client.get, "/v1/jobs/wrist")
            kinds = [entry["kind"] for entry in detail["history"]]
            assert kinds[:2] == ["submitted", "started"] and kinds[-1] == "finished"
            assert detail["trained_s"] > 0 and detail["loss"] is not None

    with FaultyLine(simulator.port, tmp_path / "line", pull_after=PULL_AFTER) as line:
        asyncio.run(asyncio.wait_for(run(line), 240.0))
    result = (tmp_path / "result.safetensors").read_bytes()
    assert result == undisturbed(model, data, tmp_path / "plain").read_bytes()
    assert result.endswith(read_result(simulator))


def test_an_unplugged_board_is_the_reason_in_status(
    model: Path, simulator: Simulator, data: Path, tmp_path: Path
) -> None:
    async def run(line: FaultyLine) -> None:
        async with running(tmp_path / "daemon", kinds=DEFAULT_KINDS) as live:
            where = ["--runtime-dir", str(live.settings.runtime_dir)]
            words = ["--name", "wrist", "--port", str(line.port), "--data", str(data), "--epochs", "1000"]
            assert await live.ask(main, ["submit", str(model), "--kind", "mcu", *words, *where]) == 0
            await live.until_step(1, 1)
            await asyncio.to_thread(line.unplug)
            await live.until(lambda: live.context.runners.of_job(1).waits_for is not None, "the board is missed")
            status = await live.ask(live.client.get, "/v1/status")
            why = status["job"]["waits_for"]
            assert str(line.port) in why and why in status["reasons"]
            assert (await live.ask(live.client.get, "/v1/jobs/wrist"))["reason"] == why
            await asyncio.to_thread(line.plug)
            await live.until(lambda: live.context.runners.of_job(1).waits_for is None, "the board is back")
            at = live.job(1).step
            await live.until_step(1, at + 1)
            detail = await live.ask(live.client.get, "/v1/jobs/wrist")
            assert detail["reason"] == ""
            kinds = [entry["kind"] for entry in detail["history"]]
            assert "interrupted" in kinds and kinds[-1] == "continued"

    with FaultyLine(simulator.port, tmp_path / "line") as line:
        asyncio.run(asyncio.wait_for(run(line), 240.0))


def test_this_computer_and_two_boards_train_at_the_same_time(
    model: Path, simulator: Simulator, data: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        kinds = {**KINDS, JobKind.MCU: DEFAULT_KINDS[JobKind.MCU]}
        async with running(tmp_path / "daemon", kinds=kinds) as live:
            where = ["--runtime-dir", str(live.settings.runtime_dir)]
            words = ["--kind", "mcu", "--data", str(data), "--epochs", "1000", *where]
            for name, board in (
                ("wrist", ["--port", str(simulator.port)]),
                ("ankle", ["--simulate", "--board", "posix"]),
            ):
                assert await live.ask(main, ["submit", str(model), "--name", name, *board, *words]) == 0
            host = await live.submit(LONG, "birds")
            for number in (1, 2, host):
                await live.until_step(number, 1)
            at = [live.job(number).step for number in (1, 2, host)]
            for number, step in zip((1, 2, host), at, strict=True):
                await live.until_step(number, step + 1)
            assert [live.job(number).attempts for number in (1, 2, host)] == [1, 1, 1], "none had to make room"
            status = await live.ask(live.client.get, "/v1/status")
            assert {run["name"] for run in status["running"]} == {"wrist", "ankle", "birds"} and status["waiting"] == []
            assert status["job"]["name"] == status["running"][0]["name"] == "birds"
            metrics = await live.ask(live.client.text, "/metrics")
            assert all(f'job_step{{job="{number}",' in metrics for number in (1, 2, host))
            assert await live.ask(main, ["cancel", "wrist", *where]) == 0
            await live.until(lambda: live.context.runners.of_job(1) is None, "wrist has left")
            assert await live.ask(main, ["pause", "birds", *where]) == 0
            await live.until(lambda: live.context.runners.of_job(host) is None, "birds has left")
            assert live.context.runners.of_job(2) is not None
            print("peak of the board worker:", live.job(2).measured.peak_rss_bytes)
            assert live.job(2).measured.peak_rss_bytes

    asyncio.run(asyncio.wait_for(run(), 240.0))


def test_one_job_over_three_boards_trains_each_sample_exactly_once(
    model: Path, built: Callable[[str], Firmware], data: Path, tmp_path: Path
) -> None:
    async def run(line: FaultyLine, others: list[Simulator]) -> None:
        async with running(tmp_path / "daemon", kinds=DEFAULT_KINDS) as live:
            where = ["--runtime-dir", str(live.settings.runtime_dir)]
            ports = ",".join(str(port) for port in (line.port, *[board.port for board in others]))
            words = ["--name", "drawer", "--boards", ports, "--data", str(data), "--epochs", str(EPOCHS)]
            assert await live.ask(main, ["submit", str(model), "--kind", "mcu", *words, *where]) == 0
            assert [live.job(n).spec.name for n in (1, 2, 3)] == [f"drawer.{n}-of-3" for n in (1, 2, 3)]
            assert await asyncio.to_thread(line.pulled.wait, 60.0)
            await live.until_step(1, 1)
            os.kill(live.context.runners.of_job(1).pid, signal.SIGKILL)
            job = await live.until_state(1, JobState.BACKOFF)
            assert 0 < job.step < EPOCHS * 160
            await asyncio.to_thread(line.unplug)
            await asyncio.to_thread(line.plug)
            assert await live.ask(main, ["resume", "drawer.1-of-3", *where]) == 0
            for number in (1, 2, 3):
                job = await live.until_state(number, JobState.FINISHED)
                assert (job.step, job.total_steps) == (EPOCHS * 160, EPOCHS * 160), "a third of the 480"
                assert job.attempts == (2 if number == 1 else 1), "one board's trouble is no other's"
                out = str(tmp_path / f"{number}.safetensors")
                assert await live.ask(main, ["result", f"drawer.{number}-of-3", "-o", out, *where]) == 0

    with contextlib.ExitStack() as stack:
        boards = [stack.enter_context(Simulator(built("posix"), tmp_path / f"board{n}")) for n in (1, 2, 3)]
        with FaultyLine(boards[0].port, tmp_path / "line", pull_after=PULL_AFTER) as line:
            asyncio.run(asyncio.wait_for(run(line, boards[1:]), 240.0))
        for number, board in enumerate(boards, 1):
            result = (tmp_path / f"{number}.safetensors").read_bytes()
            alone = undisturbed(model, data, tmp_path / f"plain{number}", Shard(number, 3))
            assert result == alone.read_bytes() and result.endswith(read_result(board))
    assert len({(tmp_path / f"{number}.safetensors").read_bytes() for number in (1, 2, 3)}) == 3


@pytest.mark.long
def test_simulated_boards_divide_a_job(model: Path, data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path / "daemon", kinds=DEFAULT_KINDS) as live:
            words = ["--simulate", "--board", "posix", "--boards", "2", "--data", str(data), "--name", "drawer"]
            where = ["--runtime-dir", str(live.settings.runtime_dir)]
            assert await live.ask(main, ["submit", str(model), "--kind", "mcu", *words, *where]) == 0
            for number in (1, 2):
                assert (await live.until_state(number, JobState.FINISHED)).step == 240

    asyncio.run(asyncio.wait_for(run(), 240.0))
