"""What runs in processes that have the simulated card (`tests/simulated_card.py`): functions for `tests.forked.run_forked`."""

import _thread
import contextlib
import copy
import ctypes
import io
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_exec
from port_agent import budget
from port_agent.backend import choose
from port_agent.backend.staging import DeviceSide, Staging, address
from port_agent.backend.transfer_ring import TransferRing
from port_agent.finetuning.checkpoint import checkpoint_path
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.intercept.dispatch.device_pool import DevicePool
from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.patches.function_guards import FunctionGuards
from port_agent.intercept.residency import storages
from port_agent.intercept.residency.device_memory import DeviceBudget
from port_agent.intercept.residency.device_storages import DeviceMove, DeviceStorages, HostBlocks, ProgramStreams
from port_agent.intercept.residency.pinned_pages import PINNED_CHUNK_BYTES, DirectCopy, PinnedPages
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.refusals import UnsupportedError
from port_agent.intercept.residency.residency import Residency
from tests.simulated_card import CONTEXT_BYTES, NAME, UNIFIED, CardBackend, card


def trained(device: str) -> list[str]:
    """Return the bits of losses: convolution, norms, dropout, attention, embedding, AdamW."""
    torch.manual_seed(0)
    stem = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(2)
    )
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    places, head = torch.nn.Embedding(8, 64), torch.nn.Linear(512, 10)
    model = torch.nn.ModuleList([stem, layer, places, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        x, y = torch.randn(16, 3, 8, 8).to(device), torch.randint(0, 10, (16,)).to(device)
        hidden = layer(stem(x) + places(torch.arange(8).to(device)))
        loss = torch.nn.functional.cross_entropy(head(hidden.flatten(1)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    return losses


def computes_as_the_cpu(_: list[str]) -> int:
    """Say what training gives on both, what is left of it, and which order was violated."""
    there = card()
    on_cpu, on_card = trained("cpu"), trained(NAME)
    return _say({"cpu": on_cpu, "card": on_card, "left": there.card_allocated(), "races": there.card_races()})


def memory_is_unkind(_: list[str]) -> int:
    """Say what becomes of memory that is resized, freed, beyond the cap."""
    there = card()
    x = torch.arange(1000.0, device=NAME)
    kept, memory = x.cpu(), x.untyped_storage()
    memory.resize_(0)
    emptied = there.card_allocated()
    memory.resize_(4000)
    garbage = bool((x.cpu() == kept).any())
    x.copy_(kept)
    y = torch.zeros(0, device=NAME)
    torch.add(x, x, out=y)
    there.card_cap(1 << 20)
    try:
        torch.empty(1 << 20, device=NAME)
        refused = ""
    except torch.OutOfMemoryError as error:
        refused = str(error)
    longer = torch.equal(y.cpu(), 2 * kept)
    return _say({"emptied": emptied, "garbage": garbage, "refused": refused, "longer": longer})


def order_is_needed(_: list[str]) -> int:
    """Say what copies on another stream bring, with and without each wait."""
    there = card()
    found: dict[str, Any] = {}
    for name in ("all waits", "not for the source", "not for the copy", "freed early"):
        races, right = there.card_races(), torch.full((1000,), 3.0)
        x, pinned = torch.ones(1000, device=NAME), torch.empty(1000, pin_memory=True)
        x += 2
        copies, computed = torch.Stream(device=NAME), torch.accelerator.current_stream().record_event()
        with copies:
            if name != "not for the source":
                copies.wait_event(computed)
            pinned.copy_(x, non_blocking=True)
            done = copies.record_event()
        if name == "freed early":
            x.untyped_storage().resize_(0)
        if name != "not for the copy":
            done.synchronize()
        found[name] = [torch.equal(pinned, right), there.card_races() - races]
    return _say(found)


def other_streams_wait(_: list[str]) -> int:
    """Say what an operator reads of a copy to the card that it did not wait for, and after it has."""
    there = card()
    pinned, x = torch.ones(1000, pin_memory=True), torch.empty(1000, device=NAME)
    copies, computing = torch.Stream(device=NAME), torch.accelerator.current_stream()
    copies.wait_event(computing.record_event())
    with copies:
        x.copy_(pinned, non_blocking=True)
        done = copies.record_event()
    early = torch.equal((x + 1).cpu(), torch.full((1000,), 2.0))
    computing.wait_event(done)
    return _say(
        {"early": early, "late": torch.equal((x + 1).cpu(), torch.full((1000,), 2.0)), "races": there.card_races()}
    )


def host_touches_it(_: list[str]) -> int:
    """Read the card's memory from the host; the kernel ends who may not."""
    card()
    x = torch.ones(1000, device=NAME)
    return _say({"unified": bool(os.environ.get(UNIFIED)), "read": ctypes.c_float.from_address(x.data_ptr()).value})


# -- under a budget


def _put(owner: Any, **made: Any) -> None:
    """Have something else in place of what a class has, in a process that ends."""
    for name, value in made.items():
        setattr(owner, name, value)


_TEXT = {"text": "to be or not to be that is the question"}
_ANSWER = {"prompt": "to be or", "completion": " not to be"}
FINETUNINGS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "adapters with dropout": ("llama", _TEXT, {"lora_rank": 4, "dropout": 0.1}),
    "a whole model whose head is its table": ("gpt2", _ANSWER, {"lora_rank": None}),
    "an encoder": ("distilbert", _TEXT, {"lora_rank": 4, "accumulate": 2}),
    "an encoder with a decoder": ("t5", _ANSWER, {"lora_rank": 4, "batch": 2}),
    "in blocks of rows, with magnitudes": ("qwen3", _TEXT, {"lora_rank": 4, "dora": True, "head_rows": 16}),
    "pairs of answers": (
        "llama",
        {"prompt": "to be", "chosen": " or not", "rejected": " that"},
        {"lora_rank": 4, "dpo": 0.1},
    ),
}
"""Kinds of models, what they learn, and how they are fine-tuned on the card."""


def followed_card() -> Any:
    """Return the card, known to the agent, too."""
    vars(choose)["_MADE_BY"] = {**choose._MADE_BY, NAME: CardBackend}
    return card()


def on_two_streams(device: str) -> list[str]:
    """Return bits of what two streams of the program's own make of the same weights, and of each other's results, ordered by events."""
    torch.manual_seed(0)
    one, other = torch.Stream(device=device), torch.Stream(device=device)
    weights = [torch.randn(300, 300).to(device) for _ in range(3)]
    ready = torch.accelerator.current_stream().record_event()
    for stream in (one, other):
        stream.wait_event(ready)
    kept, x, y = [], weights[0], weights[1]
    for _ in range(3):
        for weight in weights:
            with one:
                x = x @ weight / 20
            with other:
                y = y @ weight / 20
            kept += [x, y]  # until both streams are done with them
        other.wait_event(one.record_event())
        with other:
            y = y + x
        one.wait_event(other.record_event())
    torch.accelerator.synchronize()
    return [float(t.double().sum().item()).hex() for t in (*kept, y)]


def budgets_leave_the_bits(_: list[str]) -> int:
    """Say what training gives without a budget and within several, and what was held and moved."""
    there = followed_card()
    expected, plain_peak = trained(NAME), there.card_peak()
    expected_streams = on_two_streams(NAME)
    found: dict[str, Any] = {}
    for name, bounds in {
        "operands only": {"gpu_tensors": "4K"},
        "half": {"gpu_tensors": plain_peak // 2},
        "the process": {"gpu_ram": CONTEXT_BYTES + (7 << 20) // 4},
        "both": {"gpu_tensors": "4K", "tensors": "300K"},
    }.items():
        with budget(**bounds).resizing() as b:
            same = trained(NAME) == expected
            same_streams = on_two_streams(NAME) == expected_streams
        report = b.report
        assert report.device is not None
        found[name] = {
            "same": same, "same_streams": same_streams, "races": there.card_races(), "left": there.card_allocated(),
            "moved": report.device.written_bytes, "over": report.device.over_bytes, "peak": report.device.peak_tensor_bytes,
            "paged": report.written_bytes, "host_peak": report.peak_tensor_bytes,
        }  # fmt: skip
    return _say({"plain_peak": plain_peak, **found})


def on_shared_memory(device: str) -> list[str]:
    """Return bits of tensors that one stream made and another uses last, before their memory is given to others.

    The program has recorded the other stream on the first kind, which is then used on its own; the second kind is used on both in turn.
    """
    torch.manual_seed(0)
    side, own = torch.Stream(device=device), torch.accelerator.current_stream()
    side.wait_event(own.record_event())
    kept = []
    for turn in range(4):
        for kind in ("recorded", "in turn"):
            x, others = torch.randn(100, 100).to(device), [torch.randn(100, 100).to(device) for _ in range(4)]
            if kind == "recorded":
                x.record_stream(side)
            kept.append(others[0] + others[1] + others[2] + others[3])  # x may leave
            if kind == "recorded":
                kept.append(x * 2)
            side.wait_event(own.record_event())
            with side:
                made = x @ x
            made.record_stream(own)
            if kind == "in turn":
                own.wait_event(side.record_event())
                kept.append(x * 3)
            del x
            with side if kind == "in turn" else contextlib.nullcontext():
                after = torch.full((100, 100), float(turn), device=device)
                after.record_stream(own)
            own.wait_event(side.record_event())
            kept += [made, after]
    torch.accelerator.synchronize()
    return [float(t.double().sum().item()).hex() for t in kept]


def streams_share_memory(_: list[str]) -> int:
    """Say whether memory that came back is given to others before every stream of the program is done with it."""
    there = followed_card()
    expected, found = on_shared_memory(NAME), dict[str, Any]()
    peak, before = there.card_peak(), there.card_races()
    for name, bounds in {
        "operands": {"gpu_tensors": "4K"}, "half": {"gpu_tensors": peak // 2}, "process": {"gpu_ram": CONTEXT_BYTES + (5 << 18)},
    }.items():  # fmt: skip
        with budget(**bounds) as b:
            same = on_shared_memory(NAME) == expected
        assert b.report.device is not None
        found[name] = [same, there.card_races() - before, b.report.device.written_bytes > 0]
    return _say(found)


def too_large_together(_: list[str]) -> int:
    """Say what operators over numbers give whose operands and results do not fit together."""
    there = followed_card()
    count, found = 3 << 20, dict[str, Any]()

    def run() -> list[str]:
        torch.manual_seed(0)
        x, y = torch.randn(count).to(NAME), torch.randn(count).to(NAME)
        made = torch.mul(x, y)
        x.add_(made, alpha=0.5)
        after = torch.addcmul(made, x, y, value=0.25).relu_()
        return [float(t.cpu().double().sum().item()).hex() for t in (x, y, made, after)]

    expected = run()
    settings: dict[str, dict[str, Any]] = {
        "process": {"gpu_ram": CONTEXT_BYTES + (30 << 20)},
        "tensors": {"gpu_tensors": 26 << 20},
    }
    for name, bounds in settings.items():
        tiled: list[str] = []
        run_tiles = DevicePool.run_tiles

        def watched(
            pool: DevicePool, func: Any, *args: Any, tiled: list[str] = tiled, run_tiles: Any = run_tiles
        ) -> Any:
            tiled.append(str(func))
            return run_tiles(pool, func, *args)

        with budget(**bounds) as b:
            _put(DevicePool, run_tiles=watched)
            same = run() == expected
        _put(DevicePool, run_tiles=run_tiles)
        device = b.report.device
        found[name] = [same, there.card_races(), sorted(set(tiled)), 0 if device is None else device.peak_tensor_bytes]
    return _say(found)


def asks_for_a_shape(_: list[str]) -> int:
    """Say what an operator gives of whose operand the CPU's kernel reads the shape alone, and which is away by then."""
    there = followed_card()

    def run() -> list[float]:
        torch.manual_seed(0)
        logits = torch.randn(192, 256).to(NAME).requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(192).to(NAME))
        others = [torch.full((192, 256), float(k), device=NAME) for k in range(3)]
        loss.backward()
        assert logits.grad is not None
        return [float(t.double().sum().item()) for t in (loss, logits.grad, *others)]

    expected = run()
    with budget(gpu_tensors="4K"):
        return _say({"same": run() == expected, "races": there.card_races()})


def memory_runs_out(_: list[str]) -> int:
    """Say how operators end that the device refuses memory: one that fits alone, one that never does, one that writes in place."""
    there = followed_card()
    found: dict[str, Any] = {}
    _put(DeviceBudget, tensor_bytes=lambda bounds: 1 << 30)  # believed, until the device says otherwise
    with budget(gpu_ram=CONTEXT_BYTES + (4 << 20)) as b:
        kept = [torch.full((1 << 17,), float(k), device=NAME) for k in range(12)]
        found["fits alone"] = [float((torch.cat(kept[:3]) + 1).sum().item()), [float(t[0].item()) for t in kept]]
        for name, call in {"never fits": _too_large, "in place": lambda: kept[0].resize_(1 << 21)}.items():
            try:
                call()
                found[name] = "ran"
            except torch.OutOfMemoryError as error:
                found[name] = str(error)
        found["after"] = [float(t[0].item()) for t in kept]
    found["ran again"] = 0 if b.report.device is None else b.report.device.ran_again
    return _say({**found, "races": there.card_races()})


def _too_large() -> torch.Tensor:
    return torch.ones(1 << 10, 1, device=NAME) * torch.ones(1, 1 << 11, device=NAME)


def writes_past_operators(_: list[str]) -> int:
    """Say what comes back of a tensor that something else than an operator wrote."""
    followed_card()
    return _say({"total": _written_past()})


def _written_past() -> float:
    """Write a tensor that was read back as a kernel of the program's own would, let it leave again, and return what comes back."""
    with budget(gpu_tensors="4K") as b:
        x, others = torch.ones(3000, device=NAME), [torch.ones(3000, device=NAME) for _ in range(2)]
        for _turn in range(2):
            assert float((others[0] + others[1]).sum().item()) == 6000
            assert float(x.sum().item()) in (3000.0, 3005.0)
            held = b.interceptor.table.known(x)
            assert held is not None and b.interceptor.device is not None
            held.pins += 1
            b.interceptor.pools.ensure_resident([held])
            memory = held.ref()
            assert memory is not None
            address = card().card_memory(storages.data_ptr(memory))
            ctypes.c_float.from_address(address + 400).value = 6.0
            held.pins -= 1
            b.interceptor.device.residency.empty()
        return float(x.sum().item())


def refusals(_: list[str]) -> int:
    """Say how each kind of memory that cannot be bounded is refused."""
    followed_card()
    found: dict[str, Any] = {}
    with budget(gpu_tensors="1M") as b:
        for name, device in {"mps": torch.device("mps", 0), "second": torch.device(NAME, 1)}.items():
            found[name] = _refused(partial(DevicePool, device, b.interceptor.pools, ram_bytes=None, tensor_bytes=1))
        _put(CardBackend, __init__=_unified)
        found["unified"] = _refused(lambda: torch.ones(9, device=NAME))
    _put(CardBackend, __init__=CARD_INIT)
    with budget(gpu_tensors="1M") as b:
        torch.ones(9, device=NAME)
        found["compiled"] = _refused(b.interceptor.stand_aside)
    return _say(found)


CARD_INIT = CardBackend.__init__


def _unified(backend: CardBackend) -> None:
    CARD_INIT(backend)
    backend.unified = True


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return ""


class _Kernel:
    """What Triton's JITFunction is to a program: it asks for the addresses of its arguments and computes there."""

    def run(self, source: torch.Tensor, target: torch.Tensor) -> list[int]:
        """Add one to each number of `source`, into `target`."""
        places = [card().card_memory(t.data_ptr()) for t in (source, target)]
        read, written = (ctypes.cast(place, ctypes.POINTER(ctypes.c_float)) for place in places)
        for k in range(source.numel()):
            written[k] = read[k] + 1
        return places


def _by_function(x: torch.Tensor) -> list[float]:
    """Return sums of what a function of the program's own makes, whose kernels of C++ find the tensors by themselves."""

    def kernel(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
        places = [card().card_memory(storages.data_ptr(storages.untyped_storage(t))) for t in (source, target)]
        read, written = (ctypes.cast(place, ctypes.POINTER(ctypes.c_float)) for place in places)
        for k in range(source.numel()):
            written[k] = read[k] * factor

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            made = torch.zeros(4000, device=NAME)
            kernel(x, made, 3.0)
            kernel(y, made, 4.0)
            return made

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ctx.saved_tensors
            made = torch.zeros_like(gradient), torch.zeros_like(gradient)
            kernel(x, made[0], 2.0)
            kernel(y, made[1], 5.0)
            return made

    given = [(x * k).requires_grad_() for k in (1, 2)]
    made = Own.apply(*given)
    made.sum().backward()
    return [float(t.sum().item()) for t in (made, *(g.grad for g in given if g.grad is not None))]


def illegal_address(_: list[str]) -> int:
    """Let a thread that is older than the budget use what has left, and say how that ends."""
    followed_card()
    begin, ended = threading.Event(), threading.Event()
    x, found = torch.ones(4000, device=NAME), list[str]()

    def older() -> None:
        begin.wait()
        try:
            x.add_(1)
        except RuntimeError as error:
            failed.append(error)
        ended.set()

    failed: list[RuntimeError] = []
    threading.Thread(target=older).start()
    try:
        with budget(gpu_tensors="4K"):
            float((x + 1).sum().item())
            torch.ones(4000, device=NAME)
            begin.set()
            ended.wait()
            raise failed[0]
    except RuntimeError as error:
        found += [str(error), *error.__notes__]
    return _say({"said": found, "after": float(x.sum().item())})


def doors(_: list[str]) -> int:
    """Say what comes to a device's memory past the operators, while everything leaves all the time."""
    followed_card()
    sys.modules["triton.runtime.jit"] = module = types.ModuleType("triton.runtime.jit")
    vars(module)["JITFunction"] = _Kernel
    with budget(gpu_tensors="4K") as b:
        x, y, others = (torch.full((4000,), float(k), device=NAME) for k in (1, 2, 5))
        memory, found = x.untyped_storage(), dict[str, Any]()
        float((y + others).sum().item())
        found["size"] = [memory.nbytes(), memory.size()]
        address = x.data_ptr()
        float((y + others).sum().item())
        found["stays"] = [address == x.data_ptr(), ctypes.c_float.from_address(card().card_memory(address)).value]
        kernel = _Kernel()
        found["kernel"] = []
        for _turn in range(3):
            kernel.run(y, others)
            float((x * 2).sum().item())
            pins = [s.pins for t in (y, others) if (s := b.interceptor.table.known(t)) is not None]
            found["kernel"].append([float(others.sum().item()), pins])
        found["function"] = _by_function(y)
        done = threading.Event()
        _thread.start_new_thread(lambda: (others.add_(y), done.set()), ())
        done.wait()
        found["bare thread"] = float(others.sum().item())
        found["printed"] = [repr(x[:2]), copy.deepcopy(y).sum().item(), y[:2].tolist()]
        saved = io.BytesIO()
        torch.save({"y": y}, saved)
        saved.seek(0)
        found["saved"] = float(torch.load(saved, map_location="cpu")["y"].sum().item())
        found["graph"] = _refused(partial(vars(torch.cuda.CUDAGraph)["capture_begin"], None))
        found["shared"] = _refused(lambda: y.untyped_storage()._share_cuda_())
    return _say(found)


MUTATIONS: dict[str, Callable[[], None]] = {}
"""What to leave out of the code that moves storages."""


def _mutation(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    return lambda apply: MUTATIONS.setdefault(name, apply)


@_mutation("what comes back is not waited for")
def _no_wait_for_reads() -> None:
    _put(DeviceStorages, _wait_on_device=lambda self, landed: None)


@_mutation("what leaves is not waited for")
def _no_wait_for_writes() -> None:
    def join(move: DeviceMove) -> None:
        if not move.write:
            move.wait_on_device(move.copy.landed())
        move.end()

    _put(DeviceMove, join=join)


@_mutation("copies do not wait for what was computed")
def _no_wait_for_computing() -> None:
    def copy(backend: Any, target: torch.Tensor, source: torch.Tensor, after: object) -> torch.Event:
        with backend._copies:
            target.copy_(source, non_blocking=True)
            return backend._copies.record_event()

    _put(CardBackend, copy=copy)


@_mutation("chunks that arrive on the host are not waited for")
def _no_wait_for_chunks() -> None:
    def fetch(side: DeviceSide, place: int, nbytes: int) -> int:
        side._begin(place, nbytes)
        return address(side._staging.buffers[side._ahead.pop(place)[0]])

    _put(DeviceSide, fetch=fetch)


@_mutation("buffers are filled before they are emptied")
def _buffers_used_early() -> None:
    def take(staging: Staging) -> int:
        staging._turn = 0
        return 0

    _put(Staging, take=take)


@_mutation("pinned pages that are filled are not waited for")
def _no_wait_for_pinned() -> None:
    _put(DirectCopy, landed=lambda copy: copy.event)


@_mutation("pinned pages are given to others while they are in use")
def _pinned_shared() -> None:
    taken: list[torch.Tensor] = []

    def chunk(pages: PinnedPages, nbytes: int) -> torch.Tensor:
        if not taken:
            taken.append(pages._backend.allocate_host(PINNED_CHUNK_BYTES))
        return taken[0]

    _put(PinnedPages, _chunk=chunk)


@_mutation("pages stay believed when storages are written")
def _stale_pages() -> None:
    def change(pools: MemoryPools, storages: object) -> None:
        return

    _put(MemoryPools, change=change)


@_mutation("nothing is copied when storages leave")
def _no_copy_out() -> None:
    def fetch(ring: TransferRing, side: DeviceSide, target: torch.Tensor) -> object:
        return side.landed

    _put(TransferRing, _fetch=fetch)


@_mutation("nothing is copied when storages come back")
def _no_copy_in() -> None:
    def deliver(ring: TransferRing, side: DeviceSide, source: torch.Tensor) -> object:
        return side.landed

    _put(TransferRing, _deliver=deliver)


@_mutation("streams of the program do not wait for each other's memory")
def _streams_apart() -> None:
    _put(ProgramStreams, join=lambda self: None)


@_mutation("blocks leave the host's memory while they are copied")
def _blocks_not_held() -> None:
    held = HostBlocks.hold

    def hold(blocks: HostBlocks, block: torch.UntypedStorage, *, write: bool) -> Callable[[], None]:
        held(blocks, block, write=write)()
        return lambda: None

    _put(HostBlocks, hold=hold)


def mutated(words: list[str]) -> int:
    """Say whether training notices what was left out: other bits, an order that was violated, or an error."""
    there = followed_card()
    expected = [*trained(NAME), *on_two_streams(NAME)]
    MUTATIONS.get(words[0], bool)()
    noticed = ""
    try:
        for host, size in product(("300K", None), ("4K", "1M")):  # pages that the host's budget moves, and pinned ones
            with budget(gpu_tensors=size, tensors=host).resizing():
                found = [*trained(NAME), *on_two_streams(NAME)]
            races = there.card_races()
            noticed = f"{races} races" if races else "" if found == expected else "bits"
            if noticed:
                break
    except Exception as error:  # of whatever kind: it was noticed
        noticed = repr(error)
    return _say({"noticed": noticed})


BRIEF_MUTATIONS: dict[str, Callable[[], None]] = {}
"""What else to leave out, for programs that do one thing each."""


def _brief_mutation(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    return lambda apply: BRIEF_MUTATIONS.setdefault(name, apply)


@_brief_mutation("memory is freed while it is copied")
def _freed_early() -> None:
    copied = DeviceStorages._copied

    def copy(kept: DeviceStorages, page: Any, contents: torch.Tensor, *, write: bool) -> Any:
        moving = copied(kept, page, contents, write=write)
        if write:
            storages.resize(storages.untyped_storage(contents), 0)
        return moving

    _put(DeviceStorages, _copied=copy)


@_brief_mutation("memory that came back is one stream's alone")
def _not_recorded() -> None:
    _put(ProgramStreams, record=lambda self, contents: None)


@_brief_mutation("random numbers are drawn twice where an operator runs once more")
def _generator_goes_on() -> None:
    _put(CardBackend, set_generator_state=lambda self, state: None)


@_brief_mutation("nothing leaves before an operator runs once more")
def _nothing_leaves() -> None:
    _put(Residency, empty=lambda self: None)


@_brief_mutation("operands leave while their operator runs")
def _operands_leave() -> None:
    stays = Residency._stays

    def may_leave(residency: Residency, storage: storages.Storage) -> bool:
        pins, storage.pins = storage.pins, 0
        try:
            return stays(residency, storage)
        finally:
            storage.pins = pins

    _put(Residency, _stays=may_leave)


@_brief_mutation("nobody looks for writes past the operators")
def _not_looked_for() -> None:
    _put(DeviceStorages, written_past=lambda self, storage, memory: False)


@_brief_mutation("what has an address outside leaves")
def _addresses_leave() -> None:
    _put(Interceptor, escape=lambda self, storage: None)


@_brief_mutation("what a program's own function is given leaves")
def _functions_alone() -> None:
    _put(FunctionGuards, _add=lambda self, storages: [])


@_brief_mutation("what comes back at the end is not waited for")
def _end_not_awaited() -> None:
    restored = Residency.restore

    def restore(residency: Residency) -> None:
        vars(residency)["wait_read"] = lambda storage: None
        restored(residency)

    _put(Residency, restore=restore)


def briefly() -> list[Any]:
    """Return what programs that do one thing each give within budgets."""
    found: list[Any] = []
    with budget(gpu_ram=CONTEXT_BYTES + (5 << 18)):
        found.append(on_shared_memory(NAME))
    with budget(gpu_tensors="4K"):
        x = torch.ones(4000, device=NAME)
        kept = [x * k for k in range(1, 5)]
        found.append(_by_function(x))
        address = card().card_memory(kept[0].data_ptr())
        found.append(float((kept[1] + kept[2]).sum().item()))
        ctypes.c_float.from_address(address).value = 5.0
        found.append(float(kept[0].sum().item()))
    return [*found, *(float(t.sum().item()) for t in kept), _written_past(), *_run_again()]


def _run_again() -> list[float]:
    """Return what a random operator draws that does not fit at first, although the budget believes so."""
    believed = DeviceBudget.tensor_bytes
    _put(DeviceBudget, tensor_bytes=lambda bounds: 1 << 30)
    try:
        torch.manual_seed(1)
        with budget(gpu_ram=CONTEXT_BYTES + (4 << 20)):
            kept = [torch.full((1 << 17,), float(k), device=NAME) for k in range(6)]
            weights = torch.arange(1.0, 1001.0, device=NAME)
            drawn = [torch.multinomial(weights, 1 << 16, replacement=True) for _ in range(4)]
            return [float(t.sum().item()) for t in (*drawn, *kept)]
    finally:
        _put(DeviceBudget, tensor_bytes=believed)


def mutated_briefly(words: list[str]) -> int:
    """Say whether short programs notice what was left out."""
    there = followed_card()
    expected = briefly()
    before = there.card_races()
    BRIEF_MUTATIONS.get(words[0], bool)()
    try:
        found = briefly()
    except Exception as error:  # of whatever kind: it was noticed
        return _say({"noticed": repr(error)})
    races = there.card_races() - before
    return _say({"noticed": f"{races} races" if races else "" if found == expected else "bits", "plain": before})


def _noted(losses: list[float], stop_after: int | None = None) -> Callable[[Any], None]:
    """Return what notes the loss of each update, and asks the fine-tuning to stop after one."""

    def note(update: Any) -> None:
        losses.append(update.loss)
        if update.done == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    return note


def finetuned(words: list[str]) -> int:
    """Say what fine-tunings give without a budget, and within one with a stop in between: bits, losses, checkpoints, and what moved."""
    from port_agent.finetuning.training import finetune
    from tests.agent.finetuning.tiny_model import make_model

    there, folder, found = followed_card(), Path(words[0]), dict[str, Any]()
    for name, (kind, record, asked) in FINETUNINGS.items():
        model, data = make_model(folder / name / "model", kind=kind), folder / name / "data.jsonl"
        data.write_text(20 * (json.dumps(record) + "\n"))
        plain = FinetuneOptions(
            str(model), (str(data),), str(folder / name / "plain"), sequence_tokens=32, learning_rate=1e-3, updates=4, evaluate_every=2,
            held_out=0.2, device=NAME, **asked,
        )  # fmt: skip
        parted = replace(plain, out=str(folder / name / "parted"))
        expected, losses = list[float](), list[float]()
        finetune(plain, _noted(expected), lambda note: None)
        with budget(gpu_tensors="64K") as b:
            left = finetune(parted, _noted(losses, 2), lambda note: None)
            kept = torch.load(checkpoint_path(parted), weights_only=True)
            again = finetune(parted, _noted(losses), lambda note: None)
        results = [sorted(Path(options.out).glob("*.safetensors")) for options in (plain, parted)]
        assert b.report.device is not None
        found[name] = {
            "bits": [one.read_bytes() == other.read_bytes() for one, other in zip(*results, strict=True)], "losses": losses == expected,
            "left": [left.left, again.left], "moved": b.report.device.written_bytes, "races": there.card_races(),
            "kept on": sorted({str(t.device) for t in (*kept["trained"], *(s["exp_avg"] for s in kept["optimizer"]["state"].values()))}),
        }  # fmt: skip
    return _say(found)


def measured(_: list[str]) -> int:
    """Print the rows of `make check-gpu`, and the violations of order that the card saw."""
    there = followed_card()
    code = gpu_exec.main(["--small"])
    sys.stdout.write(f"{there.card_races()} races\n")
    return code


def _say(facts: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(facts))
    return 0
