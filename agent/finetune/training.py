"""The recipe's loop: plain PyTorch that knows of no budget; `exec` runs it in one."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from agent.finetune.checkpoint import Checkpoint, FinetuneProgress
from agent.finetune.head_loss import LearnedLoss
from agent.finetune.model import load_model, load_tokenizer
from agent.finetune.options import FinetuneError, FinetuneOptions
from agent.finetune.records import read_records
from agent.finetune.sequences import IGNORED, Split, TokenSequence, split_sequences
from planner.ir.errors import ExitCode

_CHECKPOINT_S = 300.0
"""Between two checkpoints: what a cut costs at most, but for the update that is under way."""
_WARM_UP_SHARE = 0.03
"""Of the updates, until the learning rate is reached; from there it falls to 0 in a line."""
_CLIP_NORM = 1.0
_SAMPLE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Update:
    """One update: how many of all are done, the mean loss of its tokens, tokens and seconds."""

    done: int
    of: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FinetuneOutcome:
    """What came of it. Losses are means over the held-out tokens, None where nothing is held out.

    `left`: told to stop, the same command goes on.
    """

    updates: int
    left: bool
    loss_before: float | None = None
    loss_after: float | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    out: str = ""


Say = Callable[[Update], None]


def finetune(options: FinetuneOptions, say: Say, note: Callable[[str], None]) -> FinetuneOutcome:
    """Fine-tune, from a checkpoint if there is one; write the adapter or model to `options.out`.

    SIGINT and SIGTERM end it after the update under way, with a checkpoint. `note` is told what else a person should know.
    Raises FinetuneError.
    """
    data = read_records(Path(options.data))
    if data.broken:
        note(f"{options.data}: {data.broken} broken lines are left away, the first: {data.first_broken}")
    tokenizer = load_tokenizer(Path(options.model))
    split = split_sequences(data.records, tokenizer, options)
    if split.skipped:
        note(f"{split.skipped} records are left away: the prompt alone has {options.sequence_tokens} tokens or more")
    model = load_model(options, note)
    run = _Run(options, split, model)
    progress = run.checkpoint.read(run.trained, run.parts)
    if progress is None:
        progress = FinetuneProgress(0, run.held_out_loss())
    else:
        note(f"goes on after {progress.updates} of {run.updates} updates")
    before = None if options.sample is None or progress.updates else _sample(model, tokenizer, options.sample)
    done = run.train(progress, say)
    if done < run.updates:
        return FinetuneOutcome(done, left=True, out=str(run.checkpoint.path))
    after = None if options.sample is None else _sample(model, tokenizer, options.sample)
    loss_after = run.held_out_loss()
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    run.checkpoint.remove()
    return FinetuneOutcome(done, False, progress.loss_before, loss_after, before, after, options.out)


class _Run:
    """Model, optimizer, schedule and data of one fine-tuning."""

    def __init__(self, options: FinetuneOptions, split: Split, model: Any) -> None:
        self.options, self.model = options, model
        self._learned_loss = LearnedLoss(model)
        self.train_on, self.held_out = split.train, split.held_out
        self.per_update = options.batch * options.accumulate
        self.updates = options.updates or max(1, options.epochs * len(split.train) // self.per_update)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=options.learning_rate, weight_decay=0.0)
        warm = max(1, round(self.updates * _WARM_UP_SHARE))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda u: min((u + 1) / warm, (self.updates - u) / max(1, self.updates - warm + 1))
        )
        self.parts = {"optimizer": self.optimizer, "schedule": self.schedule}
        self.checkpoint = Checkpoint(options, split.train)

    def train(self, progress: FinetuneProgress, say: Say) -> int:
        """Train until all updates are done or a signal comes; return how many are, a checkpoint written."""
        done, written = progress.updates, time.monotonic()
        with _told_to_stop() as stop:
            while done < self.updates and not stop:
                begin = time.monotonic()
                loss, tokens = self._update(done)
                done += 1
                say(Update(done, self.updates, loss, tokens, time.monotonic() - begin))
                if not math.isfinite(loss):
                    raise FinetuneError(
                        f"the loss of update {done} is {loss}; the last checkpoint is kept in {self.checkpoint.path}: lower "
                        "--lr and give another --out"
                    )
                if time.monotonic() - written >= _CHECKPOINT_S or stop:
                    self.checkpoint.write(FinetuneProgress(done, progress.loss_before), self.trained, self.parts)
                    written = time.monotonic()
        return done

    def _update(self, done: int) -> tuple[float, int]:
        """Make update `done`, counted from 0; return the mean loss of its tokens and how many those are."""
        batches = [self._batch(done * self.options.accumulate + i) for i in range(self.options.accumulate)]
        learned = sum(sequence.learned for batch in batches for sequence in batch)
        total = 0.0
        for batch in batches:
            total += self._learned_loss(*_as_tensors(batch), gradient_of=learned).item()
        torch.nn.utils.clip_grad_norm_(self.trained, _CLIP_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total / learned, learned

    def _batch(self, index: int) -> list[TokenSequence]:
        """Return batch `index` of the whole training; each pass over the sequences has an order of its own."""
        places = range(index * self.options.batch, (index + 1) * self.options.batch)
        count = len(self.train_on)
        return [self.train_on[self._order(place // count)[place % count]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.options.seed + epoch)
        order: list[int] = torch.randperm(len(self.train_on), generator=generator).tolist()
        return order

    def held_out_loss(self) -> float | None:
        """Return the mean loss over the held-out tokens; None where none are held out."""
        learned = sum(sequence.learned for sequence in self.held_out)
        if not learned:
            return None
        self.model.eval()
        with torch.no_grad():
            total = sum(self._learned_loss(*_as_tensors([sequence])).item() for sequence in self.held_out)
        self.model.train()
        return total / learned


def _as_tensors(batch: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's tokens and labels, [batch, length], filled up to the longest."""
    longest = max(len(sequence.tokens) for sequence in batch)
    tokens = torch.tensor([[*s.tokens, *[0] * (longest - len(s.tokens))] for s in batch])
    labels = torch.tensor([[*s.labels, *[IGNORED] * (longest - len(s.labels))] for s in batch])
    return tokens, labels


def _sample(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return what the model writes after a prompt, the likeliest token each time."""
    tokens = tokenizer(prompt, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        written = model.generate(**tokens, max_new_tokens=_SAMPLE_TOKENS, do_sample=False)
    model.train()
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return text


@contextlib.contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """Give a list that has SIGINT or SIGTERM once it came; a second one ends the process as always."""
    told: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, stop)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(outcome: FinetuneOutcome) -> int:
    """Return what the process ends with."""
    return ExitCode.LEFT if outcome.left else ExitCode.DONE
