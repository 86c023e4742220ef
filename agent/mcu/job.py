"""A microcontroller job as a file, and everything made from it: link, trainer, simulated board.

job.json: {"v": 1, "model": directory, "data": file or directory, "test": the same, "board": name, "port": path, "serial": text,
"simulate": bool, "held_out_every": n, "out": path, "settings": {fields of TrainSettings}}; paths are relative to it.
A model directory alone is a job with the defaults.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.mcu.board.catalogue import find_board
from agent.mcu.board.firmware import build_firmware
from agent.mcu.board.simulate import Simulator
from agent.mcu.data import BoardSamples, load_samples, split_held_out
from agent.mcu.errors import BoardJobError
from agent.mcu.model import ModelDirectory, read_model
from agent.mcu.protocol.link import Link
from agent.mcu.protocol.messages import Rule
from agent.mcu.protocol.ports import PortSelector
from agent.mcu.trainer import BoardTrainer, Event, TrainSettings

VERSION = 1
DEFAULT_SIMULATED = "qemu-m4f"


@dataclass(frozen=True, slots=True)
class BoardJobSpec:
    """What a job is, before anything is opened."""

    model: Path
    data: Path | None = None
    test: Path | None = None
    """Samples for evaluation; None: some of `data` are held out."""
    board: str | None = None
    port: str | None = None
    serial: str | None = None
    simulate: bool = False
    held_out_every: int = 5
    """Without `test`: every n-th sample is for evaluation only; 0: none."""
    out: Path | None = None
    settings: TrainSettings = field(default_factory=TrainSettings)

    @property
    def selector(self) -> PortSelector:
        """Return which port the job wants."""
        return PortSelector(path=self.port, serial=self.serial)


def read_job(path: Path) -> BoardJobSpec:
    """Return the job in file `path`, or of the model directory `path`.

    Raises BoardJobError with what is wrong.
    """
    if path.is_dir():
        return read_job(path / "job.json") if (path / "job.json").is_file() else BoardJobSpec(model=path)
    try:
        content = json.loads(path.read_text())
        if content.get("v") != VERSION:
            raise BoardJobError(f"{path} has version {content.get('v')}, expected {VERSION}; write it again")
        return _spec(content, path.parent)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BoardJobError(f"cannot use the job {path}: {error!r}; see agent/mcu/job.py for its fields") from error


def _spec(content: dict[str, Any], folder: Path) -> BoardJobSpec:
    settings = dict(content.get("settings", {}))
    if "rule" in settings:
        settings["rule"] = Rule[str(settings["rule"]).upper()]
    texts = {
        name: content[name] for name in ("board", "port", "serial", "simulate", "held_out_every") if name in content
    }
    paths = {name: folder / content[name] for name in ("data", "test", "out") if content.get(name) is not None}
    return BoardJobSpec(model=folder / content["model"], settings=TrainSettings(**settings), **texts, **paths)


def make_link(spec: BoardJobSpec, model: ModelDirectory, port: Path | None) -> Link:
    """Return the link to the job's board; `port` is that of a simulated one."""
    return Link(PortSelector(path=str(port)) if port is not None else spec.selector, model)


def open_simulator(spec: BoardJobSpec, state_dir: Path) -> Simulator:
    """Build the firmware of the job's model and return its simulated board, not yet started."""
    board = find_board(spec.board or DEFAULT_SIMULATED)
    return Simulator(build_firmware(board, spec.model, state_dir / "firmware"), state_dir / "simulator")


def load_data(spec: BoardJobSpec, model: ModelDirectory) -> tuple[BoardSamples, BoardSamples]:
    """Return the samples to train on and those to evaluate on (possibly none).

    Raises BoardJobError where there is no data or it cannot be read.
    """
    if spec.data is None:
        raise BoardJobError("the job has no data; give --data with a .npz file or an inbox directory")
    samples = load_samples(spec.data, model)
    if spec.test is not None:
        return samples, load_samples(spec.test, model)
    return split_held_out(samples, spec.held_out_every)


def open_job(
    spec: BoardJobSpec, state_dir: Path, emit: Callable[[Event], None], wait: Callable[[float], None]
) -> tuple[BoardTrainer, Simulator | None]:
    """Return the trainer of a job, not yet connected, and its simulated board, if it asks for one."""
    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    state_dir.mkdir(parents=True, exist_ok=True)
    simulator = open_simulator(spec, state_dir) if spec.simulate else None
    link = make_link(spec, model, simulator.port if simulator else None)
    trainer = BoardTrainer(link, model, training, spec.settings, state_dir, emit, held_out=held_out, wait=wait)
    return trainer, simulator


def with_settings(spec: BoardJobSpec, **changes: Any) -> BoardJobSpec:
    """Return the job with some of its settings replaced; None keeps what is there."""
    return replace(spec, settings=replace(spec.settings, **{k: v for k, v in changes.items() if v is not None}))
