"""A microcontroller job as a file, and everything made from it: link, trainer, simulated board.

job.json: {"v": 1, "model": directory, "data": file or directory, "test": the same, "board": name, "port": path,
"serial": text, "simulate": bool, "held_out_every": n, "out": path, "settings": {fields of TrainSettings}}; paths are
relative to it. A model directory alone is a job with the defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.board.catalogue import find_board
from port_agent.mcu.board.firmware import build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.data import BoardSamples, keep_shard, load_samples, split_held_out, take_shard
from port_agent.mcu.protocol.board_model import ModelDirectory, read_model
from port_agent.mcu.protocol.effects import Rule
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.ports import PortSelector
from port_agent.mcu.trainer import BoardTrainer, Event, TrainSettings
from port_agent.worker.shard import Shard

VERSION = 1
DEFAULT_SIMULATED = "qemu-m4f"
HELD_OUT_EVERY = 5
"""Default of `held_out_every`: a fifth of the samples is only for evaluation."""


@dataclass(frozen=True, slots=True)
class BoardJobSpec:
    """A job's description, before anything is opened."""

    model: Path
    data: Path | None = None
    test: Path | None = None
    """Samples for evaluation; None: some of `data` are held out."""
    board: str | None = None
    port: str | None = None
    serial: str | None = None
    simulate: bool = False
    held_out_every: int = HELD_OUT_EVERY
    """Every n-th sample is only for evaluation if there is no `test`; 0: none."""
    out: Path | None = None
    settings: TrainSettings = field(default_factory=TrainSettings)
    shard: Shard | None = None
    """Part of the samples to train on this board; None: all. Every board is evaluated on the same ones."""

    @property
    def selector(self) -> PortSelector:
        """Return the selector of the serial port that the job asks for."""
        return PortSelector(path=self.port, serial=self.serial)


def read_job(path: Path) -> BoardJobSpec:
    """Return the job in file `path`, or the default job of the model directory `path`.

    Raises BoardJobError with what is wrong.
    """
    if path.is_dir():
        return read_job(path / "job.json") if (path / "job.json").is_file() else BoardJobSpec(model=path)
    try:
        content = path.read_text()
        version = msgspec.json.decode(content, type=_Head).v
        if version != VERSION:
            raise BoardJobError(f"{path} has version {version}, expected {VERSION}; write it again")
        return _spec(msgspec.json.decode(content, type=_JobFile), path.parent)
    except OSError as error:
        raise BoardJobError(
            f"cannot read the job {path}: {error.strerror}; name job.json or a model directory"
        ) from error
    except UnicodeDecodeError as error:
        raise BoardJobError(
            f"cannot use the job {path}: it is not a text file; name job.json or a model directory"
        ) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BoardJobError(
            f"cannot use the job {path}: {error}; see agent/port_agent/mcu/job.py for its fields"
        ) from error


class _Head(msgspec.Struct):
    v: int


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of TrainSettings; missing ones keep their defaults."""

    epochs: int | msgspec.UnsetType = msgspec.UNSET
    learning_rate: float | msgspec.UnsetType = msgspec.UNSET
    rule: str | msgspec.UnsetType = msgspec.UNSET
    scaling: bool | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    snapshot_every: int | msgspec.UnsetType = msgspec.UNSET
    save_every: int | msgspec.UnsetType = msgspec.UNSET
    evaluate_every: int | msgspec.UnsetType = msgspec.UNSET
    steps: int | None = None


class _JobFile(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    model: str
    data: str | None = None
    test: str | None = None
    board: str | None = None
    port: str | None = None
    serial: str | None = None
    simulate: bool = False
    held_out_every: Annotated[int, msgspec.Meta(ge=0)] = HELD_OUT_EVERY
    out: str | None = None
    settings: _Settings = msgspec.field(default_factory=_Settings)


def read_settings(fields: dict[str, Any]) -> TrainSettings:
    """Return settings as a job file or a project gives them.

    Raises BoardJobError for an unknown name, or a value outside its range.
    """
    try:
        return _settings(msgspec.convert(fields, _Settings))
    except msgspec.ValidationError as error:
        raise BoardJobError(f"wrong settings: {error}; see port_agent.mcu.trainer.TrainSettings") from error


def _settings(given: _Settings) -> TrainSettings:
    settings: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(given).items() if value is not msgspec.UNSET
    }
    if "rule" in settings:
        known = {rule.name.lower(): rule for rule in Rule}
        if settings["rule"] not in known:
            raise BoardJobError(f"there is no rounding rule {settings['rule']!r}; use {', '.join(known)}")
        settings["rule"] = known[settings["rule"]]
    return TrainSettings(**settings)


def _spec(job: _JobFile, folder: Path) -> BoardJobSpec:
    def place(name: str | None) -> Path | None:
        return None if name is None else folder / name

    return BoardJobSpec(
        model=folder / job.model,
        data=place(job.data),
        test=place(job.test),
        board=job.board,
        port=job.port,
        serial=job.serial,
        simulate=job.simulate,
        held_out_every=job.held_out_every,
        out=place(job.out),
        settings=_settings(job.settings),
    )


def make_link(spec: BoardJobSpec, model: ModelDirectory, port: Path | None) -> Link:
    """Return the link to the job's board; `port`: that of a simulated one."""
    return Link(PortSelector(path=str(port)) if port is not None else spec.selector, model)


def open_simulator(spec: BoardJobSpec, state_dir: Path) -> Simulator:
    """Build the firmware of the job's model and return its simulated board, which is not started yet."""
    board = find_board(spec.board or DEFAULT_SIMULATED)
    return Simulator(build_firmware(board, spec.model, state_dir / "firmware"), state_dir / "simulator")


def load_data(spec: BoardJobSpec, model: ModelDirectory) -> tuple[BoardSamples, BoardSamples]:
    """Return the samples to train on and those to evaluate on (possibly none).

    Raises BoardJobError if there is no data, or it cannot be read.
    """
    if spec.data is None:
        raise BoardJobError("the job has no data; give --data with a .npz file or an inbox directory")
    samples = load_samples(spec.data, model)
    if spec.test is not None:
        training, held_out = samples, load_samples(spec.test, model)
    else:
        training, held_out = split_held_out(samples, spec.held_out_every)
    return training if spec.shard is None else take_shard(training, spec.shard), held_out


def open_job(
    spec: BoardJobSpec, state_dir: Path, emit: Callable[[Event], None], wait: Callable[[float], None]
) -> tuple[BoardTrainer, Simulator | None]:
    """Return the trainer of a job, not connected yet, and its simulated board if it asks for one."""
    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    state_dir.mkdir(parents=True, exist_ok=True)
    if spec.shard is not None:
        keep_shard(state_dir, spec.shard, training)
    simulator = open_simulator(spec, state_dir) if spec.simulate else None
    link = make_link(spec, model, simulator.port if simulator else None)
    trainer = BoardTrainer(link, model, training, spec.settings, state_dir, emit, held_out=held_out, wait=wait)
    return trainer, simulator


def with_settings(spec: BoardJobSpec, **changes: Any) -> BoardJobSpec:
    """Return the job with some of its settings replaced; None keeps the existing one."""
    return replace(spec, settings=replace(spec.settings, **{k: v for k, v in changes.items() if v is not None}))
