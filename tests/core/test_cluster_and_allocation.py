import pytest
from hypothesis import given

from pollux.core import Allocation, Cluster, FrozenMap, Node, Shape
from pollux.errors import InvalidSpec, UnknownName

from .strategies import allocations, clusters, nodes, shapes


def racked(name, rack):
    return Node(name, 4, labels=FrozenMap({"rack": rack} if rack else {}))


@pytest.mark.parametrize(
    ("arguments", "field", "problem"),
    [
        ({"id": "", "num_gpus": 1}, "id", "must not be empty"),
        ({"id": 3, "num_gpus": 1}, "id", "must be text"),
        ({"id": "n", "num_gpus": 0}, "num_gpus", "at least 1"),
        ({"id": "n", "num_gpus": True}, "num_gpus", "whole number"),
        ({"id": "n", "num_gpus": 2.0}, "num_gpus", "whole number"),
        ({"id": "n", "num_gpus": 1, "gpu_type": ""}, "gpu_type", "must not be empty"),
        ({"id": "n", "num_gpus": 1, "labels": {"rack": "a"}}, "labels", "FrozenMap"),
        ({"id": "n", "num_gpus": 1, "labels": FrozenMap({"rack": 1})}, 'labels["rack"]', "must be text"),
        ({"id": "n", "num_gpus": 1, "schedulable": 1}, "schedulable", "true or false"),
    ],
)
def test_a_bad_node_is_refused_with_field_value_and_fix(arguments, field, problem):
    with pytest.raises(InvalidSpec, match=problem) as caught:
        Node(**arguments)
    assert caught.value.field == field
    assert caught.value.fix


def test_uniform_clusters_have_names_that_sort_as_their_numbers_do():
    cluster = Cluster.uniform(12, 4, "a100")
    assert [node.id for node in cluster] == [f"node-{i:02}" for i in range(12)]
    assert cluster.num_gpus == 48
    assert cluster.gpu_types == ("a100",)
    assert Cluster.uniform(0, 4) == Cluster()
    assert next(iter(Cluster.uniform(1, 4))).id == "node-0"


def test_only_schedulable_nodes_count_as_capacity():
    cluster = Cluster.of(Node("a", 4, "t4"), Node("b", 8, "v100", schedulable=False))
    assert cluster.num_gpus == 4
    assert cluster.gpu_types == ("t4",)
    assert cluster.capacity == {"a": 4}
    assert "b" in cluster


def test_a_cluster_refuses_names_that_occur_twice_or_differ_from_their_key():
    with pytest.raises(InvalidSpec, match="occurs twice"):
        Cluster.of(Node("a", 1), Node("a", 2))
    with pytest.raises(InvalidSpec, match="differs from its key"):
        Cluster(FrozenMap({"a": Node("b", 1)}))


@given(clusters, nodes)
def test_a_node_can_join_and_leave(cluster, node):
    joined = cluster.with_node(node)
    assert joined[node.id] == node
    assert node.id not in joined.without(node.id)
    if node.id not in cluster:
        assert joined.without(node.id) == cluster


def test_asking_for_an_unknown_node_names_those_that_exist():
    with pytest.raises(UnknownName, match="node-0, node-1"):
        Cluster.uniform(2, 1)["node-7"]
    with pytest.raises(UnknownName):
        Cluster.uniform(2, 1).without("node-7")


@pytest.mark.parametrize(
    ("sizes", "field", "problem"),
    [
        ((1, 2), "num_gpus", "fewer than num_nodes = 2"),
        ((4, 2, 3), "num_nodes", "fewer than num_racks = 3"),
        ((0,), "num_gpus", "at least 1"),
        ((1, 0), "num_nodes", "at least 1"),
        ((1, 1, 0), "num_racks", "at least 1"),
        ((True,), "num_gpus", "whole number"),
        ((float("nan"),), "num_gpus", "whole number"),
    ],
)
def test_impossible_shapes_are_refused(sizes, field, problem):
    with pytest.raises(InvalidSpec, match=problem) as caught:
        Shape(*sizes)
    assert caught.value.field == field


@given(shapes(), shapes())
def test_shapes_are_ordered_by_gpus_first(one, other):
    if one.num_gpus < other.num_gpus:
        assert one < other


def test_an_allocation_drops_zeros_and_refuses_negative_counts():
    assert Allocation.of({"a": 2, "b": 0}) == Allocation(FrozenMap({"a": 2}))
    with pytest.raises(InvalidSpec, match="at least 0") as caught:
        Allocation.of({"a": -1})
    assert caught.value.field == 'gpus["a"]'
    for bad in (False, 1.0, None):
        with pytest.raises(InvalidSpec, match="whole number"):
            Allocation.of({"a": bad})
    with pytest.raises(InvalidSpec, match=r"Allocation\.of"):
        Allocation(FrozenMap({"a": 0}))


def test_nothing_is_false_and_has_no_shape():
    assert not Allocation()
    assert Allocation().num_gpus == 0
    with pytest.raises(InvalidSpec, match="no shape"):
        Allocation().shape()


@given(allocations)
def test_the_shape_counts_gpus_and_nodes(allocation):
    if allocation:
        assert allocation.shape() == Shape(sum(allocation.gpus.values()), len(allocation.gpus))


def test_racks_come_from_the_labels_and_unlabelled_nodes_share_one():
    cluster = Cluster.of(racked("a", "r1"), racked("b", "r2"), racked("c", ""), racked("d", ""))
    assert Allocation.of({"a": 1, "b": 1}).shape(cluster) == Shape(2, 2, 2)
    assert Allocation.of({"c": 1, "d": 3}).shape(cluster) == Shape(4, 2, 1)
    assert Allocation.of({"a": 1, "c": 1, "d": 1}).shape(cluster) == Shape(3, 3, 2)
    assert Allocation.of({"a": 1, "b": 1}).shape() == Shape(2, 2, 1)
    with pytest.raises(UnknownName):
        Allocation.of({"z": 1}).shape(cluster)


@given(allocations, allocations)
def test_the_union_covers_both_and_nothing_more(one, other):
    both = one.union(other)
    assert both == other.union(one)
    for node in {*one.gpus, *other.gpus}:
        assert both.gpus[node] == max(one.gpus.get(node, 0), other.gpus.get(node, 0))


def test_a_lost_node_takes_its_gpus_along():
    assert Allocation.of({"a": 1, "b": 2}).without("b") == Allocation.of({"a": 1})
    assert Allocation.of({"a": 1}).without("b") == Allocation.of({"a": 1})
