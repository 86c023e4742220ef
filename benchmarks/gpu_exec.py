"""What a budget for GPU memory does to programs, on this machine's GPU: `make check-gpu`, or
`python -m benchmarks.gpu_exec`.

A transformer trains plainly, then within shares of what it took: bits, peaks, time; alongside `save_on_cpu` and
checkpointing. Two streams of the program's own, an operator that does not fit, a kernel of Triton's, and how much of
copies hides behind compute. Managed memory is not compared: it can hang a card that others use. No row begins after
four minutes. It says which rows ran; without a GPU it says so and exits with 0.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu import overlap
from port_agent import budget
from port_agent.backend.base import Backend
from port_agent.backend.choose import backend_of
from port_agent.intercept.budget import Report
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes

TIME_S = 240.0
"""No row begins later than this; `make check-gpu` runs this module and `benchmarks.gpu` within eight minutes."""
STEPS = 6
SHARES = (0.8, 0.5, 0.3)
"""Shares of the tensors' memory that a budget allows them."""


@dataclass(frozen=True)
class Size:
    """Size of the transformer that trains."""

    width: int
    layers: int
    rows: int
    length: int


LARGE, SMALL = Size(1024, 12, 8, 512), Size(64, 5, 4, 16)


@dataclass(frozen=True)
class Trained:
    """Results of training, and what it took."""

    bits: list[str]
    seconds: float
    peak_bytes: int


class Model(nn.Module):
    """A stack of transformer layers; `checkpointed`: each is computed again in the backward pass."""

    def __init__(self, size: Size, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.1, batch_first=True)
            for _ in range(size.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.pow(2).mean()


def trained(device: str, size: Size, backend: Backend, *, checkpointed: bool = False, on_host: bool = False) -> Trained:
    """Train some steps and return the bits of losses and weights, seconds of the last step, and the peak of tensors."""
    torch.manual_seed(0)
    backend.reset_peak()
    model = Model(size, checkpointed=checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    bits, began = [], 0.0
    for _ in range(STEPS):
        backend.synchronize()
        began = time.perf_counter()
        x = torch.randn(size.rows, size.length, size.width).to(device)
        with torch.autograd.graph.save_on_cpu() if on_host else torch.enable_grad():
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(float(loss.item()).hex())
    seconds = time.perf_counter() - began
    bits += [float(p.detach().double().sum().item()).hex() for p in model.parameters()]
    return Trained(bits, seconds, backend.peak_bytes())


def rows(device: str, size: Size, backend: Backend) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each row with the function that measures it and returns the finding."""
    plain: list[Trained] = []

    def alone() -> str:
        plain.append(trained(device, size, backend))
        again = trained(device, size, backend)
        same = "equal twice" if again.bits == plain[0].bits else "NOT equal twice: no row below can be"
        return f"peak {format_bytes(plain[0].peak_bytes)}, {plain[0].seconds:.3f} s a step, {same}"

    def compared(found: Trained, said: str = "") -> str:
        equal = "bits equal" if found.bits == plain[0].bits else "BITS DIFFER"
        return (
            f"{equal}, peak {format_bytes(found.peak_bytes)}, {found.seconds / plain[0].seconds:.2f}x of the time{said}"
        )

    def within(share: float) -> str:
        with budget(gpu_ram=backend.outside_bytes() + int(share * plain[0].peak_bytes)) as b:
            found = trained(device, size, backend)
        took = b.report.device
        peak_bytes = (
            found.peak_bytes if took is None else took.peak_tensor_bytes
        )  # the budget has asked for peaks itself
        return compared(replace(found, peak_bytes=peak_bytes), _moved(b.report))

    yield "plain", alone
    for share in SHARES:
        yield f"exec --gpu-ram, {share:.0%} of its tensors", partial(within, share)
    yield "save_on_cpu", lambda: compared(trained(device, size, backend, on_host=True))
    yield "checkpointing", lambda: compared(trained(device, size, backend, checkpointed=True))
    yield "two streams", lambda: two_streams(device, size)
    yield "an operator that does not fit", lambda: does_not_fit(device, backend)
    yield "Triton", lambda: by_triton(device)
    yield "overlap", lambda: hidden_copies(size, backend)


def _moved(report: Report) -> str:
    device = report.device
    if device is None:
        return ", NO TENSOR WAS SEEN"
    return f"; {format_bytes(device.written_bytes)} left, {format_bytes(device.read_bytes)} came back, waited {device.stall_seconds:.2f} s"


def two_streams(device: str, size: Size) -> str:
    """Report whether two streams that use the same weights and wait for each other give the same
    bits with everything evicted.
    """

    def run() -> list[str]:
        torch.manual_seed(0)
        weights = [torch.randn(size.width, size.width).to(device) for _ in range(4)]
        first, second = torch.Stream(device=device), torch.Stream(device=device)
        for stream in (first, second):
            stream.wait_event(torch.accelerator.current_stream().record_event())
        kept, x, y = [], weights[0], weights[1]
        for weight in weights * 4:
            with first:
                x = x @ weight / size.width
            with second:
                y = y @ weight / size.width
            kept += [x, y]
        torch.accelerator.synchronize()
        return [float(t.double().sum().item()).hex() for t in kept]

    expected = run()
    with budget(gpu_tensors="4K"):
        found = run()
    return "bits equal" if found == expected else "BITS DIFFER"


def does_not_fit(device: str, backend: Backend) -> str:
    """Report how an operator ends that takes more than the budget."""
    with budget(gpu_ram=backend.outside_bytes() + (64 << 20)):
        column = torch.ones(1 << 13, 1, device=device)
        try:
            return f"RAN: {float((column * column.t()).sum().item()):g}"
        except torch.OutOfMemoryError as error:
            return str(error)


def hidden_copies(size: Size, backend: Backend) -> str:
    """Say how much of copies hides behind compute, on the stream that brings tensors and takes them away."""
    quiet = Console(quiet=True)
    hidden = overlap(backend, quiet, 4 * size.width, 256 * size.width**2)
    return f"{hidden:.0%} of the shorter of compute and copies is hidden"


def by_triton(device: str) -> str:
    """Report whether a kernel of Triton's finds its operands while everything is evicted."""
    try:
        from benchmarks.gpu_triton import add_one
    except ImportError as error:
        return f"did not run: {error}"
    with budget(gpu_tensors="4K"):
        x, y = torch.full((10_000,), 2.0, device=device), torch.ones(10_000, device=device)
        for _ in range(3):
            add_one(x, y)
            x = y * 1
        total = float(y.sum().item())
    return "equal" if total == 50_000 else f"WRONG: {total:g} and not 50000"


def main(arguments: list[str] | None = None) -> int:
    """Print one row at a time; return 0 even if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_exec", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, for a look")
    args = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what is compared has to repeat
    torch.use_deterministic_algorithms(True)
    console, began, ran, left = Console(width=118, highlight=False), time.monotonic(), 0, []
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        console.print(f"no GPU: torch {torch.__version__} finds none here; nothing was measured")
        return 0
    for name, measure in rows(kind.type, SMALL if args.small else LARGE, backend_of(kind.type)):
        if time.monotonic() - began > TIME_S:
            left.append(name)
            continue
        try:
            said = measure()
        except (PortError, RuntimeError) as error:
            said = f"FAILED: {type(error).__name__}: {error}"
        ran += 1
        console.print(f"{name}: {said}", soft_wrap=True)
    console.print(f"{ran} rows ran in {time.monotonic() - began:.0f} s; not run: {', '.join(left) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
