"""A program of the zoo with its tensors on a device, within budgets of the device's memory
alongside itself without one.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.follow_zoo.compare import (
    EVERYTHING_LEAVES,
    SMALL_HALF,
    Digest,
    Outcome,
    Program,
    Verdict,
    digest,
    first_difference,
    said,
    seed,
)
from port_agent import budget
from port_agent.backend.choose import backend_of
from port_agent.intercept.budget import Report
from port_agent.intercept.residency.refusals import UnsupportedError
from port_planner.ir.torch_device import generator_state, repeat_kernels


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """A program by name, whose tensors are made on a device; see `benchmarks.follow_zoo.children.Judged`."""

    name: str
    program: Program
    device: str
    violated: Callable[[], str] = str
    """Return what the device reports as out of order so far, or ""."""

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Run it twice without a budget, then at half of what it took, and with everything evicted all the time."""
        at("plain")
        repeat_kernels(self.device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device(self.device)
        try:
            backend = backend_of(self.device)
            backend.reset_peak()
            expected = self._digest()
            peak_bytes = backend.peak_bytes()
            again = self._digest()
        except Exception as error:
            return Outcome(self.name, Verdict.NOT_ELIGIBLE, f"on the device raises {said(error)}")
        if difference := first_difference(expected, again):
            return Outcome(self.name, Verdict.NOT_ELIGIBLE, f"differs from itself: {difference}")
        read, written = 0, 0
        for name, nbytes in (("half", max(peak_bytes // 2, SMALL_HALF)), ("4K", EVERYTHING_LEAVES)):
            at(name)
            before = self.violated()
            try:
                found, report = self._digest_within(nbytes)
            except UnsupportedError as error:
                return Outcome(self.name, Verdict.REFUSED, said(error), name)
            except Exception as error:
                return Outcome(self.name, Verdict.FAILED, said(error), name, peak_bytes)
            difference = first_difference(expected, found)
            if not difference and (after := self.violated()) != before:
                difference = after
            if difference:
                return Outcome(self.name, Verdict.DIFFERS, difference, name, peak_bytes)
            if report.device is not None:
                read, written = read + report.device.read_bytes, written + report.device.written_bytes
        return Outcome(self.name, Verdict.EQUAL, "", "", peak_bytes, read, written, settings=("half", "4K"))

    def _digest(self) -> Digest:
        seed()
        found = digest(self.program())
        gc.collect()
        found[".device_rng"] = repr(generator_state(self.device).tolist())
        return found

    def _digest_within(self, nbytes: int) -> tuple[Digest, Report]:
        with budget(gpu_tensors=nbytes) as b:
            seed()
            result = self.program()
        found = digest(result)
        del result
        gc.collect()
        found[".device_rng"] = repr(generator_state(self.device).tolist())
        return found, b.report
