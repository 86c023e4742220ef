"""The measurement worker: a process with torch loaded that measures operators and compares tiles.

Loading torch takes two CPU seconds, so the process is kept for the next request with the same number of threads.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgpack
import msgspec

from port_agent.malloc import PreloadMode, preload_environment, preload_mode
from port_agent.prepare.measurement.dry_run import DryRunError
from port_agent.prepare.measurement.measurement_process import (
    Compare,
    Event,
    Measure,
    MeasurementAnswer,
    MeasurementProgress,
    Request,
    read_measured,
)
from port_agent.prepare.measurement.progress import Progress
from port_agent.system.helper_process import Helper, HelperCommand, HelperError
from port_agent.system.python_process import module_environment, threads_environment
from port_planner.exactness.replacements import Difference
from port_planner.exactness.request import pack_request, read_differing
from port_planner.ir.bundle.codec import pack_graph
from port_planner.ir.graph import StepGraph
from port_planner.profiling import kept_costs, operator_profile
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.rewriting import RewrittenGraph

_EVENTS: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


class MeasurementWorker:
    """Answers requests in another process: while entered, in one process; otherwise in a new one for each.

    `limit_bytes`: memory limit of that process, including blocks kept for reuse; None: it keeps all freed blocks.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._kept = False
        self._helper: Helper[Event] | None = None
        """The process, which has `_threads` threads; `_was_asked`: whether it may have left memory resident."""
        self._threads, self._was_asked = 0, False

    def __enter__(self) -> Self:
        self._kept = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept = False
        self._close()

    def load(self, threads: int) -> None:
        """Make a process load torch for the first request, with `threads` threads, while
        this one does something else.
        """
        if self._helper is not None:
            return
        limit = preload_environment(self._limit_bytes)
        environment = {**module_environment(), **limit, **threads_environment(threads)}
        command = HelperCommand(
            "port_agent.prepare.measurement.measurement_process", (str(threads),), environment, directory=None
        )
        self._helper, self._threads, self._was_asked = Helper(command, _EVENTS), threads, False

    def measure(
        self,
        graphs: Iterable[StepGraph],
        threads: int,
        compute_watts: float,
        progress: Progress,
        shared: bytes = b"",
        *,
        resident: bool = True,
        elsewhere: bool = False,
    ) -> MeasuredCosts:
        """Profile the operators; while they run, they draw `compute_watts`.

        `shared`: what another machine of this kind measured (`port_planner.profiling.shared_costs`), to be checked by a
        sample. `resident`: whether to find out what they leave resident, in a process that did nothing before; if not,
        no process is asked where the cache knows all their costs. `elsewhere`: the graphs were recorded on another
        device; which of their operators are absent on this one is looked at, too.

        Raises DryRunError where that process fails.
        """
        graphs = tuple(graphs)
        if not resident and not elsewhere:
            seen, cache = preload_mode() is PreloadMode.PRELOAD, kept_costs.operators_folder()
            known = operator_profile.kept_tables(
                graphs, threads=threads, compute_watts=compute_watts, kept_in=cache, workspace_seen=seen
            )
            if known is not None:
                return MeasuredCosts(known, 0, 0)

        with tempfile.TemporaryDirectory() as folder:
            source, target, of_others = (Path(folder) / name for name in ("graphs", "costs", "shared"))
            source.write_bytes(msgpack.packb([pack_graph(g) for g in graphs]))
            if shared:
                of_others.write_bytes(shared)
            if resident and self._was_asked:
                self._close()
            request = Measure(
                str(source),
                str(target),
                compute_watts,
                resident,
                str(of_others) if shared else "",
                elsewhere=elsewhere,
                ram_bytes=self._limit_bytes or 0,
            )
            self._request(
                threads, request, "profiling", lambda event: progress("profile", event.done / max(1, event.total))
            )
            return read_measured(target)

    def compare(
        self, pairs: Sequence[tuple[StepGraph, RewrittenGraph]], threads: int, ram_bytes: int, page_dir: Path
    ) -> tuple[tuple[Difference, ...], ...]:
        """Run replacements and their originals, and return the differences of each pair.

        Raises DryRunError if the process fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "graphs", Path(folder) / "differing"
            source.write_bytes(pack_request(pairs, threads))
            request = Compare(str(source), str(target), ram_bytes, str(page_dir.resolve()))
            self._request(threads, request, "comparing tiled operators", lambda _: None)
            return read_differing(target)

    def _request(
        self, threads: int, request: Request, what: str, progress: Callable[[MeasurementProgress], None]
    ) -> None:
        if self._threads != threads:
            self._close()
        self.load(threads)
        self._was_asked, answer = True, None
        for event in self._helper.ask(request) if self._helper is not None else ():
            if isinstance(event, MeasurementAnswer):
                answer = event
                break
            progress(event)
        end = self._close() if answer is None or answer.is_last or not self._kept else None
        if answer is None:
            raise DryRunError(f"{what} {end}")

    def _close(self) -> HelperError | None:
        """End the process, if there is one, and return how it ended."""
        helper, self._helper = self._helper, None
        return None if helper is None else helper.close()
