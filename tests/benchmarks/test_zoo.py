"""The zoo judges what it is shown; a seeded sample of it, every feature and random programs as long tests."""

import faulthandler
import io
import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.follow_zoo import bundles, features, operators, programs
from benchmarks.follow_zoo.bundles import judge_bundle
from benchmarks.follow_zoo.children import Case, Judged, run_in_children
from benchmarks.follow_zoo.command_line import LENGTHS, SCRIPT, CommandCase
from benchmarks.follow_zoo.compare import ALL_SETTINGS, SETTINGS, WRONG, Outcome, Verdict, digest, first_difference
from benchmarks.follow_zoo.shrink import WIDTH, Reach, shrink
from benchmarks.follow_zoo.table import Results, counts, markdown
from benchmarks.zoo import RESULTS
from port_planner.job import TrainingJob

pytestmark = pytest.mark.process

SAMPLE = 40
PROGRAMS = 200
JOBS = 60
BY_COMMANDS = 8


def _judged(name: str, program: Any) -> Outcome:
    return next(run_in_children([Case(name, program, SETTINGS)], jobs=1, timeout_s=60))


def test_equal_program() -> None:
    outcome = _judged("equal", lambda: torch.randn(64, 64) @ torch.randn(64, 64))
    assert (outcome.verdict, outcome.settings) == (Verdict.EQUAL, SETTINGS)


def test_program_that_differs_from_itself_is_not_eligible() -> None:
    outcome = _judged("random", lambda: os.urandom(8))
    assert outcome.verdict is Verdict.NOT_ELIGIBLE
    assert "differs from itself" in outcome.detail


def test_program_that_raises_plainly_is_not_eligible() -> None:
    assert "ZeroDivisionError" in _judged("raises", lambda: 1 // 0).detail


def _abort() -> None:
    """End as a failed assertion of C does; pytest's handler, which a child has too, would write
    all stacks to the terminal.
    """
    faulthandler.disable()
    os.abort()


def test_difference_crash_and_end_under_a_budget_are_found() -> None:
    def following(then: Any) -> Any:
        calls = itertools.count()
        return lambda: then() if next(calls) > 1 else 0

    assert _judged("differs", following(lambda: 1)).verdict is Verdict.DIFFERS
    assert _judged("raises", following(lambda: [][0])).verdict is Verdict.FAILED
    assert _judged("aborts", following(_abort)).verdict is Verdict.KILLED


def test_digest_tells_every_bit() -> None:
    one = {"a": torch.tensor([0.0]), "b": [1.5, "x", None]}
    assert first_difference(digest(one), digest({"a": torch.tensor([0.0]), "b": [1.5, "x", None]})) == ""
    assert "/a" in first_difference(digest(one), digest({"a": torch.tensor([-0.0]), "b": [1.5, "x", None]}))
    assert "/b/0" in first_difference(digest(one), digest({"a": torch.tensor([0.0]), "b": [-1.5, "x", None]}))


def test_shrink_keeps_names_and_reaches_inside() -> None:
    fields = {"hidden_size": 4096, "text": {"vocab_size": 32000, "eos_token_id": 31999}, "dropout": 0.0, "flag": True}
    small = shrink(fields, Reach())
    assert small["hidden_size"] == WIDTH
    assert small["text"]["eos_token_id"] < small["text"]["vocab_size"]
    assert (small["dropout"], small["flag"]) == (0.1, True)


def test_results_go_on_where_they_ended(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "zoo.jsonl")
    results.add(Outcome("b", Verdict.FAILED, "x | y", "4K"))
    results.add(Outcome("a", Verdict.EQUAL, settings=("4K",)))
    results.add(Outcome("b", Verdict.EQUAL))
    again = Results.read(tmp_path / "zoo.jsonl")
    again.compact()
    assert [o.verdict for o in again.outcomes.values()] == [Verdict.EQUAL, Verdict.EQUAL]
    assert len((tmp_path / "zoo.jsonl").read_text().splitlines()) == 2
    assert counts(again.outcomes.values()) == "2 eligible: 2 equal, 0 wrong; 0 not eligible"
    assert "| a | 4K |" in markdown("t", "n", again.outcomes.values())


def _job(noise: bool) -> TrainingJob:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [torch.randn(12, 4), torch.randint(0, 3, (12,))]

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        return loss * float(np.random.rand()) if noise else loss

    return TrainingJob(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), data, 4)


def test_a_job_is_equal_or_refused() -> None:
    equal, refused = (judge_bundle("job", partial(_job, noise), lambda at: None) for noise in (False, True))
    assert (equal.verdict, equal.settings) == (Verdict.EQUAL, ("ample", "half")), equal.detail
    assert refused.verdict is Verdict.REFUSED
    assert "numpy.random" in refused.detail
    assert counts([equal, refused]) == "2 eligible: 1 equal, 0 wrong, 1 refused; 0 not eligible"


def test_a_change_after_the_steps_that_plan_compares_is_seen_as_plan_sees_it() -> None:
    def make() -> TrainingJob:
        model, calls = nn.Linear(4, 3), io.StringIO()
        data = [torch.randn(12, 4), torch.randint(0, 3, (12,))]

        def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            calls.write("x")
            return functional.cross_entropy(model(x), y) * (0.5 if calls.tell() == 37 else 1.0)

        return TrainingJob(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), data, 4)

    outcome = judge_bundle("late", make, lambda at: None, bundles.AS_REFEREED)
    assert outcome.verdict is Verdict.REFUSED, outcome.detail
    assert outcome.detail.startswith("update 37: test_zoo.py:")


@pytest.mark.long
def test_sample_of_bundles() -> None:
    pytest.importorskip("transformers")
    chosen = random.Random(28).sample(list(bundles.cases()), SAMPLE)
    outcomes = list(run_in_children(chosen, jobs=1, timeout_s=600))
    assert [o for o in outcomes if o.verdict in WRONG] == []
    known = Results.read(RESULTS / "bundles.jsonl").outcomes
    eligible = [o for o in known.values() if o.verdict is not Verdict.NOT_ELIGIBLE]
    assert sum(o.verdict is Verdict.EQUAL for o in eligible) >= 0.95 * len(eligible)
    promised = {name for name, outcome in known.items() if outcome.verdict is Verdict.EQUAL}
    assert [o for o in outcomes if o.name in promised and o.verdict is not Verdict.EQUAL] == []


@pytest.mark.long
def test_sample_of_operators() -> None:
    """Under budgets and as jobs; what the tables call equal stays so."""
    kinds: dict[str, Iterator[Judged]] = {"operators": operators.cases(), "operator_jobs": operators.job_cases()}
    for kind, cases in kinds.items():
        chosen = random.Random(28).sample(list(cases), SAMPLE)
        known = Results.read(RESULTS / f"{kind}.jsonl").outcomes
        outcomes = list(run_in_children(chosen, jobs=1, timeout_s=600))
        assert [o for o in outcomes if o.verdict in WRONG or o.verdict is not known[o.name].verdict] == []


@pytest.mark.long
def test_random_jobs_are_equal_or_refused() -> None:
    outcomes = list(run_in_children(bundles.random_cases(JOBS, 1000), jobs=1, timeout_s=600))
    assert [o for o in outcomes if o.verdict in WRONG] == []
    assert sum(o.verdict is Verdict.EQUAL for o in outcomes) >= JOBS // 20


@pytest.mark.long
def test_jobs_of_strangers_kinds_are_equal_or_refused() -> None:
    cases = list(bundles.stranger_cases())
    assert len(cases) >= 150
    outcomes = list(run_in_children(random.Random(28).sample(cases, SAMPLE), jobs=1, timeout_s=600))
    assert [o for o in outcomes if o.verdict in WRONG] == []


@pytest.mark.long
def test_commands_judge_jobs() -> None:
    """A sample of strangers' and of random jobs; what counts its steps is among it."""
    strangers = random.Random(28).sample([c.name for c in bundles.stranger_cases()], BY_COMMANDS)
    cases = [CommandCase(name, *LENGTHS["stranger_jobs"]) for name in (*strangers, "state/weight_by_the_step")]
    cases += [CommandCase(f"job/{seed}", *LENGTHS["jobs"]) for seed in range(BY_COMMANDS)]
    outcomes = list(run_in_children(cases, jobs=1, timeout_s=600, on_device=True))
    assert [o for o in outcomes if o.verdict in WRONG] == []
    assert Verdict.EQUAL in {o.verdict for o in outcomes}


@pytest.mark.long
def test_commands_tell_a_job_that_differs() -> None:
    """The judge finds a job whose script gives the benchmark's loop a different loss from the agent's."""
    script = SCRIPT.format(name="losses/focal").replace("    return begun", "    job = begun") + OTHER
    assert CommandCase("other", script=script).judged(lambda at: None).verdict is Verdict.DIFFERS


OTHER = """    import sys
    if sys.argv[0].endswith("plain_job.py"):
        loss = job.loss_fn
        job.loss_fn = lambda *parts: loss(*parts) * 0.5
    return job
"""


@pytest.mark.long
def test_sample_of_the_zoo() -> None:
    pytest.importorskip("transformers")
    from benchmarks.follow_zoo import transformers_models

    chosen = random.Random(27).sample(list(transformers_models.cases()), SAMPLE)
    outcomes = list(run_in_children(chosen, jobs=1, timeout_s=600))
    assert [o for o in outcomes if o.verdict in WRONG] == []


@pytest.mark.long
def test_all_features() -> None:
    cases = [Case(n, p, ALL_SETTINGS) for n, p in features.registered().items() if n not in features.KNOWN_WRONG]
    assert [o for o in run_in_children(cases, jobs=1, timeout_s=300) if o.verdict in WRONG] == []


@pytest.mark.long
def test_random_programs() -> None:
    cases = [Case(f"program/{seed}", programs.program(seed), ALL_SETTINGS) for seed in range(PROGRAMS)]
    assert [o for o in run_in_children(cases, jobs=1, timeout_s=300) if o.verdict in WRONG] == []
