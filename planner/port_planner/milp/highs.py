"""A linear model with named columns and rows, and its solution by HiGHS: one thread, deterministic, with progress.

Names follow the LP format (parentheses, no brackets): HiGHS replaces others by c0, c1, ... when it writes a file.
"""

import enum
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from port_planner.base.errors import ExitCode, PortError

Vector = npt.NDArray[np.float64]
Progress = Callable[[float, float], None]
"""Called with (incumbent joules, bound joules) while a solver runs; infinite if there is none yet."""

INFINITY = float("inf")


class ModelFileError(PortError):
    """Raised when the model could not be written."""

    exit_code = ExitCode.IMPOSSIBLE


class SolverStatus(enum.Enum):
    """How a solver run ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NOTHING = "no solution found"


@dataclass(slots=True)
class LinearModel:
    """Minimise cost @ x subject to rows; columns in [lower, upper], some integral. Both carry names."""

    names: list[str] = field(default_factory=list)
    """Names of the columns."""
    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    index: "array[int]" = field(default_factory=lambda: array("i"))
    value: "array[float]" = field(default_factory=lambda: array("d"))
    """Each row's terms: column and factor. There are many more of them than columns or rows."""
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    impossible: dict[str, float] = field(default_factory=dict)
    """Rows without variables that cannot hold, and by how much they are missed."""
    offset: float = 0.0
    """Constant part of the cost: what is already decided."""

    def column(self, name: str, cost: float = 0.0, upper: float = 1.0, *, integral: bool = False) -> int:
        """Add a column in [0, upper] and return its index."""
        self.names.append(name)
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.cost) - 1

    def row(
        self,
        name: str,
        terms: Iterable[tuple[int, float]],
        lower: float,
        upper: float,
        columns: Sequence[int] = (),
        factors: Sequence[float] = (),
    ) -> None:
        """Add lower <= sum of terms, and of `columns` with their `factors`, <= upper.

        Columns may repeat in `terms`. Those of `columns` appear once, not in `terms`, and with factors other than 0.
        """
        merged: dict[int, float] = {}
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        merged = {c: a for c, a in merged.items() if a}
        if not merged and not columns:
            if lower > 1e-9 or upper < -1e-9:
                self.impossible[name] = max(lower, -upper)
            return
        self.index.extend(columns)
        self.index.extend(merged)
        self.value.extend(factors)
        self.value.extend(merged.values())
        self.row_start.append(len(self.index))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_names.append(name)

    @property
    def columns(self) -> int:
        return len(self.cost)

    @property
    def rows(self) -> int:
        return len(self.row_lower)


@dataclass(slots=True)
class SolverRun:
    """The result of one run of HiGHS, in the model's own units."""

    status: SolverStatus
    objective: float
    bound: float
    values: Vector | None
    seconds: float
    reduced_costs: Vector | None = None
    """Cost of moving each column from its bound, in a relaxed run."""
    iterations: int = 0
    """Iterations of the simplex method in total."""


_OPTIONS: dict[str, bool | int] = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_heuristic_run_feasibility_jump": False,
}
"""Options of HiGHS.

Feasibility jumps took 3 of the 5 seconds that a large step's joint model has, for solutions that were 24 % costlier
than those that rounding finds at once.
"""

_SUB_MODELS = ("rins", "rens", "root_reduced_cost")
"""Heuristics of HiGHS that solve a smaller model (options `mip_heuristic_run_*`)."""


class HighsSession:
    """A model loaded into HiGHS. Column bounds may be changed between runs.

    `sub_models`: HiGHS may search for solutions in smaller copies of the model, which take additional memory.
    """

    def __init__(self, model: LinearModel, *, relaxed: bool = False, sub_models: bool = True) -> None:
        self.model = model
        solver: Any = highspy.Highs  # its stub leaves the constructor untyped
        self.highs = solver()
        for option, value in _OPTIONS.items():
            self.highs.setOptionValue(option, value)
        for heuristic in _SUB_MODELS if not sub_models else ():
            self.highs.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
        self.relaxed = relaxed
        self._load()

    def _load(self) -> None:
        model, lp = self.model, highspy.HighsLp()
        lp.num_col_, lp.num_row_ = model.columns, model.rows
        lp.offset_ = model.offset
        lp.col_cost_ = np.array(model.cost, dtype=float)
        lp.col_lower_ = np.array(model.lower, dtype=float)
        lp.col_upper_ = np.array(model.upper, dtype=float)
        lp.row_lower_ = np.array(model.row_lower, dtype=float)
        lp.row_upper_ = np.array(model.row_upper, dtype=float)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(model.row_start, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(model.index, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(model.value, dtype=float)
        if not self.relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[flag] for flag in model.integral]
        self.highs.passModel(lp)

    def write(self, path: Path, legend: Iterable[str] = ()) -> None:
        """Write the model in the LP format, `legend` above it as comments. Raises ModelFileError.

        Names take hundreds of megabytes in a large model, so HiGHS receives them only here.
        """
        for column, name in enumerate(self.model.names):
            self.highs.passColName(column, name)
        for row, name in enumerate(self.model.row_names):
            self.highs.passRowName(row, name)
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "model.lp"
            if self.highs.writeModel(str(written)) != highspy.HighsStatus.kOk:
                raise ModelFileError("HiGHS did not write the model under its names; report this")
            try:
                with open(path, "w") as stream, open(written) as model:
                    stream.writelines(f"\\ {line}\n" for line in legend)
                    shutil.copyfileobj(model, stream)
            except OSError as error:
                raise ModelFileError(f"the model could not be written to {path}: {error}") from error

    def bound_columns(self, columns: Sequence[int], lower: Vector, upper: Vector) -> None:
        """Set the bounds of `columns`."""
        if len(columns):
            index = np.asarray(columns, dtype=np.int32)
            self.highs.changeColsBounds(len(index), index, lower.astype(float), upper.astype(float))

    def start_from(self, values: dict[int, float]) -> None:
        """Use columns as the start of the next run; HiGHS finds values for the others."""
        index = np.fromiter(values, dtype=np.int32, count=len(values))
        self.highs.setSolution(len(values), index, np.fromiter(values.values(), dtype=float, count=len(values)))

    def run(
        self,
        time_limit_s: float,
        *,
        gap: float = 1e-4,
        absolute_gap: float = 1e-7,
        progress: Progress | None = None,
        node_limit: int | None = None,
    ) -> SolverRun:
        """Solve within `time_limit_s` and return the result."""
        if self.model.impossible:
            return SolverRun(SolverStatus.INFEASIBLE, INFINITY, INFINITY, None, 0.0)
        if not self.model.columns:  # nothing to decide; HiGHS would report an empty model
            return SolverRun(SolverStatus.OPTIMAL, self.model.offset, self.model.offset, np.zeros(0), 0.0, np.zeros(0))
        highs, begin = self.highs, time.perf_counter()
        highs.setOptionValue("time_limit", max(time_limit_s, 0.01))
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("mip_abs_gap", absolute_gap)
        highs.setOptionValue("mip_max_nodes", node_limit if node_limit is not None else 2**31 - 1)
        if progress is not None and not self.relaxed:
            watch = progress
            highs.cbMipLogging.subscribe(lambda e: watch(e.data_out.mip_primal_bound, e.data_out.mip_dual_bound))
        highs.run()
        return self._read(time.perf_counter() - begin)

    def _read(self, seconds: float) -> SolverRun:
        highs, info = self.highs, self.highs.getInfo()
        state = highs.getModelStatus()
        infeasible = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
        if state in infeasible:
            return SolverRun(SolverStatus.INFEASIBLE, INFINITY, INFINITY, None, seconds)
        optimal = state == highspy.HighsModelStatus.kOptimal
        found = info.primal_solution_status == 2
        values = np.array(highs.getSolution().col_value) if found else None
        objective = float(info.objective_function_value) if found else INFINITY
        relaxed_bound = objective if optimal else -INFINITY
        bound = relaxed_bound if self.relaxed else float(info.mip_dual_bound)
        status = SolverStatus.OPTIMAL if optimal else SolverStatus.FEASIBLE if found else SolverStatus.NOTHING
        duals = np.array(highs.getSolution().col_dual) if self.relaxed and optimal else None
        return SolverRun(status, objective, bound, values, seconds, duals, max(int(info.simplex_iteration_count), 0))
