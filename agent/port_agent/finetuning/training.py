"""The training loop of a fine-tuning: plain PyTorch, which `exec` runs in a budget; the loop only checks whether the budget suffices."""

import contextlib
import itertools
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from port_agent.finetuning.accumulation.by_layers import ByLayers, NotByLayersError
from port_agent.finetuning.accumulation.choice import accumulation_of, cannot_run_by_layers
from port_agent.finetuning.accumulation.head_loss import Beside, EncoderInput, LabelLoss, LearnedLoss, kept_places
from port_agent.finetuning.accumulation.odds_ratio_loss import OddsRatioLoss
from port_agent.finetuning.accumulation.preference_loss import PreferenceLoss
from port_agent.finetuning.accumulation.update import ClippedAdamW
from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.borders import BORDER_TOKENS, check_borders
from port_agent.finetuning.budget_check import MOMENTS, BudgetCheck
from port_agent.finetuning.checkpoint import Checkpoint, FinetuneProgress
from port_agent.finetuning.compute import choose_compute
from port_agent.finetuning.curve import CURVE, Curve, CurvePoint
from port_agent.finetuning.evaluation import perplexity
from port_agent.finetuning.event_file import EventFile
from port_agent.finetuning.federated import FederatedRound, give_adapter_of
from port_agent.finetuning.inputs.libraries import plain_model
from port_agent.finetuning.inputs.model_files import check_free_space
from port_agent.finetuning.inputs.on_device import begin_on_device, random_states, set_random_states
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.inputs.schedule import rate_share
from port_agent.finetuning.model_card import CLIP_NORM, MODEL_CARD, TrainedOn, model_card
from port_agent.finetuning.result import check_result_place, forget_writing, may_replace, note_writing, only_run
from port_agent.finetuning.rotations import check_rotations
from port_agent.finetuning.steering import CHECKPOINT_S, Steering, TrainingExit
from port_agent.finetuning.text.sequence_file import IGNORED, TokenSequence
from port_agent.finetuning.text.sequences import BUCKET_TOKENS, masked
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.text.tokenizing import TokenizedData, TokenizerHere, TokenizerProtocol
from port_agent.finetuning.trained_model import check_takes, load_model, multiplied_bytes, stored_dtype
from port_agent.intercept.budget import flash_written_bytes, leaving_headroom, without_prefetch
from port_agent.system.atomic_file import atomic_directory, write_atomically
from port_planner.base.errors import ExitCode
from port_planner.ir.device_kinds import CPU

_SAMPLE_TOKENS = 48

LABELS = "labels.json"
"""File in the result's directory: the labels in the order of the model's logits."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update: the number done so far, the mean loss of its tokens, its tokens and seconds."""

    done: int
    of: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FinetuneOutcome:
    """The outcome. Losses are means over the held-out tokens or texts, None without held-out data.

    `left`: whether it was asked to stop, in which case the same command continues. `labels`: the labels from which the model chooses, () if
    it predicts tokens.
    """

    updates: int
    left: bool
    loss_before: float | None = None
    loss_after: float | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    out: str = ""
    labels: tuple[str, ...] = ()
    is_of_tokens: bool = True
    """Whether losses are per token, so that a perplexity can be given; otherwise they are per label, or per pair of
    answers.
    """
    best_updates: int | None = None
    """The update whose weights are the result, the best that was evaluated; None if they are the last."""
    evaluations: tuple[CurvePoint, ...] = ()


ReportUpdate = Callable[[Update], None]


def finetune(
    options: FinetuneOptions,
    report: ReportUpdate,
    note: Callable[[str], None],
    steering: Steering | None = None,
    given: FederatedRound | None = None,
    tokenizer: TokenizerProtocol | None = None,
) -> FinetuneOutcome:
    """Fine-tune, from a checkpoint if there is one; write the adapter or model to `options.out`, or the result of a
    `given` round to its file.

    `note` receives remarks for people. `tokenizer`: None for one in this process. Raises FinetuneError, and TrainingExit if `steering`
    does.
    """
    if given is None:
        check_result_place(options)
    with only_run(options):
        return _finetune(options, report, note, steering or Steering(), given, tokenizer or TokenizerHere(options))


def _finetune(
    options: FinetuneOptions,
    report: ReportUpdate,
    note: Callable[[str], None],
    steering: Steering,
    given: FederatedRound | None,
    tokenizer: TokenizerProtocol,
) -> FinetuneOutcome:
    found = tokenizer.tokenized()
    task, split = found.task, found.split
    for text in found.notes:
        note(text)
    options, why = choose_compute(options, task, None if given is None else given.name)
    if why:
        note(f"computes in {options.compute}: {why}")
    begin_on_device(options.device)
    base = BaseRecord.of(options)
    budget = BudgetCheck(options)
    longest = split.lengths.longest
    largest = max((split.lengths.largest_token, *found.prompt))

    def check(model: Any) -> None:
        check_takes(model, max(longest, split.lengths.longest_source), largest)
        check_rotations(model, longest, alone=options.sequences_at_once == 1 and not options.borders)
        if options.base is not None:
            budget.check_least(
                LearnedLoss(model, options.head_rows, task.kind, autocast=options.autocast),
                options.sequences_at_once * longest,
            )

    model = load_model(options, task, note, check)
    if options.borders:
        check_borders(plain_model(model), split.train[0].tokens[:BORDER_TOKENS])
    if given is not None:
        given.give(model)
    elif options.begin_from is not None:
        _begin_from(Path(options.begin_from), model, base)
        if options.dpo is not None:
            note(
                f"--dpo compares with the model without adapters, not with what {options.begin_from} has learned; to "
                "compare with that, merge it into the model first (port-agent merge), and train a new adapter of the result"
            )
    if options.device != CPU:
        with budget.held():
            _move(model, options.device)
    run = _Finetuning(options, found, base, model, budget, steering, given, note)
    if given is None and (text := _uneven(options, len(split.train))):
        note(text)
    try:
        with run.budget.held():
            return _run(run, tokenizer, report, note)
    except TrainingExit:
        run.keep_if_time()
        raise


def _move(model: Any, kind: str) -> None:
    """Move a model to a kind of device. Weights that layers share stay shared, also where torch makes a new parameter for each."""
    shared: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shared.setdefault(id(parameter), []).append((module, name))
    model.to(kind)
    for (module, name), *others in shared.values():
        for other, of_other in others:
            setattr(other, of_other, getattr(module, name))


def _begin_from(folder: Path, model: Any, base: BaseRecord) -> None:
    """Initialize a model's adapters from a directory. Raises FinetuneError if they belong to different weights."""
    record = BaseRecord.read(folder)
    if record is not None and (record.grid, record.files) != (base.grid, base.files):
        raise FinetuneError(
            f"{folder} was trained on other weights than those of {base.model}, or with another quantization "
            f"({record.grid or 'none'}); give the model and --base that it was trained with"
        )
    give_adapter_of(model, folder)


def _run(
    run: "_Finetuning", tokenizer: TokenizerProtocol, report: ReportUpdate, note: Callable[[str], None]
) -> FinetuneOutcome:
    options, model = run.options, run.model
    run.check_budget()
    if run.begin():
        note(f"resumes after {run.done} of {run.updates} updates")
    elif run.loss_before is not None and run.learns_tokens:
        note(f"perplexity of held-out text before the first update: {perplexity(run.loss_before):.1f}")
    shown = run.prompt if options.sample is not None and run.given is None else None
    before = None if shown is None or run.done else _sample(model, tokenizer, shown)
    run.train(report)
    if not run.is_done:
        return FinetuneOutcome(run.done, left=True, out=str(run.checkpoint.path))
    run.keep_all()
    loss_after, best = run.last_evaluation()
    after = None if shown is None else _sample(model, tokenizer, shown)
    run.finish()
    if run.given is not None and run.given.trains:
        run.given.take(model)
        run.check_peak()
        run.finished("")
        return FinetuneOutcome(run.done, False, run.loss_before, loss_after)
    run.write_result(tokenizer, loss_after)
    run.check_peak(written=options.out)
    run.finished(options.out)
    course = tuple(run.curve.evaluations) if options.evaluate_every else ()
    return FinetuneOutcome(
        run.done,
        False,
        run.loss_before,
        loss_after,
        before,
        after,
        options.out,
        run.task.labels,
        run.learns_tokens,
        best,
        course,
    )


def count_updates(options: FinetuneOptions, sequences: int) -> int:
    """Return the number of updates for `sequences` sequences to train on."""
    return options.updates or max(1, options.epochs * sequences // (options.batch * options.accumulate))


def _uneven(options: FinetuneOptions, sequences: int) -> str:
    """Return a note if whole updates do not use each sequence once per epoch; "" if they do, or if their number is given."""
    together, asked = options.batch * options.accumulate, options.epochs * sequences
    taken = count_updates(options, sequences) * together
    if options.updates is not None or taken == asked:
        return ""
    if taken > asked:
        return f"an update takes {together} sequences and there are {asked:,}, so some are learned more than once; lower --batch or --accumulate"
    return (
        f"{asked - taken} of {asked:,} sequences are not learned, because they do not fill an update of {together}; give "
        "--updates, or another --batch or --accumulate"
    )


def _loss_of(model: Any, options: FinetuneOptions, task: Task) -> LearnedLoss | LabelLoss | PreferenceLoss:
    """Return the loss of a batch. Raises FinetuneError if it needs a model for comparison that does not exist, or one that other options
    exclude.
    """
    if task.labels:
        return LabelLoss(model, autocast=options.autocast)
    if options.orpo is not None:
        if options.dpo is not None or options.head_rows is not None or options.dropout:
            raise FinetuneError(
                "--orpo compares answers on all rows at once and without dropout; leave out --dpo, --head-rows and "
                "--dropout"
            )
        return OddsRatioLoss(model, options.orpo, autocast=options.autocast)
    if options.dpo is None:
        return LearnedLoss(model, options.head_rows, task.kind, autocast=options.autocast)
    if options.lora_rank is None or options.head_rows is not None or options.dropout:
        raise FinetuneError(
            "--dpo compares answers with those of the model without its adapters, on all rows at once and without "
            "dropout; leave out --full, --head-rows and --dropout"
        )
    return PreferenceLoss(model, options.dpo, autocast=options.autocast)


def _events_of(options: FinetuneOptions) -> EventFile | None:
    """Return the file to which losses are added, if one is requested. Raises FinetuneError if it cannot be created."""
    try:
        return None if options.events is None else EventFile(Path(options.events))
    except OSError as error:
        raise FinetuneError(
            f"{options.events} cannot be written to ({error.strerror}); give another --tensorboard"
        ) from error


class _Finetuning:
    """Model, optimizer, schedule and data of one fine-tuning."""

    def __init__(
        self, options: FinetuneOptions, data: TokenizedData, base: BaseRecord, model: Any, budget: BudgetCheck, steering: Steering,
        given: FederatedRound | None, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._note = note
        task, split = data.task, data.split
        self.options, self.task, self.base, self.model = options, task, base, model
        self._vocabulary, self.prompt = data.vocabulary, data.prompt
        self._steering, self.given = steering, given
        self._learned_loss = _loss_of(model, options, task)
        self.budget = budget
        self._by_layers: ByLayers | None = None
        """Runs the batches of an update together; None: they run one at a time."""
        self._may_run_by_layers = True
        self.train_on, self.held_out = split.train, split.held_out
        self.updates = count_updates(options, len(split.train)) if given is None or given.trains else 0
        self._first = 0 if given is None else self.updates * (given.number or 0)
        """Number of updates of earlier rounds; this round continues in the data where they ended."""
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self._starts = [] if options.proximal_mu is None else [p.detach().clone() for p in self.trained]
        """Weights near which the proximal term keeps the trained ones."""
        self.optimizer = ClippedAdamW(self.trained, options.learning_rate, CLIP_NORM, options.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda u: rate_share(options.schedule, u, self.updates, options.warm_up)
        )
        self.parts = {"optimizer": self.optimizer, "schedule": self.schedule}
        self.checkpoint = Checkpoint(
            options, split.train, base, None if given is None else given.name, held_out=split.held_out
        )
        self._orders: dict[int, array[int]] = {}
        """Orders of the sequences by epoch; only the last requested one is kept."""
        self.done = 0
        self.curve = Curve()
        self._events = _events_of(options)
        self.loss_before: float | None = None
        self._kept = 0
        """The update after which the last checkpoint was written."""
        if given is not None and given.number:  # a model drawn by the seed computes its own masks
            torch.manual_seed(options.seed + given.number)
        self._generators = random_states(options.device)
        """The generators' states after `done` updates."""

    @property
    def _checkpoint_bytes(self) -> int:
        """The size of a checkpoint: what is trained, and AdamW's moments."""
        return sum((1 + MOMENTS) * int(t.nbytes) for t in self.trained)

    @property
    def learns_tokens(self) -> bool:
        """Whether losses are per token."""
        return not self.task.labels and not self.options.learns_pairs

    def check_budget(self) -> None:
        """Raise FinetuneError if the budget of this process is too small for the longest batch."""
        longest = max(itertools.chain(self.train_on, self.held_out), key=lambda sequence: len(sequence.tokens))
        rows = self.options.sequences_at_once * len(longest.tokens)
        noted = self.budget.check(
            self._learned_loss, self.trained, self._as_tensors([longest])[0], rows, self._rows_met
        )
        if noted is not None:
            self._note(noted)
        self._choose_order()

    def _choose_order(self, flash_bytes: int = 0) -> None:
        """Run layer by layer from here on if it is worthwhile, on the CPU; `flash_bytes`: see `accumulation_of`."""
        if self.options.device != CPU:
            return
        weights_bytes = multiplied_bytes(self.model) + (1 + MOMENTS) * sum(t.nbytes for t in self.trained)
        accumulation = accumulation_of(
            plain_model(self.model), self.options, self.task, weights_bytes, self.budget.tensor_bytes(), flash_bytes
        )
        if accumulation.by_layers and isinstance(self._learned_loss, LearnedLoss):
            count = self.options.accumulate
            what = f"the {count} batches of an update run" if count > 1 else "the batch of an update runs"
            self._note(f"{what} layer by layer: {accumulation.why}")
            self._by_layers = ByLayers(self.model, self._learned_loss)

    def _rows_met(self) -> set[int]:
        """Return the numbers of rows of logits that occur in all updates and in held-out data, known before the first
        update.
        """
        begin, count = self._first * self.options.accumulate, self.updates * self.options.accumulate
        trained = {_rows(self._batch(index)) for index in range(begin, begin + count)}
        return trained | {_rows([sequence]) for sequence in self.held_out}

    def begin(self) -> bool:
        """Restore the checkpoint and return True; or evaluate held-out data if there is none.

        Raises FinetuneError, also if the disk has no space for a checkpoint.
        """
        progress = self.checkpoint.read(self.trained, self.parts)
        self.done = self._kept = 0 if progress is None else progress.updates
        if progress is None and self.given is None:
            check_free_space(Path(self.options.out), self._checkpoint_bytes, "checkpoints take")
        self._steering.began(self.done, self.updates)
        self.loss_before = self.held_out_loss() if progress is None else progress.loss_before
        self.curve = Curve() if progress is None else progress.curve
        if progress is None and self.loss_before is not None:
            self.curve.evaluations.append(CurvePoint(0, self.loss_before))
            self._tell("held-out loss", self.loss_before)
        self._generators = random_states(self.options.device)
        return progress is not None

    def train(self, report: ReportUpdate) -> None:
        """Train until all updates are done, or until it is asked to leave; then write a checkpoint."""
        steering = self._steering
        with steering.watching():
            self._evaluate_if_due()
            while not self.is_done and not steering.leaving:
                begin, written_bytes = time.monotonic(), flash_written_bytes()
                loss, tokens = self._gradients(self.done)
                self.check_peak()
                if not math.isfinite(loss):
                    self.check_weights()
                    raise FinetuneError(
                        f"the loss of update {self.done + 1} is {loss}; the last checkpoint is in "
                        f"{self.checkpoint.path}; lower --lr and give another --out"
                    )
                with steering.updating():
                    self._update()
                self.check_peak()
                self.curve.losses.append(loss)
                self._tell("loss", loss)
                report(Update(self.done, self.updates, loss, tokens, time.monotonic() - begin))
                self._evaluate_if_due()
                if steering.checkpoint_due() or steering.leaving:
                    self._keep()
                written_bytes = flash_written_bytes() - written_bytes
                if written_bytes and self._by_layers is None and self._may_run_by_layers:
                    self._choose_order(written_bytes)

    def _tell(self, name: str, value: float) -> None:
        """Add a number to TensorBoard's file, if there is one. A failure to write is reported once and does not stop the training."""
        if self._events is None:
            return
        try:
            self._events.add(name, value, self.done)
        except OSError as error:
            self._events = None
            self._note(f"{self.options.events} receives no more losses: {error}")

    @property
    def is_done(self) -> bool:
        """Whether all updates are made, or the patience is exhausted."""
        return self.done >= self.updates or self.curve.is_over(self.options.patience)

    def _evaluate_if_due(self) -> None:
        """Evaluate held-out data after this update if it is due; keep the weights if they are the best."""
        every = self.options.evaluate_every
        if every is not None and self.done and self.done % every == 0 and self.given is None:
            self._evaluate()

    def _evaluate(self) -> None:
        if self.curve.at(self.done) is not None or (loss := self.held_out_loss()) is None:
            return
        self.curve.evaluations.append(CurvePoint(self.done, loss))
        self._tell("held-out loss", loss)
        best = self.curve.best_trained
        better = best is not None and best.updates == self.done
        if better and self.options.evaluate_every is not None:
            with self._writing():
                self.checkpoint.keep_best(self.done, self.trained)
        self._note(
            f"held-out loss after {self.done} of {self.updates} updates: {loss:.3f}{', the lowest' if better else ''}"
        )

    def last_evaluation(self) -> tuple[float | None, int | None]:
        """Return the held-out loss of the result, and the update of its weights if they are not the last; in that case, restore these
        best weights.
        """
        if not self.updates:
            return self.loss_before, None
        if self.options.evaluate_every is None or self.given is not None:
            return self.held_out_loss(), None
        self._evaluate()
        best = self.curve.best_trained
        if best is None:
            return None, None
        if self.curve.best != best:
            self._note("the held-out loss was never lower than before the first update; lower --lr, or give more data")
        if best.updates == self.done:
            return best.loss, None
        self.checkpoint.restore_best(best.updates, self.trained)
        return best.loss, best.updates

    def finish(self) -> None:
        """Prepare to write complete results; raises TrainingExit if the run must end before that."""
        self._steering.finish()

    def finished(self, out: str) -> None:
        """Remove the checkpoint, which is not needed once the results are in `out`."""
        self._steering.finished(self.done, out)
        forget_writing(self.options)
        self.checkpoint.remove()

    def check_peak(self, written: str | None = None) -> None:
        """Raise FinetuneError if the process exceeded the budget. The error names the checkpoint, and `written` if that is complete.

        A slight excess is only reported.
        """
        try:
            if (passed := self.budget.check_peak()) is not None:
                self._note(passed)
        except FinetuneError as error:
            if self.done > self._kept:
                self._keep()
            kept = f"; {self.checkpoint.path} has {self.done} of {self.updates} updates, from which the same command continues"
            whole = "" if written is None else f"; {written} is complete nevertheless"
            raise FinetuneError(f"{error}{kept if self._kept else ''}{whole}") from error

    def keep_if_time(self) -> None:
        """Write a checkpoint of the last finished update during the next one, if there is time and need.

        So far, the next update has changed only the gradients and the random generator.
        """
        if self.done > self._kept and self._steering.has_time_to_write(self._checkpoint_bytes):
            self._keep()

    def check_weights(self) -> None:
        """Raise FinetuneError, naming the file, if files of frozen weights have changed since the start, because the result would belong
        to neither version.
        """
        if self.options.lora_rank is not None:
            self.base.check(Path(self.options.model))

    def keep_all(self) -> None:
        """Write a checkpoint of the last update: if the remaining work fails, the same command does it again."""
        if self.done > self._kept:
            self._keep()

    def write_result(self, tokenizer: TokenizerProtocol, loss_after: float | None) -> None:
        """Write the model or adapter, completely or not at all; `loss_after`: of held-out data. Raises FinetuneError."""
        self.check_weights()
        options = self.options
        try:
            self._leave_device()
            if options.lora_rank is None and not options.float32_result:
                self.model.to(stored_dtype(Path(options.model)))
            replaced = may_replace(options)
            note_writing(options)
            with atomic_directory(Path(options.out), replaced=replaced) as folder:
                self.model.save_pretrained(folder)
                tokenizer.save(str(folder))
                if options.lora_rank is not None:
                    self.base.write(folder)
                (folder / MODEL_CARD).write_text(self._card(loss_after), encoding="utf-8")
                if options.evaluate_every is not None:
                    (folder / CURVE).write_text(self.curve.csv())
                if self.task.labels:
                    write_atomically(folder / LABELS, json.dumps(self.task.labels, ensure_ascii=False).encode())
        except (OSError, SafetensorError) as error:
            raise FinetuneError(
                f"{options.out} cannot be written ({error}); {self.checkpoint.path} has all {self.done} updates: "
                "free some space, and the same command writes the result"
            ) from error

    def _leave_device(self) -> None:
        """Move what is written to the host, where it is written as after a training on the CPU."""
        for module in [self.model] if self.options.lora_rank is None else list(self.model.modules()):
            if any(p.requires_grad for p in module.parameters(recurse=self.options.lora_rank is None)):
                _move(module, CPU)

    def _card(self, loss_after: float | None) -> str:
        trained = TrainedOn(len(self.train_on), len(self.held_out), self.done, self.loss_before, loss_after)
        adapted = {
            name.split(".lora_")[0].rpartition(".")[2] for name, _ in self.model.named_parameters() if ".lora_" in name
        }
        return model_card(self.options, self.task, sorted(adapted), trained)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise FinetuneError with the remedy if the block cannot write a checkpoint."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where Python raises OSError
            kept = (
                f"continues from the checkpoint after {self._kept}, which is intact"
                if self._kept
                else "starts from the beginning"
            )
            raise FinetuneError(
                f"{self.checkpoint.path.parent} cannot be written to after {self.done} updates ({error}): free some "
                f"space, and the same command {kept}"
            ) from error

    def _keep(self) -> None:
        self.check_weights()
        begin, progress = time.monotonic(), FinetuneProgress(self.done, self.loss_before, self.curve)
        with self._writing():
            self.checkpoint.write(progress, self.trained, self.parts, self._generators)
        self._kept = self.done
        self._steering.wrote(self.done, self.checkpoint.path.stat().st_size, time.monotonic() - begin)

    def _gradients(self, done: int) -> tuple[float, int]:
        """Compute the gradients of update `done`, counted from 0; return the mean loss of its tokens and their number."""
        begin = (self._first + done) * self.options.accumulate
        batches = [self._batch(begin + i) for i in range(self.options.accumulate)]
        learned = sum(sequence.learned for batch in batches for sequence in batch)
        if self._by_layers is not None:
            try:
                total = self._by_layers([self._as_tensors(batch)[:2] for batch in batches], learned)
                self.optimizer.norms = self._by_layers.norms
                return total / learned, learned
            except NotByLayersError as error:
                if self.options.accumulate_by is MicroBatchOrder.LAYERS:
                    raise cannot_run_by_layers(str(error)) from error
                self._note(f"the batches of an update run one at a time: {error}")
                self._by_layers, self._may_run_by_layers = None, False
                self.optimizer.zero_grad()
                set_random_states(self.options.device, self._generators)
        total = 0.0
        for batch in batches:
            total += self._learned_loss(*self._as_tensors(batch), gradient_of=learned).item()
        return total / learned, learned

    def _update(self) -> None:
        if self._starts:
            self._hold_near_start(self.options.proximal_mu or 0.0)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1
        self._generators = random_states(self.options.device)

    @torch.no_grad()
    def _hold_near_start(self, mu: float) -> None:
        """Add the gradient of mu / 2 times the squared distance from where the weights began."""
        for parameter, start in zip(self.trained, self._starts, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=mu)
        self.optimizer.norms = {}

    def _batch(self, index: int) -> list[TokenSequence]:
        """Return batch `index` of the whole training; each pass over the sequences has its own order."""
        places = range(index * self.options.batch, (index + 1) * self.options.batch)
        count = len(self.train_on)
        return [self._asked(self.train_on[self._order(place // count)[place % count]], str(place)) for place in places]

    def _asked(self, sequence: TokenSequence, place: str) -> TokenSequence:
        """Return a sequence as it is learned at one position of the whole training: with different tokens masked at each, or unchanged."""
        if self.task.kind is not TaskKind.MASKED_LM:
            return sequence
        return masked(sequence, self._vocabulary, f"{self.options.seed} {place}")

    def _order(self, epoch: int) -> "array[int]":
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.options.seed + epoch)
            self._orders = {epoch: array("q", torch.randperm(len(self.train_on), generator=generator).tolist())}
        return self._orders[epoch]

    def held_out_loss(self) -> float | None:
        """Return the mean loss over the held-out tokens; None without held-out data. An interrupted evaluation resumes."""
        learned = sum(sequence.learned for sequence in self._held_out())
        if not learned:
            return None
        losses = self.checkpoint.losses.read(self.done)
        self.model.eval()
        try:
            with torch.no_grad():
                self._add_losses(losses)
        finally:
            self._keep_losses(losses)
        self.model.train()
        return sum(losses) / learned

    def _add_losses(self, losses: list[float]) -> None:
        """Compute the losses of the held-out texts that have none yet."""
        kept_s = time.monotonic()
        for sequence in itertools.islice(self._held_out(), len(losses), None):
            losses.append(self._learned_loss(*self._as_tensors([sequence])).item())
            if time.monotonic() - kept_s >= CHECKPOINT_S:
                self._keep_losses(losses)
                kept_s = time.monotonic()

    def _keep_losses(self, losses: list[float]) -> None:
        """Store the losses that an evaluation has computed so far; a failure to write is only reported."""
        try:
            self.checkpoint.losses.write(self.done, losses)
        except OSError as error:
            self._note(
                f"the losses of held-out text could not be stored, so an interrupted evaluation starts again: {error}"
            )

    def _held_out(self) -> Iterator[TokenSequence]:
        """Yield the held-out sequences as they are learned, the same each time."""
        return (self._asked(sequence, f"held out {place}") for place, sequence in enumerate(self.held_out))

    def _as_tensors(self, batch: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor, Beside]:
        """Return a batch's tokens, labels and other inputs on the device."""
        if self.task.encoder_alone:
            tokens, labels, beside = _as_encoder_tensors(batch, self.options.sequence_tokens)
        else:
            tokens, labels, beside = _as_tensors(batch)
        if self.options.device == CPU:
            return tokens, labels, beside
        there = tokens.to(self.options.device)
        if isinstance(beside, tuple):  # an encoder's own tokens are the same tensor
            source = there if beside[0] is tokens else beside[0].to(self.options.device)
            beside = source, beside[1].to(self.options.device)
        elif beside is not None:
            beside = beside.to(self.options.device)
        return there, labels.to(self.options.device), beside


def _rows(batch: Sequence[TokenSequence]) -> int:
    """Return the number of rows of a batch's logits; each token is predicted from the place before it."""
    longest = max(len(sequence.tokens) for sequence in batch)
    first = min((place for s in batch for place, label in enumerate(s.labels[1:]) if label != IGNORED), default=0)
    return len(batch) * kept_places(longest, first)


def _as_tensors(batch: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor, Beside]:
    """Return a batch's tokens and labels, [batch, length], padded to the longest, and the other inputs."""
    batch = [*batch, *(sequence.rejected for sequence in batch if sequence.rejected is not None)]
    longest = max(len(sequence.tokens) for sequence in batch)
    tokens = torch.tensor([[*s.tokens, *[0] * (longest - len(s.tokens))] for s in batch])
    labels = torch.tensor([[*s.labels, *[IGNORED] * (longest - len(s.labels))] for s in batch])
    if any(sequence.places is not None for sequence in batch):
        places = [range(len(s.tokens)) if s.places is None else s.places for s in batch]
        return tokens, labels, torch.tensor([[*of, *range(longest - len(of))] for of in places])
    return tokens, labels, _encoder_input([s.source for s in batch if s.source is not None])


def _as_encoder_tensors(batch: Sequence[TokenSequence], most: int) -> tuple[torch.Tensor, torch.Tensor, Beside]:
    """Return tokens and labels as `_as_tensors`, or a label for each text, [batch, 1], and the mask of tokens.

    They are padded to whole buckets, but not to more than `most` tokens.
    """
    longest = max(len(sequence.tokens) for sequence in batch)
    longest = max(longest, min(most, -(-longest // BUCKET_TOKENS) * BUCKET_TOKENS))
    missing = [longest - len(sequence.tokens) for sequence in batch]
    tokens = torch.tensor([[*s.tokens, *[0] * fill] for s, fill in zip(batch, missing, strict=True)])
    there = torch.tensor([[1] * (longest - fill) + [0] * fill for fill in missing])
    chosen = [s.label for s in batch if s.label is not None]
    if chosen:
        return tokens, torch.tensor(chosen)[:, None], (tokens, there)
    labels = torch.tensor([[*s.labels, *[IGNORED] * fill] for s, fill in zip(batch, missing, strict=True)])
    return tokens, labels, (tokens, there)


def _encoder_input(sources: "list[array[int]]") -> EncoderInput | None:
    """Return sources padded to whole buckets, as completions are, because each length is a separate step to a planner."""
    if not sources:
        return None
    longest = -(-max(map(len, sources)) // BUCKET_TOKENS) * BUCKET_TOKENS
    tokens = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sources])
    there = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sources])
    return tokens, there


def _sample(model: Any, tokenizer: TokenizerProtocol, prompt: Sequence[int]) -> str:
    """Return what the model writes after a prompt when it always chooses the likeliest token."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    model.eval()
    with torch.no_grad(), without_prefetch():  # each token's step is another: a trace of them all only grows
        written = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=_SAMPLE_TOKENS, do_sample=False
        )
    model.train()
    with leaving_headroom(tokenizer.process_bytes):
        return tokenizer.decode(written[0].tolist())


def exit_code(outcome: FinetuneOutcome) -> int:
    """Return the exit code of the process."""
    return ExitCode.LEFT if outcome.left else ExitCode.DONE
