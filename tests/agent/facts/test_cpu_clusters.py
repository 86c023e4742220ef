"""Kinds of cores of recorded boards, offline cores, and kernels that tell nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from port_agent.facts.cpu_clusters import CpuCluster, clusters_text, read_clusters
from port_agent.facts.sysfs import Tree
from tests.agent.facts.cores import PI_5, RK3399, RK3588, S922X, Kind, machine


@pytest.mark.parametrize(
    ("kinds", "text", "cores"),
    [
        (RK3588, "4 x Cortex-A76 at 2.4 GHz + 4 x Cortex-A55 at 1.8 GHz", [(4, 5, 6, 7), (0, 1, 2, 3)]),
        (RK3399, "2 x Cortex-A72 at 2.02 GHz + 4 x Cortex-A53 at 1.51 GHz", [(4, 5), (0, 1, 2, 3)]),
        (S922X, "4 x Cortex-A73 at 2.4 GHz + 2 x Cortex-A53 at 2.02 GHz", [(2, 3, 4, 5), (0, 1)]),
        (PI_5, "4 x Cortex-A76 at 2.4 GHz", [(0, 1, 2, 3)]),
        (
            [(8, None, 5000000, None), (8, None, 3800000, None)],
            "8 x core at 5 GHz + 8 x core at 3.8 GHz",
            [tuple(range(8)), tuple(range(8, 16))],
        ),
        ([(2, None, None, None)], "2 x core", [(0, 1)]),
    ],
)
def test_cores_of_one_kind_are_a_cluster_the_fastest_first(
    tmp_path: Path, kinds: Sequence[Kind], text: str, cores: list[tuple[int, ...]]
) -> None:
    tree = machine(tmp_path, kinds)
    found = read_clusters(tree)
    assert clusters_text(found) == text
    assert [cluster.cores for cluster in found] == cores
    assert tree.take_faults() == ()


def test_cores_that_are_offline_or_not_ours_do_not_count(tmp_path: Path) -> None:
    tree = machine(tmp_path, RK3588, online="0-4,7")
    assert [cluster.cores for cluster in read_clusters(tree)] == [(4, 7), (0, 1, 2, 3)]
    assert [cluster.cores for cluster in read_clusters(tree, {1, 2, 7})] == [(7,), (1, 2)]


def test_a_kernel_that_tells_nothing_and_one_that_tells_nonsense(tmp_path: Path) -> None:
    assert read_clusters(Tree(sys=tmp_path / "none")) == ()
    tree = machine(tmp_path, [(1, "what", None, 1024)])
    assert read_clusters(tree) == (CpuCluster((0,), None, None, 1024),)
    (tmp_path / "devices/system/cpu/cpu0/cpu_capacity").write_text("fast\n")
    assert read_clusters(tree) == (CpuCluster((0,), None, None, None),)
    assert tree.take_faults()[0].sensor == "cpu cores"
