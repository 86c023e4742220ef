"""The bench: a process that has torch loaded, to measure operators and to compare them in pieces.

Loading torch takes two seconds of a processor, so it is kept for the next request with as many threads.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgpack
import msgspec

from port_agent.malloc import PreloadMode, preload_environment, preload_mode
from port_agent.prepare.bench.process import DONE, LAST, Compare, Measure, Request, read_measured
from port_agent.prepare.making.trial import TrialError
from port_agent.prepare.progress import Progress
from port_agent.system.python_process import module_command, module_environment, threads_environment
from port_planner.exactness.replacements import Differing
from port_planner.exactness.request import pack_request, read_differing
from port_planner.ir.bundle.codec import pack_graph
from port_planner.ir.graph import StepGraph
from port_planner.profiling import kept_costs, operators
from port_planner.profiling.operators import Measured
from port_planner.slices.rewriting import Rewritten


class Bench:
    """Answers requests in a process beside this one: in the same for as long as it is entered, else in one for each.

    `limit_bytes`: what that process may take, blocks that it keeps for reuse included; None: it keeps all that are freed.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._kept = False
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        self._kept = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept = False
        self._close()

    def load(self, threads: int) -> None:
        """Have a process load torch for the first request, with so many threads, while this one does something else."""
        self._loaded(threads)

    def measure(
        self, graphs: Iterable[StepGraph], threads: int, compute_watts: float, progress: Progress, shared: bytes = b"",
        *, resident: bool = True, elsewhere: bool = False,
    ) -> Measured:  # fmt: skip
        """Profile the operators; while they run, they draw `compute_watts`.

        `shared`: what another machine of this kind measured (`port_planner.profiling.shared_costs`), to be checked by a sample.
        `resident`: whether to find out what they leave resident, in a process that did nothing before; if not, no process is asked
        where the cache knows all their costs. `elsewhere`: the graphs were recorded on another device; which of their operators are
        absent on this one is looked at, too.

        Raises TrialError where that process fails.
        """
        graphs = tuple(graphs)
        if not resident and not elsewhere:
            seen, cache = preload_mode() is PreloadMode.PRELOAD, kept_costs.operators_folder()
            known = operators.kept_tables(
                graphs, threads=threads, compute_watts=compute_watts, kept_in=cache, workspace_seen=seen
            )
            if known is not None:
                return Measured(known, 0, 0)

        def told(line: str) -> None:
            done, _, total = line.partition(" ")
            progress("profile", int(done) / max(1, int(total)))

        with tempfile.TemporaryDirectory() as folder:
            source, target, of_others = (Path(folder) / name for name in ("graphs", "costs", "shared"))
            source.write_bytes(msgpack.packb([pack_graph(g) for g in graphs]))
            if shared:
                of_others.write_bytes(shared)
            if resident and self._running is not None and self._running.asked:
                self._close()
            asked = Measure(
                str(source), str(target), compute_watts, resident, str(of_others) if shared else "", elsewhere=elsewhere,
                ram_bytes=self._limit_bytes or 0,
            )  # fmt: skip
            self._ask(threads, asked, "profiling", told)
            return read_measured(target)

    def compare(
        self, pairs: Sequence[tuple[StepGraph, Rewritten]], threads: int, ram_bytes: int, page_dir: Path
    ) -> tuple[tuple[Differing, ...], ...]:
        """Run replacements beside the originals, and return of each pair what differs. Raises TrialError where the process fails."""
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "graphs", Path(folder) / "differing"
            source.write_bytes(pack_request(pairs, threads))
            asked = Compare(str(source), str(target), ram_bytes, str(page_dir.resolve()))
            self._ask(threads, asked, "comparing operators in pieces", lambda _: None)
            return read_differing(target)

    def _ask(self, threads: int, request: Request, what: str, told: Callable[[str], None]) -> None:
        if self._running is not None and self._running.threads != threads:
            self._close()
        running = self._loaded(threads)
        answer = running.answer(request, told)
        if answer != DONE or not self._kept:
            self._close()
        if not answer:
            raise TrialError(f"{what} ended with exit code {running.process.returncode}: {running.last_words}")

    def _loaded(self, threads: int) -> "_Running":
        running = self._running = self._running or _Running(threads, self._limit_bytes)
        return running

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """The process, with so many threads."""

    def __init__(self, threads: int, limit_bytes: int | None) -> None:
        self.threads, self.last_words = threads, ""
        self.asked = False
        """Whether it did anything that may have left memory resident."""
        environment = {**module_environment(), **preload_environment(limit_bytes), **threads_environment(threads)}
        with ExitStack() as opened:
            self._said = opened.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [*module_command("port_agent.prepare.bench.process"), str(threads)], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            )  # fmt: skip
            self._opened = opened.pop_all()

    def answer(self, request: Request, told: Callable[[str], None]) -> str:
        """Return what it answers, what it says before told on; nothing where it ended instead."""
        self.asked = True
        if self.process.stdin is None or self.process.stdout is None:
            return ""
        try:
            self.process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        for line in self.process.stdout:
            if line in (DONE, LAST):
                return line
            told(line)
        return ""

    def close(self) -> None:
        """Let it end, and keep the last that it said."""
        with self._opened:
            with suppress(BrokenPipeError):  # what it was asked and did not read
                self.process.communicate()
            self._said.seek(0)
            self.last_words = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
