"""Run a program plainly twice, then under budgets, and compare every bit of its results.

A program is a function without arguments that seeds itself and returns what it made: tensors, numbers, strings, and
containers and objects of these. It may call `training_begins()` once; some runs enter the budget only there, as a
program does that makes its model first.
"""

import contextlib
import gc
import random
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from port_agent import budget

Program = Callable[[], Any]
Digest = dict[str, str]

SEED = 20_26
AMPLE = 1 << 40  # bytes: nothing has to leave
SETTINGS = ("ample", "half", "4K")  # ample first: it tells what half is
ALL_SETTINGS = (*SETTINGS, "4K around training")
AROUND_ALL = frozenset({"ample", "4K"})  # in the others the model is made before the budget
EVERYTHING_LEAVES = 4096  # bytes: less than any tensor that is paged at all
SMALL_HALF = (
    16 << 10
)  # bytes: half of what a program needs whose tensors are too small to be counted when there is room

_at_training: ContextVar[Callable[[], None] | None] = ContextVar("_at_training", default=None)

_marked_in_plain_run: ContextVar[bool] = ContextVar("_marked_in_plain_run", default=False)


class Verdict(Enum):
    """How a program fared under budgets; the value is what the table says."""

    EQUAL = "equal"
    DIFFERS = "DIFFERS"
    FAILED = "FAILED"
    KILLED = "KILLED"
    TIMED_OUT = "TIMED OUT"
    REFUSED = "refused"
    NOT_ELIGIBLE = "not eligible"


WRONG = frozenset({Verdict.DIFFERS, Verdict.FAILED, Verdict.KILLED, Verdict.TIMED_OUT})


@dataclass(frozen=True, slots=True)
class Setting:
    """A budget for tensors in bytes, and whether it begins before the model is made or at `training_begins()`."""

    name: str
    tensors: int
    around_all: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one program; `detail` is the first difference, the exception, or why it is not eligible."""

    name: str
    verdict: Verdict
    detail: str = ""
    setting: str = ""
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    settings: tuple[str, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `as_json` wrote."""
        verdict = Verdict(value["verdict"])
        return cls(**{**value, "verdict": verdict, "settings": tuple(value.get("settings", ()))})


def training_begins() -> None:
    """Mark the moment at which a program has made its model: the budget of some runs begins here."""
    _marked_in_plain_run.set(True)
    enter = _at_training.get()
    if enter is not None:
        _at_training.set(None)
        enter()


def judge(
    name: str, program: Program, settings: tuple[str, ...] = SETTINGS, at: Callable[[str], object] = repr
) -> Outcome:
    """Run `program` plainly twice, then ample, at half of what it needed, and with everything evicted.

    A program that fails plainly or differs from itself is not eligible. Before each run, `at`
    receives the current stage.
    """
    at("plain")
    try:
        expected = digest_of(program)
    except Exception as error:
        return Outcome(name, Verdict.NOT_ELIGIBLE, f"plain PyTorch raises {said(error)}")
    difference = first_difference(expected, digest_of(program))
    if difference:
        return Outcome(name, Verdict.NOT_ELIGIBLE, f"differs from itself: {difference}")
    return _under_budgets(name, program, expected, settings, at)


def _under_budgets(
    name: str, program: Program, expected: Digest, settings: tuple[str, ...], at: Callable[[str], object]
) -> Outcome:
    """Compare each run under a budget with the results of plain PyTorch; stop at the first that is wrong."""
    need, read, written = 0, 0, 0
    done: list[str] = []
    for choice in settings:
        at(choice)
        tensors = {"ample": AMPLE, "half": max(SMALL_HALF, need // 2)}.get(choice, EVERYTHING_LEAVES)
        setting = Setting(choice, tensors, around_all=choice in AROUND_ALL)
        try:
            found, report = digest_under(program, setting)
        except Exception:
            return Outcome(name, Verdict.FAILED, _last_lines(traceback.format_exc()), choice, need)
        difference = first_difference(expected, found)
        if difference:
            return Outcome(name, Verdict.DIFFERS, difference, choice, need)
        need = max(need, int(report.peak_tensor_bytes))
        read, written = max(read, int(report.read_bytes)), max(written, int(report.written_bytes))
        done.append(choice)
    return Outcome(name, Verdict.EQUAL, "", "", need, read, written, settings=tuple(done))


def digest_of(program: Program) -> Digest:
    """Run a program from fixed seeds and return a digest of all that it returned and of the generators' states."""
    seed()
    try:
        result = program()
        return digest(result)
    finally:
        gc.collect()


def digest_under(program: Program, setting: Setting) -> tuple[Digest, Any]:
    """Run a program under a budget; return its digest, taken after the budget is left, and the budget's report."""
    seed()
    with tempfile.TemporaryDirectory(prefix="zoo-pages-") as pages, contextlib.ExitStack() as stack:
        limit = budget(tensors=setting.tensors, page_dir=pages)
        try:
            with contextlib.ExitStack() as inside:
                if setting.around_all or not _marked_in_plain_run.get():
                    inside.enter_context(limit)
                else:
                    token = _at_training.set(lambda: _enter(inside, limit))
                    stack.callback(_at_training.reset, token)
                result = program()
            found = digest(result)
            del result
        finally:
            gc.collect()
        return found, limit.report


def _enter(stack: contextlib.ExitStack, limit: contextlib.AbstractContextManager[Any]) -> None:
    stack.enter_context(limit)


def seed() -> None:
    """Set the three global generators to the state in which every run of a program begins."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def digest(result: Any) -> Digest:
    """Return a digest per leaf of a result, with the states of the three global generators."""
    leaves: Digest = {}
    for path, leaf in _leaves("", result, set()):
        leaves[path] = leaf
    leaves[".torch_rng"] = _hash(torch.get_rng_state())
    leaves[".python_rng"] = xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode())
    leaves[".numpy_rng"] = xxhash.xxh3_64_hexdigest(repr(np.random.get_state()).encode())
    return leaves


def first_difference(expected: Digest, found: Digest) -> str:
    """Return which leaf differs first and how many do, or an empty string."""
    wrong = [k for k in expected if found.get(k) != expected[k]] + [k for k in found if k not in expected]
    if not wrong:
        return ""
    first = wrong[0]
    return f"{len(wrong)} of {len(expected)} leaves, first {first}: {expected.get(first)} became {found.get(first)}"


def state(*parts: Any) -> dict[str, Any]:
    """Return parameters, buffers, gradients and optimizer states of modules and optimizers, to be compared."""
    collected: dict[str, Any] = {}
    for i, part in enumerate(parts):
        if isinstance(part, torch.nn.Module):
            collected[f"{i}"] = {
                "parameters": dict(part.named_parameters()),
                "buffers": dict(part.named_buffers()),
                "gradients": {n: p.grad for n, p in part.named_parameters() if p.grad is not None},
            }
        elif isinstance(part, torch.optim.Optimizer):
            collected[f"{i}"] = part.state_dict()
        else:
            collected[f"{i}"] = part
    return collected


def _leaves(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Walk through containers and objects, yielding a digest for each leaf."""
    if isinstance(value, torch.Tensor):
        yield path, _hash(value)
    elif isinstance(value, np.ndarray):
        yield path, f"{value.dtype}{value.shape}{xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())}"
    elif isinstance(value, float):
        yield path, struct.pack("d", value).hex()
    elif isinstance(value, (str, bytes, int, bool, complex, type(None), torch.dtype, torch.device)):
        yield path, value.hex() if isinstance(value, bytes) else repr(value)
    elif id(value) in seen:
        yield path, "again"
    elif isinstance(value, Mapping):
        seen.add(id(value))
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}", item, seen)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}/{i}", item, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _leaves(path, vars(value), seen)
    else:
        yield path, type(value).__name__


def _hash(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the bits of a tensor of any layout."""
    t = tensor.detach().cpu()
    if t.layout is torch.sparse_coo:
        t = t.coalesce()
        return f"sparse {_hash(t.indices())} {_hash(t.values())}"
    if t.layout is torch.sparse_csr:
        return f"csr {_hash(t.crow_indices())} {_hash(t.col_indices())} {_hash(t.values())}"
    if t.is_quantized:
        t = t.int_repr()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    raw = t.resolve_neg().contiguous().reshape(-1).view(torch.uint8).clone()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]{xxhash.xxh3_64_hexdigest(bytes(raw.numpy()))}"


def said(error: BaseException) -> str:
    """Return an exception as one line."""
    first = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {first}"


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return " | ".join([lines[-1][:300], *(p.rsplit("/", 1)[-1] for p in places[-3:])])
