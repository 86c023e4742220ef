"""`show`, as its command prints it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main

Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return what runs `show` in a folder: its exit code, what it printed and what it said on standard error."""

    def shown(folder: Path, *words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        return main(["show", *words]), *capsys.readouterr()

    return shown


@pytest.mark.process
def test_show(planned: tuple[Path, dict[str, Any]], show: Show) -> None:
    facts = json.loads(show(planned[0], "job.port", "--json")[1])
    assert facts["planned_peak_bytes"] == planned[1]["planned_peak_bytes"]
    code, shown, _ = show(planned[0], "job.port")
    assert code == 0 and "planned peak" in shown and "budget" in shown
    words = " ".join(shown.replace("│", " ").split())
    assert "training 22:00 to 07:00" in words and "20.0 MiB written per step" in words and "threads 1" in words
    assert facts["recordings"]["count"] == 3 and "3 times, varying the rows of the batch" in words
    assert facts["compared_steps"] == 2 and facts["compared_tensors"] > 0 and "equal to the bit" in words
    assert (facts["medium"], facts["endurance_bytes"], facts["flash_lasts_steps"]) == ("SD card", 19.2e12, None)
    code, _, said = show(planned[0], "job.port", "--plan", "5")
    assert code == 2 and "no plan 5" in said and said.count("\n") == 1


@pytest.mark.slow
def test_show_says_what_is_packed_where_it_waits_and_that_pruning_changes_the_numbers(
    tmp_path: Path, show: Show
) -> None:
    from port_planner.ir.bundle.pruning_schedule import Pruning
    from port_planner.ir.graph import StepGraph
    from port_planner.ir.lowering.packables import packables
    from port_planner.ir.plan import Action, Decision, Plan
    from tests.agent.exactness import packing_costs
    from tests.agent.jobs_small import make_job, write_job

    def packs(graph: StepGraph, _: int) -> Plan:
        found = [p for p in packables(graph) if p.codec.value in ("bits", "bitmap", "pair")]
        gaps = [(p, next(u for u in graph.uses[p.storage] if u > p.after)) for p in found]
        actions = (Action.PACK, Action.PACK_PAGE)
        return Plan(tuple(Decision(p.storage, p.after, b, actions[k % 2]) for k, (p, b) in enumerate(gaps)))

    job = make_job()
    job.pruning = Pruning(0.8, end=20)
    write_job(tmp_path / "job.port", job, plan=packs, packings=packing_costs)
    facts = json.loads(show(tmp_path, "job.port", "--plan", "1", "--json")[1])
    places = {one["medium"] for one in facts["packings"]}
    assert places == {None, "card"} and facts["packed"] and facts["packed_and_paged"]
    assert all(one["packed_bytes"] and one["seconds"] for one in facts["packings"])
    assert facts["pruning"]["sparsity"] == 0.8
    words = " ".join(show(tmp_path, "job.port", "--plan", "1")[1].replace("│", " ").split())
    assert "waits in" in words and " card " in words and " RAM " in words and "bitmap" in words
    assert "80% of each weight matrix set to zero by update 20; the numbers differ from plain PyTorch's" in words


@pytest.mark.slow
@pytest.mark.parametrize("reordered", [False, True])
def test_show_says_what_runs_in_tiles_and_marks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show, *, reordered: bool
) -> None:
    from port_planner import make_bundle
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.ir.bundle.manifest import SUMMED_FORMAT, TILES_FORMAT
    from port_planner.ir.graph import StepGraph, Tile
    from tests.agent.jobs_small import make_job, write_job

    prepare = make_bundle.prepare

    def marked(graph: StepGraph) -> StepGraph:
        what = "relu to mm (2 operators) along dimension 0 of [8, 4]"
        tiles = [Tile(0, what, k, 2, reordered=reordered and k == 1) for k in range(2)]
        return replace(
            graph, ops=tuple(replace(op, tile=tiles[i // 2]) if i < 4 else op for i, op in enumerate(graph.ops))
        )

    def captured(*arguments: Any, **options: Any) -> make_bundle.CapturedJob:
        found = prepare(*arguments, **options)
        allowed = ("operators that are in no table",) if reordered else ()
        graphs = {name: marked(graph) for name, graph in found.graphs.items()}
        return replace(found, graphs=graphs, reordered=allowed)

    monkeypatch.setattr(make_bundle, "prepare", captured)
    write_job(tmp_path / "job.port", make_job(), seeds=(0,), compared=0)
    assert Bundle(tmp_path / "job.port").manifest.format == (SUMMED_FORMAT if reordered else TILES_FORMAT)
    _, shown, said = show(tmp_path, "job.port", "--html", "plan.html")
    words = " ".join(shown.replace("│", " ").split())
    assert "in tiles relu to mm (2 operators) along dimension 0 of [8, 4] in 2 tiles" in words, said
    assert ("in 2 tiles, summed in another order" in words) is reordered
    assert (
        "1 chain of operators sums over its tiles, so last digits differ from plain PyTorch's" in words
    ) is reordered
    page = (tmp_path / "plan.html").read_text()
    assert "operators in tiles" in page and "along dimension 0 of [8, 4]: tile 2 of 2" in page and "1 chain" in page
    assert ("tile 2 of 2, summed in another order" in page) is reordered
