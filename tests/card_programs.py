"""What runs in processes that have the simulated card (`tests/simulated_card.py`): functions for `tests.forked.run_forked`."""

import copy
import ctypes
import io
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_exec
from port_agent import budget
from port_agent.backend import choose
from port_agent.backend.staging import DeviceSide, Staging, address
from port_agent.backend.transfer_ring import TransferRing
from port_agent.intercept.dispatch.device_pool import DevicePool
from port_agent.intercept.residency import storages
from port_agent.intercept.residency.device_memory import DeviceBudget
from port_agent.intercept.residency.device_storages import DeviceMove, DeviceStorages, HostBlocks, ProgramStreams
from port_agent.intercept.residency.pinned_pages import PIECE_BYTES, DirectCopy, PinnedPages
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.refusals import UnsupportedError
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


def memory_runs_out(_: list[str]) -> int:
    """Say how operators end that the device refuses memory: one that fits alone, one that never does, one that writes in place."""
    there = followed_card()
    found: dict[str, Any] = {}
    _put(DeviceBudget, tensor_bytes=lambda bounds: 1 << 30)  # believed, until the device says otherwise
    with budget(gpu_ram=CONTEXT_BYTES + (4 << 20)):
        kept = [torch.full((1 << 17,), float(k), device=NAME) for k in range(12)]
        found["fits alone"] = [float((torch.cat(kept[:3]) + 1).sum().item()), [float(t[0].item()) for t in kept]]
        for name, call in {"never fits": _too_large, "in place": lambda: kept[0].resize_(1 << 21)}.items():
            try:
                call()
                found[name] = "ran"
            except torch.OutOfMemoryError as error:
                found[name] = str(error)
        found["after"] = [float(t[0].item()) for t in kept]
    return _say({**found, "races": there.card_races()})


def _too_large() -> torch.Tensor:
    return torch.ones(1 << 10, 1, device=NAME) * torch.ones(1, 1 << 11, device=NAME)


def writes_past_operators(_: list[str]) -> int:
    """Write a tensor that was read back as a kernel of the program's own would, let it leave again, and say what comes back."""
    there = followed_card()
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
            address = there.card_memory(storages.data_ptr(memory))
            ctypes.c_float.from_address(address + 400).value = 6.0
            held.pins -= 1
            b.interceptor.device.residency.empty()
        total = float(x.sum().item())
    return _say({"total": total})


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


@_mutation("pieces that arrive on the host are not waited for")
def _no_wait_for_pieces() -> None:
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

    def piece(pages: PinnedPages, nbytes: int) -> torch.Tensor:
        if not taken:
            taken.append(pages._backend.allocate_host(PIECE_BYTES))
        return taken[0]

    _put(PinnedPages, _piece=piece)


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
    found: list[str] = []
    try:
        for host in ("300K", None):  # pages that the host's budget moves, and pinned ones
            for size in ("4K", "1M"):
                with budget(gpu_tensors=size, tensors=host).resizing():
                    found += [*trained(NAME), *on_two_streams(NAME)]
    except Exception as error:  # of whatever kind: it was noticed
        return _say({"noticed": repr(error)})
    return _say(
        {"noticed": f"{there.card_races()} races" if there.card_races() else "" if found == 4 * expected else "bits"}
    )


def measured(_: list[str]) -> int:
    """Print the rows of `make check-gpu`, and the violations of order that the card saw."""
    there = followed_card()
    code = gpu_exec.main(["--small"])
    sys.stdout.write(f"{there.card_races()} races\n")
    return code


def _say(facts: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(facts))
    return 0
