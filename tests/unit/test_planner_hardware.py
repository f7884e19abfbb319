"""Clusters and their links."""

import json
from dataclasses import fields

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.choose_degree import cluster_of
from ds_usp.planner.hardware import CLUSTERS, ORIGINS, Cluster, interpolate_curve, load_cluster
from ds_usp.planner.parallel_config import ParallelConfig
from ds_usp.planner.traffic import (
    COLLECTIVE,
    DIRECT,
    RankGroup,
    domain_traffic,
    exchange_s,
    group_of,
)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_says_where_it_is_from(name):
    assert set(CLUSTERS[name]) == {f.name for f in fields(Cluster)} - {"name"}
    assert all(origin in ORIGINS and source for _, origin, source in CLUSTERS[name].values())


def test_a_file_has_what_differs_from_a_built_in_cluster(tmp_path):
    file = tmp_path / "mine.json"
    contention = [0.2, "measured", "today"]
    file.write_text(json.dumps({"base": "h200", "memory_bytes": 1e11, "contention": contention}))
    cluster, base = load_cluster(str(file)), load_cluster("h200")
    assert (cluster.name, cluster.memory_bytes, cluster.contention) == ("mine", 1e11, 0.2)
    changed = {f.name for f in fields(Cluster) if getattr(cluster, f.name) != getattr(base, f.name)}
    assert changed == {"name", "memory_bytes", "contention"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "must be an object"),
        ({"base": "h900"}, "base 'h900' is none of a100"),
        ({"base": ["h100"]}, r"base \['h100'\] is none of a100"),
        ({"base": "h100", "version": 1, "layers": [{}]}, "unknown layers, version"),
        ({"peak_flop_per_s": 1e12}, "missing attention_efficiency"),
        ({"base": "h100", "memory_bytes": float("nan")}, "memory_bytes=nan must be a finite"),
        (
            {"base": "h100", "contention": [1, "guessed", ""]},
            "contention=.1, 'guessed'",
        ),
        ({"base": "h100", "host_bytes_per_s": 0}, "host_bytes_per_s=0 copies nothing"),
        ({"base": "h100", "gpus_per_node": 4}, "last of its levels must be the node of 4"),
        ({"base": "h100", "levels": [["node", 8, 0, 1, 1]]}, "node: port_bytes_per_s=0 must be"),
        ({"base": "h100", "levels": [["a", 3, 1, 1, 1], ["b", 8, 1, 1, 1]]}, "3 GPUs does not"),
        ({"base": "h100", "attention_efficiency": []}, "attention_efficiency needs points"),
        ({"base": "h100", "gemm_efficiency": [[9, 0.5], [2, 0.4]]}, "with sizes that ascend"),
        ({"base": "h100", "gemm_efficiency": [[256, 70]]}, "has 70: a share of the peak lies"),
    ],
)
def test_files_that_describe_no_cluster(tmp_path, content, says):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        load_cluster(str(file))


def test_clusters_that_do_not_exist(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    for given, says in (
        ("b9000", "no cluster 'b9000'; there are a100"),
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path / "broken.json"), "is not JSON"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_cluster(given)


def test_smaller_nodes_have_fewer_nics():
    eight, four = load_cluster("h100"), load_cluster("h100").with_gpus_per_node(4)
    assert (four.gpus_per_node, four.nics) == (4, 4)
    assert four.nic_bytes_per_s == eight.nic_bytes_per_s
    assert load_cluster("l20").with_gpus_per_node(2).node.gpus == 2
    with pytest.raises(ConfigError, match="must be 1 or more"):
        eight.with_gpus_per_node(0)


def test_the_cluster_of_a_machine(monkeypatch):
    """By the GPU's name as torch has it, its memory, and the ranks that a launcher has started."""
    h100 = cluster_of(None, "NVIDIA H100 80GB HBM3", 16, 7e10)
    assert (h100.name, h100.memory_bytes, h100.gpus_per_node) == ("h100", 7e10, 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    h200 = cluster_of(None, "NVIDIA H200", 16)
    assert (h200.gpus_per_node, h200.memory_bytes) == (4, load_cluster("h200").memory_bytes)
    assert cluster_of(None, "NVIDIA H200", 2).gpus_per_node == 2
    assert cluster_of(None, "", 4).name == "cpu"
    named = cluster_of("a800", "a GPU that nobody knows", 16, 7e10)
    assert (named.name, named.gpus_per_node) == ("a800", 4)
    assert named.memory_bytes == load_cluster("a800").memory_bytes
    with pytest.raises(ConfigError, match="no built-in cluster has a NVIDIA B900; there are a100"):
        cluster_of(None, "NVIDIA B900", 8)


def test_curves_are_linear_in_the_logarithm():
    curve = ((1024.0, 0.2), (4096.0, 0.6))
    assert [interpolate_curve(curve, size) for size in (1, 1024, 4096, 1e9)] == [0.2, 0.2, 0.6, 0.6]
    assert interpolate_curve(curve, 2048) == pytest.approx(0.4)


def test_groups_lie_in_the_order_of_the_ranks():
    config = ParallelConfig(tp=2, ulysses=4, ring=3, dp=5, pp=7)
    groups = {axis: group_of(config, axis) for axis in ("ulysses", "ring", "zero", "dp", "pp")}
    assert groups["ulysses"] == RankGroup(4, 2) and groups["ring"] == RankGroup(3, 8)
    assert groups["zero"] == RankGroup(60, 2) and groups["dp"] == RankGroup(5, 24)
    assert groups["pp"] == RankGroup(7, 120)


def test_what_leaves_a_domain():
    # Two groups of 8 ranks, all in one node of 8 each.
    assert domain_traffic(RankGroup(8, 1), 8, DIRECT).inside
    # 16 in a row: each rank sends 8/15 to the other node, a relay leaves it once.
    assert domain_traffic(RankGroup(16, 1), 8, DIRECT).domain == pytest.approx(8 * 8 / 15)
    assert domain_traffic(RankGroup(16, 1), 8, COLLECTIVE).domain == 1
    # Pairs across nodes: everything leaves.
    assert domain_traffic(RankGroup(2, 8), 8, COLLECTIVE).domain == 8
    assert domain_traffic(RankGroup(2, 8), 8, DIRECT).busiest == 1
    # Rings of 4 with a stride of 2, seen by pairs of GPUs: both leave each pair.
    assert domain_traffic(RankGroup(4, 2), 2, COLLECTIVE).domain == 2


@pytest.mark.parametrize(
    ("size", "stride", "uneven"),
    [(16, 2, False), (12, 2, False), (6, 2, True), (7, 2, True), (7, 4, True), (10, 4, False)],
)
def test_groups_that_straddle_nodes_get_one_nic(size, stride, uneven):
    cluster, group = load_cluster("h800"), RankGroup(size, stride)
    assert domain_traffic(group, cluster.gpus_per_node, COLLECTIVE).even is not uneven
    nics = 1 if uneven else 8 // stride
    rate = 1e9 / exchange_s(cluster, group, 1e9, COLLECTIVE, 0)
    assert rate == pytest.approx(nics * 12.5e9)


def test_nothing_is_sent_for_nothing():
    cluster = load_cluster("a100")
    assert exchange_s(cluster, RankGroup(1, 1), 1e9, DIRECT) == 0
    assert exchange_s(cluster, RankGroup(8, 1), 0, DIRECT) == 0
    assert exchange_s(cluster, RankGroup(8, 1), 1.0, DIRECT) >= 25e-6
    assert exchange_s(cluster, RankGroup(2, 8), 1.0, DIRECT) >= 30e-6
