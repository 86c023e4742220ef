"""Trains a model on a board: sample order, snapshots, and how to resume after any interruption.

The order of an epoch depends only on seed and epoch. So a job that was killed, unplugged or reset ends with the same
weights, bit for bit, as an uninterrupted one. Nothing here knows about processes or sockets: worker.py and the command
line drive a trainer and receive its events.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from port_agent.mcu.board.board_errors import (
    BoardJobError,
    DeviceResetError,
    DisconnectedError,
    IncompatibleError,
    MessageError,
    NoAnswerError,
    PagesFailedError,
    PortNotFoundError,
    RefusedError,
    SequenceError,
)
from port_agent.mcu.data import BoardSamples
from port_agent.mcu.protocol.board_model import ModelDirectory
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.effects import RestoreSource, Rule, TrainingOptions, TrainingState
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.messages import ReplyStatus
from port_agent.mcu.snapshot import (
    BEST_NAME,
    MARK_NAME,
    SNAPSHOT_NAME,
    PlaceMark,
    Snapshot,
    TrainingPosition,
    export_parameters,
    keep_course,
    read_mark,
    read_snapshot,
    write_mark,
    write_snapshot,
)
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum
from port_planner.base.targets import explained_share

REQUEST_S = 0.4
"""Longest time in seconds that a request should take, so that pausing and stopping take effect within a second."""

PAGE_TRIES = 3
"""Number of consecutive failures of external memory in one step after which the job ends with that error."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The settings of a training job."""

    epochs: int = 1
    learning_rate: float = 0.03
    rule: Rule = Rule.STOCHASTIC
    scaling: bool = True
    seed: int = 1
    snapshot_every: int = 200
    """Samples between host snapshots."""
    save_every: int = 20_000
    """Samples between saves on the board; there is always a save at the end.

    Each save erases one of two slots, which last for about 10,000 erases.
    """
    evaluate_every: int = 1
    """Epochs between evaluations, besides those before the first epoch and after the last."""
    steps: int | None = None
    """Stop after this many samples in total; None: after the epochs."""

    def __post_init__(self) -> None:
        for name in ("epochs", "snapshot_every", "save_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise BoardJobError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.steps is not None and self.steps < 1:
            raise BoardJobError(f"steps is {self.steps}; give at least 1")
        if not 0 <= self.learning_rate < float("inf"):
            raise BoardJobError(f"learning_rate is {self.learning_rate}; give a number from 0, such as 0.03")
        if not 0 <= self.seed < 1 << 32:
            raise BoardJobError(f"seed is {self.seed}; give a number from 0 to {2**32 - 1}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Event after each request."""

    position: TrainingPosition
    wall_s: float
    """Seconds of this request, transfer included."""
    samples: int


@dataclass(frozen=True, slots=True)
class BoardEvaluation:
    """Accuracy and mean loss (nats, or squared error) over a set of samples.

    `explains`: the samples have targets, and the accuracy is the share of their variance that the model explains.
    """

    step: int
    accuracy: float
    loss: float
    samples: int
    explains: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A snapshot was written on the host."""

    step: int
    size_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class BoardInterrupted:
    """The board was unplugged, or came back without its state; `resumed_at` is None while waiting."""

    reason: str
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class BoardSaved:
    """Whether the board keeps its weights after a power cut, and if not, why.

    `saves`: all saves of this model on this board so far, half of them in each slot.
    """

    step: int
    saves: int
    problem: str | None = None


Event = Progress | BoardEvaluation | SnapshotTaken | BoardInterrupted | BoardSaved


def sample_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of `count` samples in an epoch, which is the same on every machine and
    in every version of Python.
    """
    order = list(range(count))
    random.Random(f"port-mcu:{seed}:{epoch}").shuffle(order)
    return order


def _checksum(samples: BoardSamples) -> str:
    return bytes_checksum(samples.rows.tobytes() + samples.labels.tobytes())


class BoardTrainer:
    """One training job on one board."""

    def __init__(
        self,
        link: Link,
        model: ModelDirectory,
        samples: BoardSamples,
        settings: TrainSettings,
        state_dir: Path,
        emit: Callable[[Event], None],
        held_out: BoardSamples | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self._link, self._model, self._samples, self._settings = link, model, samples, settings
        self._held_out = held_out
        self._snapshot_path = state_dir / SNAPSHOT_NAME
        self._mark_path = state_dir / MARK_NAME
        self._best_path = state_dir / BEST_NAME
        self._best_accuracy: float | None = None
        self._emit, self._wait = emit, wait
        self.position = TrainingPosition()
        self._state = TrainingState(settings.seed, 0)
        self._last_snapshot = 0
        self._last_save = 0
        self._keeps_weights = False
        self._evaluated_step = -1
        self._order: tuple[int, list[int]] = (-1, [])
        self._failed_pages = (-1, 0)
        """The furthest step at which pages failed, and the number of consecutive failures there."""

    @property
    def total_steps(self) -> int:
        """Return how many samples are trained in total."""
        whole = self._settings.epochs * len(self._samples)
        return whole if self._settings.steps is None else min(whole, self._settings.steps)

    @property
    def finished(self) -> bool:
        """Return whether all samples are trained."""
        return self.position.step >= self.total_steps

    def start(self) -> None:
        """Connect, and resume from the device's own RAM or a snapshot, or start from the beginning.

        Raises BoardJobError if the state directory belongs to a training with other samples,
        another seed or another rate.
        """
        keep_course(self._snapshot_path.parent, self._course())
        device = self._link.connect()
        mark = read_mark(self._mark_path)
        if mark is not None and self._still_there(device, mark):
            self.position, self._state = mark.position, mark.state
            device.set_training(self._options())
            self._note_start()
            return
        self._restore(device)

    def run(self, stop: Callable[[], bool]) -> bool:
        """Train until finished (True) or until `stop()` says so (False); survives unplugs and resets."""
        while not stop():
            try:
                if not self._advance():
                    return True
            except (DisconnectedError, NoAnswerError) as error:
                self._emit(BoardInterrupted(str(error), None))
                self._return(stop)
            except (DeviceResetError, SequenceError) as error:
                self._start_over(str(error), stop)
            except PagesFailedError as error:
                self._note_failed_pages(error)
                self._start_over(str(error), stop)
        return False

    def close(self) -> None:
        """Close the port."""
        self._link.close()

    def leave(self) -> None:
        """Write a place mark, one small file; the device keeps the weights while it has power."""
        device = self._link.device
        if device.session.unfinished is None:
            crc = device.parameters_crc()
            write_mark(self._mark_path, PlaceMark(device.info.nonce, self.position, self._state, crc))

    def take_snapshot(self) -> None:
        """Read the parameters and write a snapshot on the host."""
        start = time.monotonic()
        size = write_snapshot(self._snapshot_path, self._snapshot())
        self._last_snapshot = self.position.step
        self._emit(SnapshotTaken(self.position.step, size, time.monotonic() - start))

    def _snapshot(self, accuracy: float | None = None) -> Snapshot:
        parameters = self._link.device.read_parameters()
        return Snapshot(
            self._model.sha256,
            self.position,
            self._options(),
            self._state,
            parameters,
            accuracy,
            None if accuracy is None or self._held_out is None else _checksum(self._held_out),
        )

    def _keep_best(self, accuracy: float) -> None:
        """Store the weights next to the newest snapshot if no earlier ones recognised more of the held-out samples."""
        if self._best_accuracy is None:
            kept = read_snapshot(self._best_path)
            samples = None if self._held_out is None else _checksum(self._held_out)
            is_ours = kept is not None and (kept.model_sha256, kept.held_out) == (self._model.sha256, samples)
            self._best_accuracy = kept.accuracy if kept is not None and is_ours else None
        if self._best_accuracy is None or accuracy > self._best_accuracy:
            write_snapshot(self._best_path, self._snapshot(accuracy))
            self._best_accuracy = accuracy

    def save_on_board(self) -> None:
        """Make the board save its weights to its own flash, from which it boots; report it if it cannot."""
        device = self._link.device
        saves, problem = 0, None
        try:
            saves = device.save().generation
        except RefusedError as error:
            if error.status not in (ReplyStatus.NO_STORAGE.name, ReplyStatus.STORAGE_FAILED.name):
                raise
            problem = str(error)
        self._last_save, self._keeps_weights = self.position.step, True
        self._emit(BoardSaved(self.position.step, saves, problem))

    def write_result(self, path: Path | None) -> str | None:
        """Write the trained parameters to `path`, if given; return the checksum of the file.

        The file is in safetensors format or, with another suffix, the snapshot itself.
        """
        if path is None:
            return None
        content = self._snapshot_path.read_bytes()
        snapshot = read_snapshot(self._snapshot_path)
        if path.suffix == ".safetensors" and snapshot is not None:
            content = export_parameters(snapshot)
        write_atomically(path, content)
        return bytes_checksum(content)

    def evaluate(self, samples: BoardSamples) -> BoardEvaluation:
        """Return accuracy and loss of `samples` with the weights that are now on the device."""
        device, done, correct, loss = self._link.device, 0, 0, 0.0
        while done < len(samples):
            count = min(self._batch(device), len(samples) - done)
            labels = tuple(int(label) for label in samples.labels[done : done + count])
            result = device.evaluate(labels, samples.rows[done : done + count].tobytes())
            done, correct, loss = done + result.done, correct + result.correct, loss + result.loss_sum
        mean, accuracy = loss / max(1, done), correct / max(1, done)
        if samples.targets and done:
            accuracy = explained_share(mean, samples.rows, samples.targets)
        return BoardEvaluation(self.position.step, accuracy, mean, done, samples.targets > 0)

    def _course(self) -> str:
        data = _checksum(self._samples)
        s = self._settings
        rule = f"{s.rule.name.lower()} rounding{'' if s.scaling else ' without scaling'}"
        return f"{len(self._samples)} samples with checksum {data}, seed {s.seed}, rate {s.learning_rate:g}, {rule}"

    def _options(self) -> TrainingOptions:
        return TrainingOptions(self._settings.learning_rate, self._settings.rule, self._settings.scaling)

    def _advance(self) -> bool:
        """Send one request, which can be repeated after a disconnect; return False if nothing is left to do."""
        if self.position.step - self._last_snapshot >= self._settings.snapshot_every:
            self.take_snapshot()
        if self._held_out is not None and self._evaluation_is_due():
            result = self.evaluate(self._held_out)
            self._keep_best(result.accuracy)
            self._emit(result)
            self._evaluated_step = self.position.step
        if self.finished:
            if self._last_snapshot != self.position.step:
                self.take_snapshot()
            if not self._keeps_weights or self._last_save != self.position.step:
                self.save_on_board()
            return False
        if self.position.step - self._last_save >= self._settings.save_every:
            self.save_on_board()
        self._train_once(self._link.device)
        return True

    def _evaluation_is_due(self) -> bool:
        if not self._held_out or self._evaluated_step == self.position.step:
            return False
        between = self.position.index == 0 and self.position.epoch % self._settings.evaluate_every == 0
        return between or self.finished

    def _train_once(self, device: Device) -> None:
        start = time.monotonic()
        batch = self._next_samples(device)
        labels = tuple(int(self._samples.labels[index]) for index in batch)
        result = device.train(labels, b"".join(self._samples.row(index) for index in batch))
        old = self.position
        index = old.index + result.done
        self._state = result.state
        self.position = TrainingPosition(
            old.epoch, index, old.step + result.done, old.loss_sum + result.loss_sum, old.correct + result.correct
        )
        self._emit(Progress(self.position, time.monotonic() - start, result.done))
        if index >= len(self._samples):
            self.position = replace(self.position, epoch=old.epoch + 1, index=0, loss_sum=0.0, correct=0)

    def _next_samples(self, device: Device) -> list[int]:
        if self._order[0] != self.position.epoch:
            order = sample_order(len(self._samples), self._settings.seed, self.position.epoch)
            self._order = (self.position.epoch, order)
        count = min(self._batch(device), self.total_steps - self.position.step)
        return self._order[1][self.position.index : self.position.index + count]

    @staticmethod
    def _batch(device: Device) -> int:
        fits = max(1, device.samples_per_request())
        if device.seconds_per_sample == 0:
            return 1  # a first request of one sample shows how fast the board is
        return max(1, min(fits, int(REQUEST_S / device.seconds_per_sample)))

    def _still_there(self, device: Device, mark: PlaceMark) -> bool:
        """Return whether the device still has the state in which this job left it, and no
        other job has used it since.
        """
        if mark.nonce != device.info.nonce or device.training().state != mark.state:
            return False
        return device.parameters_crc() == mark.parameters_crc

    def _restore(self, device: Device) -> None:
        """Load the newest host snapshot, or the initial weights, onto the device."""
        snapshot = read_snapshot(self._snapshot_path)
        if snapshot is None:
            device.restore(RestoreSource.INITIAL)
            self.position, self._state = TrainingPosition(), TrainingState(self._settings.seed, 0)
        elif snapshot.model_sha256 != self._model.sha256:
            raise IncompatibleError(
                f"{self._snapshot_path} belongs to model {snapshot.model_sha256.hex()[:12]}, but the job's is "
                f"{self._model.sha256.hex()[:12]}; give the job a new state directory, or the old model"
            )
        else:
            device.load_parameters(snapshot.parameters)
            self.position, self._state = snapshot.position, snapshot.state
        device.set_training(self._options(), self._state)
        self._note_start()

    def _note_start(self) -> None:
        self._last_snapshot = self._last_save = self.position.step
        self._keeps_weights = False
        self._evaluated_step = -1

    def _return(self, stop: Callable[[], bool]) -> None:
        """Reconnect after the port disappeared."""
        try:
            if self._link.reattach(self._wait, stop):
                self._emit(BoardInterrupted("connected again", self.position.step))
        except (DeviceResetError, SequenceError) as error:
            self._start_over(str(error), stop)
        except NoAnswerError as error:
            self._emit(BoardInterrupted(str(error), None))

    def _note_failed_pages(self, error: PagesFailedError) -> None:
        """Raise the error if pages keep failing without any completed step in between."""
        reached, tries = self._failed_pages
        self._failed_pages = max(reached, self.position.step), 1 if self.position.step > reached else tries + 1
        if self._failed_pages[1] >= PAGE_TRIES:
            raise error
        self._wait(1.0)

    def _start_over(self, reason: str, stop: Callable[[], bool]) -> None:
        """Restore the snapshot on a device that lost its state; repeat if the port disappears meanwhile."""
        self._emit(BoardInterrupted(reason, None))
        while not stop():
            try:
                self._link.close()
                self._restore(self._link.connect())
            except (DisconnectedError, NoAnswerError, DeviceResetError, PortNotFoundError, MessageError):
                self._wait(1.0)
                continue
            self._emit(BoardInterrupted("restored the snapshot", self.position.step))
            return
