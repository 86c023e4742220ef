from pathlib import Path

from port_planner.ir.graph import Phase, Role
from port_planner.profiling.cpu_cache import LARGEST_CACHE_BYTES, UNKNOWN_CACHE_BYTES, cold_operands, last_level_bytes
from tests.planner.steps import tiny_step


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(("32K\n", "512K\n", "2048K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_bytes(tmp_path) == 2 << 20


def test_a_server_cache_is_not_taken_whole_and_a_missing_one_is_guessed(tmp_path: Path) -> None:
    assert last_level_bytes(tmp_path) == UNKNOWN_CACHE_BYTES
    (tmp_path / "index3").mkdir()
    (tmp_path / "index3" / "size").write_text("327680K\n")
    assert last_level_bytes(tmp_path) == LARGEST_CACHE_BYTES


def test_first_uses_are_cold_and_the_rest_depends_on_the_cache() -> None:
    graph = tiny_step().graphs["step"]
    everything = sum(s.nbytes for s in graph.storages) * len(graph.ops)
    roomy, none = cold_operands(graph, everything), cold_operands(graph, 0)
    seen: set[int] = set()
    for reads, cold, created in zip(graph.reads, roomy, graph.creates, strict=True):
        assert cold == {s for s in reads if s not in seen}
        seen |= {*reads, *created}
    assert all(warm <= lost for warm, lost in zip(roomy, none, strict=True))


def test_an_update_finds_its_moments_cold_and_its_gradient_warm() -> None:
    graph = tiny_step().graphs["step"]
    cold = cold_operands(graph, 8 << 10)
    updates = [i for i, op in enumerate(graph.ops) if op.phase is Phase.UPDATE]
    roles = {graph.storages[s].role for i in updates for s in cold[i]}
    assert Role.STATE in roles
    assert any(set(graph.reads[i]) - cold[i] for i in updates)
