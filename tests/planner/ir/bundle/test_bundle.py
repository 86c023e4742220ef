"""Bundles from strangers: whatever is in the file, the loader gives a job that holds or an error with its reason."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from port_planner.base.errors import PortError
from port_planner.ir.allowed_operators import OperatorError
from port_planner.ir.bundle.bundle import Bundle, read_manifest
from port_planner.ir.bundle.checksums import rows_per_block
from port_planner.ir.bundle.codec import WireError, pack_integers, pack_plan, unpack_plan
from port_planner.ir.bundle.manifest import DEVICE_FORMAT, BundleError
from port_planner.ir.graph import GraphError
from port_planner.ir.plan import Action
from port_planner.ir.program import BudgetError, PlanError
from tests.agent.jobs_small import make_job, small_bundle, write_job
from tests.planner.bundles import closed_plan, load, members, opened_plan, read_everything, rewrite, write_mutated


def test_a_good_bundle_loads_and_hashes_fit(tmp_path: Path) -> None:
    bundle = load(small_bundle())
    read_everything(bundle)
    assert read_manifest(small_bundle()) == bundle.manifest
    copy = tmp_path / "copy.port"
    rewrite(small_bundle(), copy, {})
    assert load(copy).graphs == bundle.graphs
    for choice in bundle.plans:
        for plan in choice.values():
            assert unpack_plan(msgpack.unpackb(msgpack.packb(pack_plan(plan)))) == plan


@pytest.mark.slow
def test_an_update_of_all_micro_batches_takes_their_columns_and_gives_their_losses(tmp_path: Path) -> None:
    def merged(graphs: Any) -> Any:
        first = graphs["first"]
        return {**graphs, "update": [*first[:3], first[3] * 2, first[4], [first[4]], *first[6:]]}

    def with_update(members_of: Any) -> Any:
        return {**members_of, "update": members_of["first"]}

    changes: dict[str, Any] = {
        "graphs.msgpack": merged,
        "costs.msgpack": with_update,
        "plans.msgpack": lambda plans: [with_update(plan) for plan in plans],
        "manifest.json": lambda m: {**m, "format": DEVICE_FORMAT, "graphs": [*m["graphs"], "update"]},
    }
    whole = tmp_path / "whole.port"
    rewrite(small_bundle(2), whole, changes)
    manifest = load(whole).manifest
    assert manifest.main_graph == "update" and manifest.batches_of("update") == 2 and manifest.batches_of("last") == 1
    assert manifest.format == DEVICE_FORMAT
    short = {
        **changes,
        "graphs.msgpack": lambda g: {**g, "update": [*g["first"][:5], [g["first"][4]], *g["first"][6:]]},
    }
    rewrite(small_bundle(2), whole, short)
    with pytest.raises(BundleError, match="graph update takes 2 columns of data, there are 2"):
        load(whole)
    fewer = {
        **changes,
        "graphs.msgpack": lambda g: {
            **g,
            "update": [*g["first"][:3], g["first"][3] * 2, g["first"][4], [], *g["first"][6:]],
        },
    }
    rewrite(small_bundle(2), whole, fewer)
    with pytest.raises(BundleError, match="losses for 2 batches"):
        load(whole)


# -- hostile on purpose


def _first_op(graphs: Any) -> list[Any]:
    graph = next(iter(graphs.values()))
    op: list[Any] = graph[2][0]
    return op


def _set(graphs: Any, *path: Any, value: Any) -> Any:
    target = next(iter(graphs.values()))
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return graphs


def _unknown_op(graphs: Any) -> Any:
    _first_op(graphs)[0] = "os::system"
    return graphs


def _file_op(graphs: Any) -> Any:
    _first_op(graphs)[0] = "aten::from_file"
    return graphs


def _cycle(graphs: Any) -> Any:
    graph = next(iter(graphs.values()))
    graph[2].reverse()
    return graphs


def _nested(graphs: Any) -> Any:
    deep: Any = 1
    for _ in range(30):
        deep = [deep]
    _first_op(graphs)[1] = [deep]
    return graphs


GRAPHS: dict[str, tuple[Callable[[Any], Any], type[PortError]]] = {
    "unknown operator": (_unknown_op, OperatorError),
    "operator that opens files": (_file_op, OperatorError),
    "cycle": (_cycle, GraphError),
    "nested arguments": (_nested, WireError),
    "negative size": (lambda g: _set(g, 0, 0, 0, value=-1), WireError),
    "absurd size": (lambda g: _set(g, 0, 0, 0, value=1 << 60), GraphError),
    "absurd shape": (lambda g: _set(g, 1, 0, 2, value=[1 << 40] * 8), GraphError),
    "negative shape": (lambda g: _set(g, 1, 0, 2, value=[-4]), WireError),
    "view outside of its storage": (lambda g: _set(g, 1, 0, 4, value=1 << 30), GraphError),
    "storage that does not exist": (lambda g: _set(g, 1, 0, 0, value=10**6), GraphError),
    "unknown dtype": (lambda g: _set(g, 1, 0, 1, value="object"), GraphError),
    "loss that does not exist": (lambda g: _set(g, 4, value=10**6), GraphError),
    "number as text": (lambda g: _set(g, 4, value="0"), WireError),
    "role that does not exist": (lambda g: _set(g, 0, 0, 1, value=77), WireError),
    "graph that is a number": (lambda g: dict.fromkeys(g, 5), WireError),
    "not a table": (lambda g: [1, 2], BundleError),
    "another name": (lambda g: {k + "x": v for k, v in g.items()}, BundleError),
    "no graph": (lambda g: {}, BundleError),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_hostile_graphs(what: str, tmp_path: Path) -> None:
    change, error = GRAPHS[what]
    rewrite(small_bundle(), tmp_path / "x.port", {"graphs.msgpack": change})
    with pytest.raises(error) as caught:
        load(tmp_path / "x.port")
    assert caught.value.exit_code == 2 and len(str(caught.value)) < 2000


def _plans(change: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
    def apply(choices: Any) -> Any:
        for choice in choices:
            for name, packed in choice.items():
                plan = opened_plan(packed)
                change(plan)
                choice[name] = closed_plan(plan)
        return choices

    return apply


def _packed(decisions: Any) -> Callable[[Any], Any]:
    return lambda choices: [{name: [decisions, *plan[1:]] for name, plan in c.items()} for c in choices]


PLANS: dict[str, tuple[Callable[[Any], Any], type[PortError]]] = {
    "reads of freed tensors": (_plans(lambda p: p[0].extend([3, 0, 1, int(Action.RECOMPUTE)])), PlanError),
    "over its budget": (_plans(lambda p: p[3].__setitem__(0, 10)), BudgetError),
    "order that is no permutation": (_plans(lambda p: p[1].extend([0, 0])), WireError),
    "order of a few ops": (_plans(lambda p: p.__setitem__(1, [1, 0])), PlanError),
    "order of too many ops": (_plans(lambda p: p.__setitem__(1, list(range(9999)))), PlanError),
    "slices of what does not exist": (_plans(lambda p: p.__setitem__(2, [999, 4])), PlanError),
    "decisions that are cut off": (_packed(pack_integers([9, 0, 1, 1])), WireError),
    "a claim of more decisions than memory": (_packed(pack_integers([1 << 60, 0])), WireError),
    "integers that go on and on": (_packed(zlib.compress(b"\xff" * 100)), WireError),
    "integers that unpack to gigabytes": (_packed(zlib.compress(bytes(64 << 20))), WireError),
    "integers that are no data": (_packed(b"abc"), WireError),
    "integers as text": (_packed("abc"), WireError),
    "action that does not exist": (_plans(lambda p: p[0].extend([0, 0, 1, 9])), WireError),
    "infinite seconds": (_plans(lambda p: p[3].__setitem__(2, float("inf"))), WireError),
    "NaN": (_plans(lambda p: p[3].__setitem__(2, float("nan"))), WireError),
    "no plans": (lambda c: [], BundleError),
    "plans that are a number": (lambda c: 5, PortError),
    "another graph's": (lambda c: [{"x": next(iter(choice.values()))} for choice in c], BundleError),
}


@pytest.mark.parametrize("what", PLANS)
def test_hostile_plans(what: str, tmp_path: Path) -> None:
    change, error = PLANS[what]
    rewrite(small_bundle(), tmp_path / "x.port", {"plans.msgpack": change})
    with pytest.raises(error):
        load(tmp_path / "x.port")


def _flipped(path: Path, place: int, bit: int = 0) -> Bundle:
    """Return the small bundle with one bit flipped at byte `place`."""
    data = bytearray(small_bundle().read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return Bundle(path)


def test_a_flipped_bit_is_found_where_it_is_read_and_named(tmp_path: Path) -> None:
    good = Bundle(small_bundle())
    weight, column = good.tensors["parameter/7.weight"], good.data["train/0"]
    bad = _flipped(tmp_path / "weight.port", weight.offset + weight.nbytes // 2)
    with pytest.raises(BundleError, match=r"tensor parameter/7\.weight is damaged"):
        list(bad.contents("parameter/7.weight", 1 << 20))
    assert b"".join(bad.contents("parameter/7.bias", 7)) == b"".join(good.contents("parameter/7.bias", 1 << 20))
    row_bytes = column.nbytes // column.shape[0]
    bad = _flipped(tmp_path / "row.port", column.offset + 10 * row_bytes)
    with open(bad.path, "rb") as stream:
        damaged = []
        for row in range(column.shape[0]):
            try:
                assert bad.row(stream.fileno(), "train/0", row) == good.row(stream.fileno(), "train/0", row)
            except BundleError as error:
                assert "train/0 is damaged near row" in str(error)
                damaged.append(row)
    per_block = rows_per_block(row_bytes)
    assert damaged == [row for row in range(column.shape[0]) if row // per_block == 10 // per_block]


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    good, rng = Bundle(small_bundle()), random.Random(0)
    size, refused = small_bundle().stat().st_size, 0
    for _ in range(200):
        try:
            found = _flipped(tmp_path / "x.port", rng.randrange(size), rng.randrange(8))
            read_everything(found)
        except BundleError:
            refused += 1
        else:
            assert (found.id, found.graphs, found.plans, found.costs) == (good.id, good.graphs, good.plans, good.costs)
    assert refused > 150


@pytest.mark.slow
def test_the_identity_covers_weights_data_and_how_it_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    same, again, other = make_job(), make_job(), make_job()
    with torch.no_grad():
        next(other.model.parameters())[0, 0, 0, 0] += 1
    rows = make_job()
    rows.data[0][0, 0, 0, 0] += 1
    rate = make_job()
    rate.optimizer.param_groups[0]["lr"] = 2e-2
    ids = []
    for i, job in enumerate((same, again, other, rows, rate)):
        write_job(tmp_path / f"{i}.port", job)
        ids.append(Bundle(tmp_path / f"{i}.port").id)
    assert ids[0] == ids[1] and len(set(ids)) == 4


# -- hostile by chance


def _fuzz(tmp_path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    content = members(small_bundle())
    refused = 0
    for i in range(count):
        path = tmp_path / "x.port"
        try:
            write_mutated(rng, content, path)
        except (ValueError, TypeError, AttributeError, OverflowError):
            continue  # the mutation itself made something that cannot be written
        try:
            load(path)
        except PortError as error:
            refused += 1
            assert str(error)
        except Exception as error:
            raise AssertionError(f"mutation {i} of seed {seed} ended in {type(error).__name__}: {error}") from error
    assert refused > count / 3


@pytest.mark.slow
def test_mutated_bundles_give_clean_errors(tmp_path: Path) -> None:
    _fuzz(tmp_path, 0, 150)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_ten_thousand_mutated_bundles_give_clean_errors(seed: int, tmp_path: Path) -> None:
    _fuzz(tmp_path, seed, 1000)
