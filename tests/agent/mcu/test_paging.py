"""Boards that page: medium pulled in mid-step, bits flipped in pages, power cut at random
instants; the same bits after all.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import BuildError, PagesFailedError
from port_agent.mcu.board.catalogue import find_board
from port_agent.mcu.board.firmware import Firmware, build_firmware, page_medium, slot_bytes
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.data import BoardSamples
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.ports import PortSelector
from port_agent.mcu.protocol.queries import DevicePages
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_agent.mcu.snapshot import SNAPSHOT_NAME, read_snapshot
from port_agent.mcu.trainer import BoardInterrupted, BoardTrainer, Event, Progress, TrainSettings, sample_order
from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, compile_model
from port_planner.mcu.autodiff import StepKind, TableRow, reads
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.emit import emit_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import EngineState
from port_planner.mcu.memory import PageUse, plan_memory
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.pages import BoardPaging, PageTransfer
from tests.agent.mcu.simulated_board import QUICK, require_board_tools
from tests.planner.mcu.networks import every_layer

pytestmark = pytest.mark.process

PATIENT = Patience(give_up_s=60.0, wire_bytes_per_s=2e4)
SETTINGS = TrainSettings(epochs=10, learning_rate=0.02, seed=3, snapshot_every=5)
PULLED_WORD = 16 * 1024 * 1024 - 4
"""Of the emulated PSRAM: anything but 0 there and it does not answer (firmware/ports/cmsdk/port.c)."""

STEPS_BETWEEN_FLIPS = 7


@dataclass
class Job:
    """A compiled model, its samples and what training them comes to."""

    folder: Path
    model: CompiledModel
    samples: BoardSamples
    result: bytes
    built: dict[str, Firmware] = field(default_factory=dict)

    def build(self, board: str) -> Firmware:
        if board not in self.built:
            self.built[board] = build_firmware(board, self.folder, self.folder / board)
        return self.built[board]


def make_job(folder: Path, share: float) -> Job:
    module, data = every_layer()
    kept = compile_model(module, data, name="paged")
    model, plan = recompile(kept, FitOptions(int(share * kept.ram_bytes), page=PageMedium.PSRAM))
    assert plan.memory.paged
    model.write(folder)
    rows, labels = model.quantize_input(data), np.arange(len(data)) % model.quantized.graph.classes
    host = HostEngine(model)
    host.set_options(UpdateOptions(SETTINGS.learning_rate))
    host.state = EngineState(SETTINGS.seed, 0)
    for epoch in range(SETTINGS.epochs):
        host.train_many(rows, labels, np.array(sample_order(len(rows), SETTINGS.seed, epoch)))
    return Job(folder, model, BoardSamples(rows, labels), host.parameters)


@pytest.fixture(scope="module", params=["parameters on the medium", "parameters in RAM"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = make_job(tmp_path_factory.mktemp("paged"), 0.5 if "medium" in request.param else 0.8)
    assert bool(made.model.memory.parameters.pages) == ("medium" in request.param)
    return made


@dataclass
class Board:
    """A powered board whose page medium can be pulled and damaged."""

    job: Job
    simulator: Simulator
    patience: Patience
    file: Path
    start: int = 0
    """Where pages begin in the file."""
    pulled_word: int | None = None

    def trainer(self, folder: Path, emit: Callable[[Event], None]) -> BoardTrainer:
        model = read_model(self.job.folder)
        link = Link(PortSelector(path=str(self.simulator.port)), model, self.patience)
        return BoardTrainer(link, model, self.job.samples, SETTINGS, folder, emit, wait=pause_briefly)

    def flip(self, rng: random.Random) -> None:
        """Turn one bit of any page."""
        medium = self.job.model.memory.medium
        assert medium is not None
        self._turn(rng.randrange(medium.size_bytes), 1 << rng.randrange(8))

    def flip_parameter(self, rng: random.Random) -> None:
        """Turn one bit of a paged parameter that every step reads, in both copies: whichever one is read."""
        memory = self.job.model.memory
        copy_bytes, pages = memory.parameters.size_bytes, memory.parameters.pages
        page = pages[rng.choice([row.page for row in memory.rows if row.page in pages and reads_always(row)])]
        at, mask = page.offset + rng.randrange(page.size_bytes), 1 << rng.randrange(8)
        for copy in range(2):
            self._turn(copy * copy_bytes + at, mask)

    def _turn(self, at: int, mask: int) -> None:
        with open(self.file, "r+b") as file:
            file.seek(self.start + at)
            byte = file.read(1)[0]
            file.seek(self.start + at)
            file.write(bytes([byte ^ mask]))

    def pull(self) -> None:
        self._set_pulled(1, lambda: self.file.rename(self.file.with_suffix(".away")))

    def plug(self) -> None:
        self._set_pulled(0, lambda: self.file.with_suffix(".away").rename(self.file))

    def _set_pulled(self, word: int, move: Callable[[], object]) -> None:
        if self.pulled_word is None:
            move()
            return
        with open(self.file, "r+b") as file:
            file.seek(self.pulled_word)
            file.write(word.to_bytes(4, "little"))

    def state(self) -> tuple[bytes, DevicePages]:
        session = Session(SerialTransport(str(self.simulator.port)), self.patience)
        device = Device(session)
        found = device.read_parameters(), device.pages()
        session.close()
        assert found[1] is not None
        return found[0], found[1]


def reads_always(row: TableRow) -> bool:
    """Return whether a row reads a page in every step, the one right behind a training sample included."""
    return row.kind is StepKind.PAGE_IN and not row.carried


def pause_briefly(seconds: float) -> None:
    threading.Event().wait(min(seconds, 0.02))


@pytest.fixture
def process(job: Job, tmp_path: Path) -> Iterator[Board]:
    with Simulator(job.build("posix"), tmp_path / "simulator") as simulator:
        yield Board(job, simulator, QUICK, tmp_path / "simulator" / "pages.bin")


@pytest.fixture
def emulated(job: Job, tmp_path: Path) -> Iterator[Board]:
    require_board_tools()
    firmware = job.build("qemu-m4f")
    with Simulator(firmware, tmp_path / "simulator") as simulator:
        start = 2 * slot_bytes(firmware.board, job.folder)
        yield Board(job, simulator, PATIENT, tmp_path / "simulator" / "storage.bin", start, PULLED_WORD)


def train(
    board: Board, folder: Path, emit: Callable[[Event], None] = lambda event: None, power: threading.Lock | None = None
) -> None:
    """Train to the end. `power`: held while the job connects, which a job that starts does only once."""
    trainer = board.trainer(folder, emit)
    with power or threading.Lock():
        trainer.start()
    assert trainer.run(lambda: False)
    trainer.close()


def train_with_flips(board: Board, folder: Path, flips: int, step_s: float) -> int:
    """Train while bits of pages flip; return how often a step was refused.

    Each time a bit turns anywhere in the middle of a step and, where parameters are paged, one
    of them between two steps.
    """
    rng, refused = random.Random(7), 0
    timers: list[threading.Timer] = []
    seen = 0

    def emit(event: Event) -> None:
        nonlocal refused, seen
        refused += isinstance(event, BoardInterrupted) and "PAGE_DAMAGED" in event.reason
        if isinstance(event, Progress) and event.position.step > seen + STEPS_BETWEEN_FLIPS and len(timers) < flips:
            seen = event.position.step
            if board.job.model.memory.parameters.pages:
                board.flip_parameter(rng)
            timers.append(threading.Timer(rng.uniform(0, step_s), board.flip, [rng]))
            timers[-1].start()

    train(board, folder, emit)
    for timer in timers:
        timer.join()
    assert len(timers) == flips
    return refused


def test_an_undisturbed_board_pages_to_the_hosts_bits(process: Board, tmp_path: Path) -> None:
    train(process, tmp_path / "job")
    parameters, pages = process.state()
    medium = process.job.model.memory.medium
    assert medium is not None and parameters == process.job.result
    steps = SETTINGS.epochs * len(process.job.samples)
    assert pages.written_bytes == steps * medium.written_bytes and pages.needed_bytes == medium.size_bytes
    assert (pages.medium, pages.failed, pages.damaged, pages.torn) == ("psram", 0, 0, False)


def test_flipped_bits_are_found_and_trained_over(process: Board, tmp_path: Path) -> None:
    refused = train_with_flips(process, tmp_path / "job", 12, 0.004)
    assert saved(tmp_path / "job") == process.job.result
    if process.job.model.memory.parameters.pages:  # an activation is away for a moment only
        assert refused >= 12


def test_a_page_damaged_in_a_step_is_refused_by_name(process: Board, tmp_path: Path) -> None:
    """Every byte of every page is turned: what was on its way then cannot come back unseen."""
    reasons: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Progress) and event.position.step == 7 and not reasons:
            damage = threading.Thread(target=turn_all, args=(process.file, stop))
            damage.start()
            damaged.append(damage)
        if isinstance(event, BoardInterrupted):
            reasons.append(event.reason)
            stop.set()

    stop, damaged = threading.Event(), list[threading.Thread]()
    train(process, tmp_path / "job", emit)
    for damage in damaged:
        damage.join()
    assert any("PAGE_DAMAGED" in reason and "snapshot" in reason for reason in reasons)
    assert process.state()[0] == process.job.result


def turn_all(file: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        content = np.frombuffer(file.read_bytes(), np.uint8)
        with open(file, "r+b") as pages:
            pages.write((content ^ 0xFF).tobytes())


def saved(folder: Path) -> bytes:
    """Return the parameters that the job ended with; a bit may have flipped on the board since."""
    snapshot = read_snapshot(folder / SNAPSHOT_NAME)
    assert snapshot is not None
    return snapshot.parameters


def train_with_pulls(board: Board, folder: Path, pulls: int) -> list[str]:
    """Train while the medium is pulled and plugged again; return why steps were refused."""
    rng, reasons = random.Random(5), list[str]()
    timers: list[threading.Timer] = []
    seen = -1

    def emit(event: Event) -> None:
        nonlocal seen
        if isinstance(event, BoardInterrupted) and event.resumed_at is None:
            reasons.append(event.reason)
            for timer in timers:
                timer.join()
            if len(timers) > len(plugged):
                plugged.append(True)
                board.plug()
        elif isinstance(event, Progress) and event.position.step > seen + 3 and len(timers) < pulls:
            seen = event.position.step
            if len(timers) == len(plugged):
                timers.append(threading.Timer(rng.uniform(0, 0.004), board.pull))
                timers[-1].start()

    plugged: list[bool] = []
    train(board, folder, emit)
    return reasons


def test_a_medium_pulled_in_mid_step_and_plugged_again(process: Board, tmp_path: Path) -> None:
    reasons = train_with_pulls(process, tmp_path / "job", 4)
    assert sum("MEDIUM_FAILED" in reason for reason in reasons) == 4
    assert process.state()[0] == process.job.result


def test_a_medium_that_stays_away_ends_the_job_by_name_and_it_goes_on_later(process: Board, tmp_path: Path) -> None:
    def emit(event: Event) -> None:
        if isinstance(event, Progress) and event.position.step == 12:
            process.pull()

    trainer = process.trainer(tmp_path / "job", emit)
    trainer.start()
    with pytest.raises(PagesFailedError, match=r"rejected TRAIN: MEDIUM_FAILED.*external memory does not respond"):
        trainer.run(lambda: False)
    trainer.close()
    process.plug()
    train(process, tmp_path / "job")
    assert process.state()[0] == process.job.result


def train_through_power_cuts(board: Board, folder: Path, cuts: int) -> int:
    """Train while the power goes at random instants, most of them in the middle of a step; return how often it did."""
    rng, done = random.Random(11), 0
    lock, stop = threading.Lock(), threading.Event()

    def cut() -> None:
        nonlocal done
        while done < cuts and not stop.wait(rng.uniform(0.0, 0.25)):
            with lock:
                board.simulator.kill()
                done += 1
                board.simulator.start()
        stop.wait()  # QEMU goes off with the thread that switched it on

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        while True:
            train(board, folder, power=lock)
            if done >= cuts:
                return done
            shutil.rmtree(folder)  # it was done before the power was cut so often: once more from the start
    finally:
        stop.set()
        cutter.join()


def test_power_cut_at_random_instants(process: Board, tmp_path: Path) -> None:
    assert train_through_power_cuts(process, tmp_path / "job", 8) == 8
    assert saved(tmp_path / "job") == process.job.result


@pytest.mark.long
def test_power_cut_at_a_hundred_random_instants(process: Board, tmp_path: Path) -> None:
    assert train_through_power_cuts(process, tmp_path / "job", 100) == 100
    assert saved(tmp_path / "job") == process.job.result


@pytest.mark.long
def test_a_slow_medium_gives_the_same_bits(job: Job, tmp_path: Path) -> None:
    """Transfers go on beside rows and are waited for where the table says so: 400 KB/s, of
    which each sample moves some.
    """
    require_board_tools()
    board = find_board("qemu-m4f")
    slow = board.media["psram"] | {"PORT_PAGE_BYTES_PER_S": 400_000}
    firmware = build_firmware(replace(board, media={"psram": slow}), job.folder, tmp_path)
    with Simulator(firmware, tmp_path / "simulator") as simulator:
        train(Board(job, simulator, PATIENT, tmp_path / "simulator" / "storage.bin"), tmp_path / "job")
    assert saved(tmp_path / "job") == job.result


@pytest.mark.long
def test_pulls_flips_and_power_cuts_in_qemu(emulated: Board, tmp_path: Path) -> None:
    reasons = train_with_pulls(emulated, tmp_path / "pulls", 4)
    assert sum("MEDIUM_FAILED" in reason for reason in reasons) == 4
    assert emulated.state()[0] == emulated.job.result
    refused = train_with_flips(emulated, tmp_path / "flips", 12, 0.1)
    assert saved(tmp_path / "flips") == emulated.job.result
    if emulated.job.model.memory.parameters.pages:
        assert refused >= 12
    assert train_through_power_cuts(emulated, tmp_path / "cuts", 100) == 100
    assert saved(tmp_path / "cuts") == emulated.job.result


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("board", "medium"), [("nrf52840-dk", "nor"), ("feather-nrf52840", "nor"), ("feather-nrf52840", "sd")]
)
def test_boards_with_spi_media_build(board: str, medium: str, tmp_path: Path) -> None:
    require_board_tools()
    module, data = every_layer(2)
    graph = import_module(module, data.shape[1:])
    name = graph.ops[0].name
    found = board_pages(compile_model(module, data), name, medium)
    found.write(tmp_path)
    firmware = build_firmware(board, tmp_path, tmp_path / "out")
    symbols = subprocess.run(["arm-none-eabi-nm", str(firmware.elf)], capture_output=True, text=True, check=True).stdout
    assert f" {medium}_open" in symbols


def board_pages(model: CompiledModel, tensor: str, medium: str) -> CompiledModel:
    """Return the model with one activation paged through the middle of its step."""
    program = model.memory.program
    used = [i for i, step in enumerate(program.steps) if tensor in reads(program.graph, step)]
    before = max(i for i in used if program.steps[i].kind is StepKind.FORWARD)
    after = min(i for i in used if i > before)
    paging = BoardPaging((PageTransfer(tensor, (before + 1, before + 2), (after - 1, after)),))
    use = PageUse(medium, PageMedium(medium).block_bytes, paging)
    memory = plan_memory(program.graph, model.scheme, pages=use)
    return replace(model, memory=memory, generated=emit_model(model.quantized, memory, model.scheme, model.name))


def test_a_board_without_the_medium_is_refused_at_build(job: Job, tmp_path: Path) -> None:
    assert page_medium(job.folder) == "psram"
    with pytest.raises(BuildError, match="pages to psram, but qemu-m0 has no external memory"):
        build_firmware(find_board("qemu-m0"), job.folder, tmp_path)
