"""Cluster files: what is read, and that every problem is named with its path, all at once."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.refusals import refusing

from pollux.core import Cluster, FrozenMap, Node, NodeDrained, NodeJoined, NodeLost
from pollux.errors import InvalidDocument, InvalidSpec
from pollux.simulator.cluster_file import ClusterFile, NodeChange, read_cluster
from pollux.simulator.documents import MAX_LISTED

FULL = """
[[nodes]]
name = "big"
count = 2
gpus = 8
gpu_type = "a100"
rack = "a"

[[nodes]]
name = "small"
gpus = 4
labels = { rack = "b", zone = "west" }

[[nodes]]
name = "spare"
gpus = 4
present = false

[[changes]]
at_s = 7200
join = "big-0"

[[changes]]
at_s = 3600
lose = "big-0"

[[changes]]
at_s = 3600.5
drain = "small"

[[changes]]
at_s = 3600
join = "spare"
"""
ONE = '[[nodes]]\nname = "n"\ngpus = 4\n'


@pytest.fixture
def read(tmp_path):
    def read(text: str, suffix: str = ".toml") -> ClusterFile:
        path = tmp_path / f"cluster{suffix}"
        path.write_text(text, encoding="utf-8")
        return read_cluster(path, "t4")

    return read


@pytest.fixture
def refused(read):
    return refusing(read, "cluster", "cluster")


class TestReading:
    def test_nodes_and_changes_are_read(self, read):
        big = [Node(f"big-{i}", 8, "a100", FrozenMap({"rack": "a"})) for i in range(2)]
        small = Node("small", 4, "t4", FrozenMap({"rack": "b", "zone": "west"}))
        spare = Node("spare", 4, "t4")
        assert read(FULL) == ClusterFile(
            Cluster.of(*big, small),
            (
                NodeChange(3600.0, NodeLost("big-0")),
                NodeChange(3600.0, NodeJoined(spare)),
                NodeChange(3600.5, NodeDrained("small")),
                NodeChange(7200.0, NodeJoined(big[0])),
            ),
        )

    def test_json_says_the_same(self, read):
        nodes = [
            {"name": "big", "count": 2, "gpus": 8, "gpu_type": "a100", "rack": "a"},
            {"name": "small", "gpus": 4, "labels": {"rack": "b", "zone": "west"}},
            {"name": "spare", "gpus": 4, "present": False},
        ]
        changes = [
            {"at_s": 7200, "join": "big-0"},
            {"at_s": 3600, "lose": "big-0"},
            {"at_s": 3600.5, "drain": "small"},
            {"at_s": 3600, "join": "spare"},
        ]
        assert read(json.dumps({"nodes": nodes, "changes": changes}), ".json") == read(FULL)
        assert read(FULL, ".TOML") == read(FULL)

    def test_names_of_many_nodes_sort_as_their_numbers(self, read):
        cluster = read('[[nodes]]\nname = "n"\ncount = 11\ngpus = 1\n').cluster
        assert [node.id for node in cluster] == [f"n-{i:02}" for i in range(11)]

    def test_one_node_keeps_its_name(self, read):
        assert list(read('[[nodes]]\nname = "n"\ncount = 1\ngpus = 1\n').cluster.nodes) == ["n"]

    def test_a_drained_node_may_come_back_or_be_lost(self, read):
        changes = '[[changes]]\nat_s = 1\ndrain = "n"\n[[changes]]\nat_s = 2\njoin = "n"\n'
        changes += '[[changes]]\nat_s = 3\ndrain = "n"\n[[changes]]\nat_s = 4\nlose = "n"\n'
        assert [change.node for change in read(ONE + changes).changes] == ["n"] * 4

    def test_all_nodes_may_join_later(self, read):
        found = read(ONE + 'present = false\n[[changes]]\nat_s = 1\njoin = "n"\n')
        assert list(found.cluster) == []
        assert found.changes == (NodeChange(1.0, NodeJoined(Node("n", 4, "t4"))),)

    def test_the_largest_cluster_is_that_of_the_most_gpus_at_once(self, read):
        assert read(ONE).largest == read(ONE).cluster
        assert read(FULL).largest.num_gpus == 20
        assert sorted(read(FULL).largest.nodes) == ["big-0", "big-1", "small"]
        later = read(ONE + '[[nodes]]\nname = "m"\ngpus = 2\npresent = false\n[[changes]]\nat_s = 1\njoin = "m"\n')
        assert later.largest.num_gpus == 6
        drained = read(ONE + '[[changes]]\nat_s = 1\ndrain = "n"\n')
        assert drained.largest.num_gpus == 4
        assert drained.changes[0].applied_to(drained.cluster).num_gpus == 0


class TestRefusing:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "nodes: the file has none; add [[nodes]]"),
            ("nodes = []", "nodes: the file has none"),
            ("nodes = 3", "nodes = 3: must be an array of tables; write [[nodes]]"),
            ('[nodes]\nname = "n"', "must be an array of tables"),
            ("nodes = [1]", "nodes[0] = 1: must be a table"),
            ("[[nodes]]\ngpus = 4", "nodes[0].name: is missing"),
            ('[[nodes]]\nname = ""\ngpus = 4', "nodes[0].name = '': must be text"),
            ('[[nodes]]\nname = " n"\ngpus = 4', "nodes[0].name = ' n': must be text; give one line"),
            ('[[nodes]]\nname = "a\\nb"\ngpus = 4', "nodes[0].name = 'a\\nb': must be text"),
            ("[[nodes]]\nname = 3\ngpus = 4", "nodes[0].name = 3: must be text"),
            ('[[nodes]]\nname = "n"', "nodes[0].gpus: is missing; give a whole number"),
            ('[[nodes]]\nname = "n"\ngpus = 0', "nodes[0].gpus = 0: must be a whole number; give 1 to"),
            ('[[nodes]]\nname = "n"\ngpus = 4.5', "nodes[0].gpus = 4.5: must be a whole number"),
            ('[[nodes]]\nname = "n"\ngpus = "4"', "nodes[0].gpus = '4': must be a whole number"),
            ('[[nodes]]\nname = "n"\ngpus = true', "nodes[0].gpus = true: must be a whole number"),
            (ONE + "count = 0", "nodes[0].count = 0: must be a whole number"),
            (ONE + "count = 1000000000", "nodes[0].count = 1000000000: must be a whole number; give 1 to 100000"),
            (ONE + 'count = 60000\n[[nodes]]\nname = "m"\ngpus = 1\ncount = 60000', "makes more than 100000 nodes"),
            (ONE + "gpu_type = 4", "nodes[0].gpu_type = 4: must be text"),
            (ONE + "rack = 1", "nodes[0].rack = 1: must be text"),
            (ONE + 'labels = "x"', "nodes[0].labels = 'x': must be a table"),
            (ONE + "labels = { zone = 1 }", "nodes[0].labels.zone = 1: must be text"),
            (ONE + 'rack = "a"\nlabels = { rack = "b" }', "nodes[0].labels.rack = 'b': nodes[0].rack says it already"),
            (ONE + 'present = "no"', "nodes[0].present = 'no': must be true or false"),
            (ONE + "gpu = 4", "nodes[0].gpu: unknown key; Did you mean 'gpus'? Known: count, gpu_type, gpus"),
            ("node = 1\n" + ONE, "  node: unknown key; Did you mean 'nodes'? Known: changes, nodes"),
            (ONE + ONE, "nodes[1].name = 'n': nodes[0] has a node 'n' too; give each node a name of its own"),
            (ONE + "present = false", "nodes: none is ever present"),
            ("changes = 1\n" + ONE, "changes = 1: must be an array of tables"),
            (ONE + '[[changes]]\nlose = "n"', "changes[0].at_s: is missing; give seconds"),
            (ONE + '[[changes]]\nat_s = -1\nlose = "n"', "changes[0].at_s = -1: must be finite and not negative"),
            (ONE + '[[changes]]\nat_s = nan\nlose = "n"', "changes[0].at_s = nan: must be finite"),
            (ONE + '[[changes]]\nat_s = inf\nlose = "n"', "changes[0].at_s = inf: must be finite"),
            (ONE + f'[[changes]]\nat_s = {"9" * 400}\nlose = "n"', "must be finite"),
            (ONE + '[[changes]]\nat_s = true\nlose = "n"', "changes[0].at_s = true: must be a number"),
            (ONE + '[[changes]]\nat_s = 1979-05-27\nlose = "n"', "must be a number"),
            (ONE + "[[changes]]\nat_s = 1", "changes[0]: says not what happens; give one of lose, join, drain"),
            (ONE + '[[changes]]\nat_s = 1\nlose = "n"\ndrain = "n"', "changes[0]: says lose and drain; give one"),
            (ONE + '[[changes]]\nat_s = 1\nloose = "n"', "changes[0].loose: unknown key; Did you mean 'lose'?"),
            (ONE + "[[changes]]\nat_s = 1\nlose = 3", "changes[0].lose = 3: must be text"),
            (ONE + '[[changes]]\nat_s = 1\nlose = "m"', "changes[0].lose = 'm': no such node; Known: n"),
            (ONE + '[[changes]]\nat_s = 1\njoin = "n"', "changes[0].join = 'n': the node is there at 1 s"),
            (
                ONE + '[[changes]]\nat_s = 2\nlose = "n"\n[[changes]]\nat_s = 1\nlose = "n"',
                "changes[0].lose = 'n': the node is not there at 2 s",
            ),
            (
                ONE + 'present = false\n[[changes]]\nat_s = 1\ndrain = "n"',
                "changes[0].drain = 'n': the node is not there at 1 s",
            ),
            (
                ONE + '[[changes]]\nat_s = 1\ndrain = "n"\n[[changes]]\nat_s = 1\ndrain = "n"',
                "changes[1].drain = 'n': the node is drained already at 1 s",
            ),
        ],
    )
    def test_a_problem_is_named_with_its_path_value_and_fix(self, refused, text, expected):
        message = refused(text)
        assert expected in message
        assert "docs/workloads.md" in message

    def test_all_problems_come_in_one_error(self, refused):
        message = refused(
            '[[nodes]]\nname = "a"\ngpus = 0\nram = 3\n[[nodes]]\nname = "b"\ngpus = 4\n'
            '[[changes]]\nat_s = -1\nlose = "c"\n[[changes]]\nat_s = 3\njoin = "b"\n[[changes]]\nat_s = 3\nlose = "a"\n'
        )
        assert "5 problems:" in message
        for path in ("nodes[0].gpus", "nodes[0].ram", "changes[0].at_s", "changes[0].lose", "changes[1].join"):
            assert path in message

    def test_names_that_could_not_be_read_are_not_missed_in_the_changes(self, refused):
        message = refused('[[nodes]]\nname = 3\ngpus = 4\n[[changes]]\nat_s = 1\nlose = "n"')
        assert "1 problem:" in message

    def test_the_name_of_a_group_leads_to_its_nodes(self, refused):
        message = refused('[[nodes]]\nname = "n"\ncount = 2\ngpus = 4\n[[changes]]\nat_s = 1\nlose = "n"')
        assert "Known: n-0, n-1" in message

    def test_a_group_may_not_take_the_name_of_another_node(self, refused):
        message = refused('[[nodes]]\nname = "n-1"\ngpus = 4\n[[nodes]]\nname = "n"\ncount = 2\ngpus = 4')
        assert "nodes[1].name = 'n': nodes[0] has a node 'n-1' too" in message

    def test_a_long_list_is_cut_and_counted(self, refused):
        nodes = "".join(f'[[nodes]]\nname = "n{i}"\n' for i in range(25))
        message = refused(nodes)
        assert message.count("is missing") == MAX_LISTED
        assert "… and 5 more" in message

    @pytest.mark.parametrize(
        ("text", "suffix", "expected"),
        [
            (ONE, ".yaml", "neither in .toml nor in .json"),
            ("[[nodes]", ".toml", "is no TOML: "),
            ("a = 1\na = 2", ".toml", "is no TOML: "),
            ("{", ".json", "is no JSON: Expecting property name"),
            ("[]", ".json", "holds [] where an object belongs"),
            ('{"nodes": [], "nodes": []}', ".json", "the key 'nodes' occurs twice"),
            (f'{{"nodes": {"9" * 5000}}}', ".json", "is no JSON: "),
            ("[" * 100_000, ".json", "nested too deeply"),
        ],
    )
    def test_what_is_no_document_is_refused(self, refused, text, suffix, expected):
        assert expected in refused(text, suffix)

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path):
        with pytest.raises(InvalidDocument, match="cannot be read"):
            read_cluster(tmp_path / "nowhere.toml", "t4")
        (tmp_path / "nul.toml").write_bytes(b"a = 1\n\0")
        with pytest.raises(InvalidDocument, match="line 2 holds a NUL byte"):
            read_cluster(tmp_path / "nul.toml", "t4")

    def test_the_default_type_must_be_text(self, tmp_path):
        with pytest.raises(InvalidSpec):
            read_cluster(tmp_path / "x.toml", "")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["n", "n-1", "", "m"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "rack"]), inner, max_size=2),
    max_leaves=4,
)
TABLES = st.dictionaries(
    st.sampled_from(["name", "count", "gpus", "gpu_type", "rack", "labels", "present", "x"]),
    VALUES | st.integers(1, 3),
)
CHANGES = st.dictionaries(st.sampled_from(["at_s", "lose", "join", "drain", "x"]), VALUES)


@given(nodes=st.lists(TABLES, max_size=3) | VALUES, changes=st.lists(CHANGES, max_size=3) | VALUES)
def test_any_document_is_read_or_refused(tmp_path_factory, nodes, changes):
    path = tmp_path_factory.mktemp("any") / "cluster.json"
    path.write_text(json.dumps({"nodes": nodes, "changes": changes}))
    with contextlib.suppress(InvalidDocument):
        assert read_cluster(path, "t4").largest.num_gpus >= 1
