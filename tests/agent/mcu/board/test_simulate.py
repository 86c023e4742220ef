"""The same bits on every emulated core as in the process, over a real pty; fast here, all cores
and 1,000 steps in `long`.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import DeviceResetError, SimulatorError
from port_agent.mcu.board.firmware import Firmware, build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.job import load_data, read_job
from port_agent.mcu.project import load_project, write_project
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.effects import Infer, TrainingOptions, TrainingState
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.ports import PortSelector
from port_agent.mcu.protocol.queries import DeviceStatus, ResetReason
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_agent.mcu.snapshot import SNAPSHOT_NAME, read_snapshot
from port_agent.mcu.trainer import BoardTrainer, TrainSettings
from tests.agent.mcu.simulated_board import require_board_tools
from tests.agent.mcu.small_model import make_samples, write_model

pytestmark = pytest.mark.process

PATIENT = Patience(first_s=0.5, longest_s=2.0, give_up_s=60.0)


def train(firmware: Firmware, folder: Path, steps: int) -> tuple[bytes, float, DeviceStatus]:
    """Return parameters, last loss and counters after `steps` samples."""
    samples, labels = make_samples(steps)
    with Simulator(firmware, folder / firmware.board.name) as simulator:
        device = Device(Session(SerialTransport(str(simulator.port)), PATIENT))
        device.set_training(TrainingOptions(0.02), TrainingState(5, 0))
        size, loss = 10, 0.0
        for at in range(0, steps, size):
            part = slice(at, at + size)
            loss = device.train(tuple(labels[part]), b"".join(samples[part])).loss_sum
        if device.info.has_storage:
            before = device.read_parameters()
            device.save()
            device.session.reset()
            device.restore()
            assert device.read_parameters() == before
        result = device.read_parameters(), loss, device.status()
        device.session.close()
        return result


@pytest.mark.parametrize(
    ("board", "steps"),
    [
        ("qemu-m4f", 200),
        ("qemu-m0", 200),
        ("qemu-stm32f4", 100),
        ("qemu-nucleo-f446re", 100),
        *(
            pytest.param(f"qemu-{core}", 1000, marks=pytest.mark.long)
            for core in ("m4f", "m7f", "m3", "m0", "m0-32k", "stm32f4")
        ),
    ],
)
def test_board_trains_to_the_same_bits(
    board: str, steps: int, built: Callable[[str], Firmware], tmp_path: Path
) -> None:
    expected, loss, _ = train(built("posix"), tmp_path, steps)
    found, found_loss, status = train(built(board), tmp_path, steps)
    assert found == expected and found_loss == loss
    limits = built(board).board
    assert status.ram_used_bytes is not None and status.ram_used_bytes <= limits.ram_bytes
    assert status.stack_used_bytes is not None and 100 < status.stack_used_bytes < limits.stack_bytes
    assert status.static_ram_bytes is not None and built(board).static_ram_bytes is not None
    assert 0 <= status.static_ram_bytes - (built(board).static_ram_bytes or 0) < 64  # alignment between sections
    assert status.overruns == 0 and status.ticks > 0


@pytest.mark.process
def test_a_simulated_board_runs_once_at_a_time(built: Callable[[str], Firmware], tmp_path: Path) -> None:
    with Simulator(built("posix"), tmp_path) as first:
        with pytest.raises(SimulatorError, match=rf"already runs on .*port \(process {os.getpid()}\)"):
            Simulator(built("posix"), tmp_path).start()
        assert first.running and first.port.exists()
        first.kill()
        with Simulator(built("posix"), tmp_path) as second:
            assert second.running


def test_the_watchdog_of_an_nrf_waits_while_the_core_sleeps(built: Callable[[str], Firmware], tmp_path: Path) -> None:
    """QEMU has no watchdog there, but notes what is written to its registers (nRF51 Series Reference Manual, 24)."""
    log, whole = tmp_path / "writes", built("qemu-m0")
    assert whole.board.machine is not None
    noted = replace(whole.board.machine, arguments=("-d", "unimp", "-D", str(log)))
    firmware = replace(whole, board=replace(whole.board, machine=noted))
    start, paused_in_sleep, feed = (
        "00010000, value 0x00000001",
        "0001050c, value 0x00000000",
        "00010600, value 0x6e524635",
    )
    with Simulator(firmware, tmp_path / "simulator") as simulator:
        session = Session(SerialTransport(str(simulator.port)), PATIENT)
        fed = log.read_text().count(feed)
        Device(session).status()
        assert log.read_text().count(feed) > fed >= 1  # awake, it is fed for each byte
        session.close()
    writes = log.read_text()
    assert 0 < writes.find(paused_in_sleep) < writes.find(start)  # asleep, nothing feeds it: it does not count either


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled gesture recogniser of examples/, with its data."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("example")
    return write_project(load_project(Path(__file__).resolve().parents[4] / "examples" / "imu_gestures"), out).parent


def adapt(job: Path, board: str, folder: Path) -> bytes:
    """Return the parameters after 1,000 training steps of the example on `board`."""
    spec = read_job(job)
    model = read_model(job)
    samples, _ = load_data(spec, model)
    settings = TrainSettings(epochs=99, steps=1000, seed=4, snapshot_every=5000)
    with Simulator(build_firmware(board, job, folder / board), folder / board / "simulator") as simulator:
        link = Link(PortSelector(path=str(simulator.port)), model, PATIENT)
        trainer = BoardTrainer(link, model, samples, settings, folder / board / "state", lambda event: None)
        trainer.start()
        assert trainer.run(lambda: False)
        trainer.close()
    snapshot = read_snapshot(folder / board / "state" / SNAPSHOT_NAME)
    assert snapshot is not None and snapshot.state.steps == 1000
    return snapshot.parameters


@pytest.mark.long
@pytest.mark.parametrize("core", ["m4f", "m7f", "m3", "m0", "stm32f4"])
def test_a_convolutional_net_trains_to_the_same_bits(core: str, example: Path, tmp_path: Path) -> None:
    require_board_tools()
    assert adapt(example, f"qemu-{core}", tmp_path) == adapt(example, "posix", tmp_path)


@pytest.mark.parametrize("saved_bytes", [0, 1600])
def test_all_layers_of_the_digits_net_train_on_the_m0_within_16_kib(saved_bytes: int, tmp_path: Path) -> None:
    """The whole firmware, stack and all; with 1,600 B less for the model, in bands, to the same bits."""
    require_board_tools()
    torch = pytest.importorskip("torch")
    from port_planner.mcu import HostEngine, UpdateOptions, compile_model
    from port_planner.mcu.zoo import DigitsNet

    torch.manual_seed(0)
    data = np.random.default_rng(0).random((12, 1, 8, 8), np.float32)
    module = DigitsNet().eval()
    whole = compile_model(module, data, simd=False)
    model = compile_model(module, data, simd=False, budget=whole.ram_bytes - saved_bytes)
    assert any(row.part for row in model.memory.rows) == (saved_bytes > 0)
    rows, labels = model.quantize_input(data), np.arange(12) % 10
    host = HostEngine(whole)
    host.set_options(UpdateOptions(0.03))
    host.train_many(rows, labels)
    model.write(tmp_path / "model")
    firmware = build_firmware("qemu-m0", tmp_path / "model", tmp_path)
    with Simulator(firmware, tmp_path / "simulator") as simulator:
        device = Device(Session(SerialTransport(str(simulator.port)), PATIENT))
        device.set_training(TrainingOptions(0.03), TrainingState(1, 0))
        for row, label in zip(rows, labels, strict=True):
            device.train((int(label),), row.tobytes())
        assert device.read_parameters() == host.parameters
        used = device.status().ram_used_bytes
        device.session.close()
    assert used is not None and used <= 16 * 1024


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "reason"),
    [("fault", ResetReason.FAULT), ("hang", ResetReason.WATCHDOG)],
)
def test_a_crash_is_a_reset_with_its_reason_and_nothing_runs_twice(
    broken: str, reason: ResetReason, tmp_path: Path
) -> None:
    require_board_tools()
    model = write_model(tmp_path / "model", broken=broken)
    with Simulator(build_firmware("qemu-m4f", model, tmp_path), tmp_path / "simulator") as simulator:
        session = Session(SerialTransport(str(simulator.port)), PATIENT)
        nonce = session.info.nonce
        with pytest.raises(DeviceResetError, match="restore a snapshot"):
            session.request(Infer(1, bytes(24)))
        session.close()
        session = Session(SerialTransport(str(simulator.port)), PATIENT)
        assert session.info.nonce != nonce
        assert Device(session).status().reset_reason is reason
        session.close()
