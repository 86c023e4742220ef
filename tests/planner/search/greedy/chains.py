"""A step small enough to know by heart, for the tests of the greedy search's parts."""

from port_planner.problem.problem import Paging, Problem, Rematerialization, Semantics, Stage, Tensor

INPUT, HIDDEN, OUTPUT, WEIGHT = range(4)
"""Tensors of `chain`."""
PAGING = Paging(0, seconds_out=2.0, seconds_in=1.0, joules_out=5.0, joules_in=3.0)


def chain(
    ram_bytes: int | None = None,
    *,
    deadline_s: float | None = None,
    semantics: Semantics = Semantics.POET,
    write_limit_bytes: float | None = None,
) -> Problem:
    """Return six stages of a second and a joule: input -> hidden -> output forward, output <- hidden backward.

    The input (10 B) is used at 0, 1 and 5 and cannot be computed again; the hidden tensor (20 B) is born at 1
    and used at 2 and 4; the output (40 B) lives from 2 to 3; the weight (80 B, persistent) is read at 1 and
    written at 4. Its gaps are, in this order: input 1-5, hidden 2-4, the hidden's and output's dead ones,
    weight 1-4 and 4-7 (around the end).
    """
    of_hidden = Rematerialization(1.0, 1.0, ((INPUT, 0),), workspace_bytes=2)
    of_output = Rematerialization(1.0, 1.0, ((HIDDEN, 0),))
    return Problem(
        tuple(Stage(f"s{i}", 1.0, 1.0) for i in range(6)),
        (
            Tensor("input", 10, (0, 1, 5), (0,), paging=(PAGING,)),
            Tensor("hidden", 20, (1, 2, 4), (1,), rematerializations=(of_hidden,), paging=(PAGING,)),
            Tensor("output", 40, (2, 3), (2,), rematerializations=(of_output,)),
            Tensor("weight", 80, (1, 4), (4,), persistent=True, paging=(PAGING,)),
        ),
        ram_bytes,
        deadline_s,
        semantics,
        static_watts=0.5,
        write_limit_bytes=write_limit_bytes,
    )


def gap_of(problem: Problem, tensor: int, after: int) -> int:
    """Return the gap of a tensor that begins behind a stage."""
    return next(g for g in problem.gaps_of[tensor] if problem.gaps[g].after == after)
