"""Each trap of following, a program that falls into it, and the cure without which it gives other bits or ends badly.

A case runs plainly and under a budget in a child, which may crash: with its cure it must be equal, and without it,
which the second test takes out of the product's code, it must not.
"""

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from port_agent import budget
from port_agent.intercept.decisions import prefetcher, rematerialization
from port_agent.intercept.dispatch import mode, traits
from port_agent.intercept.patches import pointer_guards, program
from port_agent.intercept.residency import operands, residency, storages
from port_agent.paging import page_space
from port_planner.operators.row import Operator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked")

EQUAL, DIFFERENT = 0, 3
FOR_EVER = 1 << 60
TIMEOUT_S = 120.0
LARGE = (1024, 1024)
"""4 MiB: worth making again rather than paging."""

Cure = contextlib.AbstractContextManager[Any]


DROPS = "1M"
"""The limit of traps in which results are dropped to be made again."""


@dataclass(frozen=True)
class Trap:
    """`make` gives what exists before the budget, `use` what is compared; `without` takes the cure away."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    without: Callable[[], Cure]
    limit: str = "4K"


def filler(*met: Tensor) -> None:
    """Let the follower meet tensors, and push them and everything else out."""
    for one in met:
        one.sum()
    torch.ones(300, 300) @ torch.ones(300, 300)


@contextlib.contextmanager
def dropping() -> Iterator[None]:
    """Have all results made again that can be, whatever paging took, a plan says, or was written ahead of time."""
    with (
        mock.patch.object(prefetcher.Prefetcher, "remade", lambda self, entry, made, seconds: True),
        mock.patch.object(residency.Residency, "write_early", lambda self, storage: None),
    ):
        yield


# -- the programs


def encoder(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.randn(4, 33, 64))


def address_of_what_is_away(weight: Tensor) -> bytes:
    filler(weight)
    found = ctypes.create_string_buffer(weight.numel() * weight.element_size())
    ctypes.memmove(
        found, weight.data_ptr(), len(found)
    )  # `string_at` makes of a null pointer what its memory happens to hold
    return found.raw


def written_after_a_drop(weight: Tensor) -> list[Tensor]:
    scale, seen = nn.Parameter(torch.ones(())), []
    for _ in range(4):
        doubled = weight * 2
        filler()
        weight.add_(1)
        seen.append(doubled.sum())
        scale.sum().backward()
    return seen


def source_gone_after_a_drop(weights: list[Tensor]) -> list[Tensor]:
    scale, seen = nn.Parameter(torch.ones(())), []
    while weights:
        weight = weights.pop()
        doubled = weight * 2
        del weight
        filler()
        seen.append(doubled.sum())
        scale.sum().backward()
    return seen


def running_statistics(norm: nn.Module) -> list[Tensor]:
    for _ in range(3):
        norm(torch.randn(8, 256))
        filler()
    return [norm.get_buffer(name) for name in ("running_mean", "running_var")]


def child_reads_while_parent_writes(weight: Tensor) -> bytes:
    filler(weight)
    reader, writer = os.pipe()
    fields, tell = os.pipe()
    if os.fork() == 0:
        os.read(fields, 1)
        os.write(writer, repr(weight.sum().item()).encode())
        os._exit(0)
    os.close(writer)
    for _ in range(3):
        weight.add_(1)
        filler()
    os.write(tell, b".")
    return os.read(reader, 100)


def thread(weight: Tensor) -> list[Tensor]:
    filler(weight)
    seen: list[Tensor] = []
    other = threading.Thread(target=lambda: seen.append(weight @ weight))
    other.start()
    other.join()
    return seen


def sparse_product(matrix: Tensor) -> Tensor:
    own = matrix.to_sparse().coalesce()
    filler(own.values(), own.indices())
    return torch.sparse.mm(own, torch.ones(64, 64))


def packed(gru: nn.Module) -> Tensor:
    lengths = torch.arange(100, 0, -1)
    filler()
    rows = nn.utils.rnn.pack_padded_sequence(torch.ones(100, 100, 8), lengths, batch_first=True)
    filler()
    return gru(rows)[0].data


def step_of_many(model: nn.Module) -> bool:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    with tempfile.TemporaryDirectory() as folder, budget(tensors="1M", page_dir=folder).resizing() as b:
        for _ in range(2):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
        return b.report.peak_tensor_bytes < 3 << 20


def weights_of_a_file() -> Tensor:
    folder = tempfile.mkdtemp()
    save_file({"w": torch.arange(64.0 * 1024).reshape(64, 1024)}, f"{folder}/w.safetensors")
    return load_file(f"{folder}/w.safetensors")["w"]


def written_mapping(weight: Tensor) -> Tensor:
    weight.add_(1)
    filler()
    return weight * 1


def reused_address(_: object) -> list[float]:
    seen = []
    for i in range(200):
        one = torch.full((64, 1 + i % 7), float(i))
        filler() if i % 20 == 0 else None
        seen.append((one + 1).sum().item())
        del one
    return seen


def targets_of_a_view(data: Tensor) -> Tensor:
    targets = data[1000:1016]
    filler()
    return nn.functional.cross_entropy(torch.ones(16, 8).cumsum(1), targets)


def no_ends(_: object) -> bool:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(mode, "LONGEST_SEGMENT", 50 if vars(mode)["LONGEST_SEGMENT"] < FOR_EVER else FOR_EVER),
        budget(tensors="4K", page_dir=folder).resizing() as b,
    ):
        for _ in range(500):
            torch.ones(8)
        return b.report.segments >= 9


def written_after_use(weight: Tensor, memory: Any) -> list[Tensor]:
    scale, seen = nn.Parameter(torch.ones(())), []
    for i in range(8):
        doubled = weight * 2
        filler()
        memory[:] = [i] * len(memory)
        seen.append(doubled.sum())
        scale.sum().backward()
    return seen


def numpy_written_after_use(weight: Tensor) -> list[Tensor]:
    return written_after_use(weight, weight.numpy())


def shared_written_after_use(weight: Tensor) -> list[Tensor]:
    return written_after_use(weight, shared(weight))


def shared(weight: Tensor) -> "ctypes.Array[ctypes.c_float]":
    """Return the memory of a tensor as processes share it."""
    weight.share_memory_()
    return (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())


def shown(weight: Tensor, memory: Any) -> list[Tensor]:
    for _ in range(3):
        nn.Parameter(torch.ones(())).sum().backward()
        filler()
        memory[0] += 7
    return [weight * 1, torch.tensor(memory[:9])]


def shown_to_numpy(weight: Tensor) -> list[Tensor]:
    filler(weight)
    return shown(weight, weight.numpy().reshape(-1))


def shown_to_processes(weight: Tensor) -> list[Tensor]:
    filler(weight)
    return shown(weight, shared(weight))


def saved_and_loaded(weights: list[Tensor]) -> list[Tensor]:
    filler(*weights)
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def written_after_two_drops(weight: Tensor) -> list[Tensor]:
    scale, seen = nn.Parameter(torch.ones(())), []
    for _ in range(4):
        doubled, tripled = weight * 2, weight * 3
        filler()
        weight.add_(1)
        seen += [doubled.sum(), tripled.sum()]
        scale.sum().backward()
    return seen


def child_makes_its_own(_: object) -> list[Tensor]:
    filler()
    fields, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(fields, 1)
        filler(*[torch.full((64, 64), float(k)) for k in range(32)])
        os._exit(0)
    mine = [torch.full((64, 64), 100.0 + k) for k in range(32)]
    filler(*mine)
    os.write(tell, b".")
    os.waitpid(child, 0)
    return [one + 1 for one in mine]


# -- without their cures


@contextlib.contextmanager
def function_mode() -> Iterator[None]:
    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Sees():
        yield


@contextlib.contextmanager
def schema_alone() -> Iterator[None]:
    with mock.patch.object(operands, "operator_of", lambda name: Operator()):
        operands.written_arguments.cache_clear()
        traits.forget_traits()
        yield


def forgets_dependents(self: residency.Residency, changed: Any) -> None:
    for storage in changed:
        storage.dependents = None
    _change(self, changed)


def stays_clean(self: residency.Residency, changed: Any) -> None:
    _change(self, changed)
    for storage in changed:
        storage.clean = storage.mapped


def drops_again(self: residency.Residency, changed: Any) -> None:
    """Count the version after the dependents were made, while making room for one may drop another."""
    for storage in changed:
        self.ensure_resident(
            [d for d in storage.dependents or () if not d.resident and not d.clean and d.ref() is not None]
        )
        storage.dependents = None
    _change(self, changed)


def child_like_its_parent(self: residency.Residency) -> None:
    self.backing.become_child()


_change = residency.Residency.change
_of = storages.StorageTable.of
_parts = operands.strided_runs


def by_view(self: storages.StorageTable, tensor: Tensor) -> Any:
    return None if tensor.dtype is torch.int64 and tensor.numel() * 8 < 32 << 10 else _of(self, tensor)


def patched(owner: Any, name: str, value: Any) -> Callable[[], Cure]:
    return lambda: mock.patch.object(owner, name, value)


def brought_alone(self: residency.Residency, storage: storages.Storage) -> None:
    self.ensure_resident([storage])


def large() -> Tensor:
    return torch.ones(LARGE).cumsum(0) / 7


def encoder_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()


TRAPS = {
    "1 fast paths under a function mode": Trap(encoder_layers, encoder, function_mode),
    "2 a pointer to what is away": Trap(
        lambda: torch.randn(64, 64), address_of_what_is_away, patched(pointer_guards.PointerGuards, "install", lambda self: None)
    ),
    "2 a pointer that is written later": Trap(
        large, numpy_written_after_use, patched(residency.Residency, "lend", lambda self, storage: None), DROPS
    ),
    "2 shared memory that is written later": Trap(
        large, shared_written_after_use, patched(rematerialization, "exposed", lambda memory: False), DROPS
    ),
    "2 memory of numpy": Trap(
        lambda: torch.ones(64, 64) / 3, shown_to_numpy, patched(residency.Residency, "lend", brought_alone)
    ),
    "2 shared memory": Trap(
        lambda: torch.ones(64, 64) / 3, shown_to_processes, patched(residency, "exposed", lambda memory: False)
    ),
    "2 saving, which reads last": Trap(
        lambda: [torch.randn(64, 64) for _ in range(4)], saved_and_loaded,
        patched(pointer_guards.PointerGuards, "install", lambda self: None),
    ),
    "3 a write, and what making room drops": Trap(
        large, written_after_two_drops, patched(residency.Residency, "change", drops_again), DROPS
    ),
    "3 a write, and what was dropped": Trap(
        large, written_after_a_drop, patched(residency.Residency, "change", forgets_dependents), DROPS
    ),
    "4 writes that no schema tells": Trap(lambda: nn.BatchNorm1d(256), running_statistics, schema_alone),
    "5 what a dropped one is made from": Trap(
        lambda: [large() * i for i in range(5)], source_gone_after_a_drop,
        patched(rematerialization.StorageRemat, "take_hold", lambda self, storage: ()), DROPS,
    ),
    "6 a fork": Trap(
        lambda: torch.ones(64, 64), child_reads_while_parent_writes,
        patched(page_space.ForkedReaders, "may_read", lambda self, era: False),
    ),
    "6 what a forked child makes": Trap(
        lambda: None, child_makes_its_own, patched(residency.Residency, "become_child", child_like_its_parent)
    ),
    "7 a thread": Trap(
        lambda: torch.randn(64, 64), thread,
        patched(program.ProgramHooks, "_start_followed", lambda self, original: original),
    ),
    "8 sparse tensors": Trap(
        lambda: torch.eye(64) * 3, sparse_product,
        patched(operands, "strided_parts", lambda t: _parts(t) if t.layout is torch.strided else ()),
    ),
    "8 small integers": Trap(lambda: nn.GRU(8, 8), packed, patched(storages, "SMALL_INTEGERS_BYTES", 0)),
    "9 lists of all parameters": Trap(
        lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))), step_of_many,
        patched(mode, "runs_by_element", lambda func, args, limit: False), "",
    ),
    "10 weights of a file, written": Trap(
        weights_of_a_file, written_mapping, patched(residency.Residency, "change", stays_clean)
    ),
    "12 an address that is used again": Trap(
        lambda: None, reused_address, patched(weakref, "ref", lambda memory, died=None, ref=weakref.ref: ref(memory))
    ),
    "13 a small view of what is away": Trap(
        lambda: torch.arange(100_000) % 8, targets_of_a_view, patched(storages.StorageTable, "of", by_view)
    ),
    "14 a loop without ends": Trap(lambda: None, no_ends, patched(mode, "LONGEST_SEGMENT", FOR_EVER), ""),
}  # fmt: skip
"""TRAPS.md says which trap is tested where."""


def _child(trap: Trap, cured: bool) -> None:
    faulthandler.disable()  # some crash without their cure
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)

    def run(*around: Cure) -> Any:
        torch.manual_seed(0)
        made = trap.make()
        with contextlib.ExitStack() as stack:
            for one in around:
                stack.enter_context(one)
            result = trap.use(made)
        return result

    with tempfile.TemporaryDirectory() as folder:
        removed = contextlib.nullcontext() if cured else trap.without()
        if trap.limit:
            plain = run()
            drops = dropping() if trap.limit == DROPS else contextlib.nullcontext()
            followed = run(removed, drops, budget(tensors=trap.limit, page_dir=folder).resizing())
        else:
            plain, followed = True, run(removed)
    same = torch.utils._pytree.tree_map(
        lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b, plain, followed
    )
    os._exit(EQUAL if all(torch.utils._pytree.tree_leaves(same)) else DIFFERENT)


def ending(trap: Trap, *, cured: bool) -> int:
    """Return the exit code of a child that falls into a trap, or does not."""
    child = multiprocessing.get_context("fork").Process(target=_child, args=(trap, cured))
    child.start()
    child.join(TIMEOUT_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.process
@pytest.mark.parametrize("name", TRAPS)
def test_with_its_cure(name: str) -> None:
    assert ending(TRAPS[name], cured=True) == EQUAL


@pytest.mark.process
@pytest.mark.parametrize("name", TRAPS)
def test_not_without_its_cure(name: str) -> None:
    assert ending(TRAPS[name], cured=False) != EQUAL


def test_an_operator_that_raises_lets_go_of_its_operands(tmp_path: Path) -> None:
    with budget(tensors="512K", page_dir=tmp_path).resizing() as b:
        kept = [torch.ones(256, 256) for _ in range(8)]
        for one in kept:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                one @ torch.ones(7, 7)
        assert [float(one.sum()) for one in kept] == [65536.0] * 8
        assert b.report.peak_tensor_bytes < 4 * 256 * 1024


def test_the_table_names_every_case_and_tests_that_exist() -> None:
    here = Path(__file__).parent
    table = (here / "TRAPS.md").read_text()
    assert re.findall(r"^\| (\d+) ", table, re.MULTILINE) == [str(k) for k in range(1, 16)]
    assert set(re.findall(r'"(\d+ [^"]+)"', table)) == set(TRAPS)
    for module, name in re.findall(r"`([\w/]+\.py)::(\w+)`", table):
        assert f"def {name}(" in (here / module).read_text(), name
