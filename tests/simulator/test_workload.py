"""Workload files: what is read, what is refused, and that writing and reading are each other's inverse."""

from __future__ import annotations

import contextlib
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.refusals import refusing

from pollux.applications import load, names
from pollux.core import BatchLimits, Cluster
from pollux.errors import InvalidDocument, InvalidSpec
from pollux.simulator.cluster_file import ClusterFile, read_cluster
from pollux.simulator.documents import MAX_LISTED
from pollux.simulator.generator import BUILT_IN
from pollux.simulator.options import Options
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.settings import applied
from pollux.simulator.workload import Workload, WorkloadJob, read_workload, to_csv, write_workload

LIMITS = {"cifar10": BatchLimits(128, 4096, 32, 1024), "bert": BatchLimits(12, 384, 4, 12)}
HEADER = "name,time,application,num_replicas,batch_size\n"
GOOD = "cifar10-0,107,cifar10,6,2048\n"


@pytest.fixture
def read(tmp_path):
    def read(text: str | bytes, cluster: Cluster | None = None) -> Workload:
        path = tmp_path / "jobs.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_workload(path, LIMITS, cluster)

    return read


@pytest.fixture
def refused(read):
    return refusing(read, "workload", "jobs")


class TestReading:
    def test_rows_become_jobs(self, read):
        workload = read(HEADER + GOOD + "bert-1,110.5,bert,16,384\n")
        assert workload == Workload(
            "jobs",
            (WorkloadJob("cifar10-0", 107.0, "cifar10", 6, 2048), WorkloadJob("bert-1", 110.5, "bert", 16, 384)),
        )
        assert isinstance(workload.jobs[0].submitted_at_s, float)

    def test_jobs_are_sorted_by_time_then_by_their_order_in_the_file(self, read):
        rows = "".join(f"{name},{time},bert,1,12\n" for name, time in [("c", 5), ("z", 1), ("a", 5), ("b", 5.0)])
        assert [job.name for job in read(HEADER + rows).jobs] == ["z", "c", "a", "b"]

    def test_other_columns_other_orders_and_blank_lines_are_fine(self, read):
        text = "batch_size,user,name,num_replicas,application,time\n\n384,me,a,4,bert,3\n,,,,,\n384,,b,4,bert,4,,\n"
        assert [(job.name, job.submitted_at_s) for job in read(text).jobs] == [("a", 3.0), ("b", 4.0)]

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    def test_every_kind_of_line_end_is_read(self, read, end):
        assert len(read((HEADER + GOOD).replace("\n", end)).jobs) == 1

    def test_a_byte_order_mark_spaces_and_quotes_are_read_over(self, read):
        text = b"\xef\xbb\xbf" + b'name , time,application,num_replicas,batch_size\n  "a, b", 1 , bert , 4.0 , 3.84e2\n'
        assert read(text).jobs == (WorkloadJob("a, b", 1.0, "bert", 4, 384),)

    def test_a_batch_that_does_not_divide_is_fine(self, read):
        assert read(HEADER + "a,0,cifar10,7,1000\n").jobs[0].batch_size == 1000

    def test_accumulation_makes_room_for_a_batch_larger_than_the_memory(self, read):
        assert read(HEADER + "a,0,bert,1,384\n").jobs[0].num_gpus == 1

    def test_a_zero_has_no_sign(self, read):
        assert str(read(HEADER + "a,-0.0,bert,1,12\n").jobs[0].submitted_at_s) == "0.0"

    def test_a_job_as_large_as_the_cluster_fits(self, read):
        assert read(HEADER + GOOD, Cluster.uniform(2, 3)).jobs[0].num_gpus == 6


class TestLengths:
    """`cifar10:0.2` is a training run a fifth as long; any length that is a number above 0."""

    @pytest.fixture
    def outcome(self, tmp_path):
        def outcome(*rows: str, policy: str = "fifo", traces: Path | None = None):
            path = tmp_path / "jobs.csv"
            path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
            return simulate(Scenario(str(path), policy, ClusterFile(Cluster.uniform(2, 4, "t4")), traces))

        return outcome

    def test_a_job_takes_so_many_times_as_long(self, outcome):
        jobs = outcome("a,0,cifar10,1,128", "b,0,cifar10:0.2,1,128", "c,0,cifar10:0.20,1,128", "d,0,cifar10:2,1,128")
        whole, fifth, same, double = (job.finished_at_s - 90 for job in jobs.jobs)
        assert (fifth / whole, double / whole) == (pytest.approx(0.2, rel=0.05), pytest.approx(2.0, rel=0.05))
        assert same == fifth
        assert [job.application for job in jobs.jobs] == ["cifar10", "cifar10:0.2", "cifar10:0.20", "cifar10:2"]

    @pytest.mark.parametrize("policy", ["srtf", "optimus", "pollux"])
    def test_every_policy_and_its_oracle_know_the_length(self, outcome, policy):
        short, long = outcome("long,0,cifar10:0.3,1,128", "short,0,cifar10:0.1,1,128", policy=policy).jobs[::-1]
        assert short.jct_s < long.jct_s

    def test_a_pinned_application_is_pinned_in_every_length(self, tmp_path):
        options = applied(Options(), {"agent.pinned": ["ncf"]})
        workload = Workload("w", (WorkloadJob("a", 0.0, "ncf:2", 1, 256),))
        cluster = ClusterFile(Cluster.uniform(2, 4, "t4"))
        scenario = Scenario("w", "pollux", cluster, options=options, content=workload, histories=True)
        (history,) = (simulate(scenario).histories or {}).values()
        assert max(history.num_gpus) == 1

    @pytest.mark.parametrize(
        ("application", "expected"),
        [
            ("cifar10:0", "says no length, which is a number above 0; give cifar10, or for instance cifar10:0.2"),
            ("cifar10:-1", "says no length"),
            ("cifar10:x", "says no length"),
            ("cifar10:", "says no length"),
            ("cifar10:nan", "says no length"),
            ("cifar10:0.1:0.1", "says no length"),
            ("nope:0.1", "no such application; Known: bert, cifar10"),
            ("cifar:0.1", "no such application; Did you mean 'cifar10'?"),
            (":0.1", "no such application"),
        ],
    )
    def test_what_is_no_length_is_refused_with_line_column_and_fix(self, outcome, application, expected):
        with pytest.raises(InvalidDocument) as caught:
            outcome("a,0,bert:0.1,1,12", f"b,0,{application},1,128")
        assert f"line 3, application = '{application}': {expected}" in str(caught.value)

    def test_limits_are_those_of_the_application(self, outcome):
        with pytest.raises(
            InvalidDocument, match=r"line 2, batch_size = '385': more than 384, the largest of bert:0\.1"
        ):
            outcome("a,0,bert:0.1,1,385")

    def test_measured_traces_have_one_length(self, read):
        with pytest.raises(InvalidDocument, match=r"'bert:0\.1': measured traces come in one length only; give bert"):
            read(HEADER + "a,0,bert:0.1,1,12\n")


class TestPublished:
    def test_every_published_workload_is_accepted(self, pollux_data):
        limits = {name: load(name).limits for name in names()}
        paths = sorted((pollux_data / "pollux-osdi21").glob("workloads*/*.csv"))
        assert len(paths) == 20
        for path in paths:
            workload = read_workload(path, limits, Cluster.uniform(16, 4))
            assert workload.name == path.stem
            assert len(workload.jobs) == {"workloads-0.5": 80, "workloads-1.5": 240, "workloads-2.0": 320}.get(
                path.parent.name, 160
            )
            assert to_csv(workload).encode() == path.read_bytes().replace(b"\r\n", b"\n")

    def test_those_of_sia_are_accepted_too(self, pollux_data):
        limits = {name: load(name).limits for name in names()}
        paths = sorted((pollux_data / "sia-sosp23" / "workloads").glob("*/*.csv"))
        assert paths
        for path in paths:
            assert read_workload(path, limits, Cluster.uniform(16, 4)).jobs


class TestRefusing:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            (
                "a,1,cifar,1,128",
                "line 2, application = 'cifar': no such application; Did you mean 'cifar10'? Known: bert",
            ),
            ("a,-3,bert,1,12", "line 2, time = '-3': is negative; give seconds"),
            ("a,noon,bert,1,12", "line 2, time = 'noon': is not a number"),
            ("a,nan,bert,1,12", "line 2, time = 'nan': is not finite"),
            ("a,-Infinity,bert,1,12", "line 2, time = '-Infinity': is not finite"),
            ("a,1e999,bert,1,12", "line 2, time = '1e999': is not finite"),
            ("a,1_0,bert,1,12", "line 2, time = '1_0': is not a number"),
            ("a,٣,bert,1,12", "line 2, time = '٣': is not a number"),
            ("a,1,bert,1.5,12", "line 2, num_replicas = '1.5': is not a whole number; give 2"),
            ("a,1,bert,-0.5,12", "line 2, num_replicas = '-0.5': is not a whole number; give 1"),
            ("a,1,bert,0,12", "line 2, num_replicas = '0': is less than 1"),
            ("a,1,bert,two,12", "line 2, num_replicas = 'two': is not a number"),
            ("a,1,bert,inf,12", "line 2, num_replicas = 'inf': is not finite"),
            ("a,1,bert,1,12.5", "line 2, batch_size = '12.5': is not a whole number"),
            ("a,1,bert,1,-12", "line 2, batch_size = '-12': is less than 1"),
            ("a,1,bert,1,x", "line 2, batch_size = 'x': is not a number"),
            ("a,1,bert,1,385", "line 2, batch_size = '385': more than 384, the largest of bert; give 12 to 384"),
            ("a,1,bert,1,11", "line 2, batch_size = '11': less than 12, the initial one of bert; give 12 to 384"),
            (
                "a,1,bert,8,24",
                "less than 4 examples on each of 8 GPUs; raise batch_size to 32 or lower num_replicas to 6",
            ),
            ("a,1,bert,97,384", "less than 4 examples on each of 97 GPUs; lower num_replicas to 96"),
            (",1,bert,1,12", "line 2, name = '': is empty; fill the cell"),
            ("a,,bert,1,12", "line 2, time = '': is empty"),
            ("a,1,bert", "line 2, num_replicas: the row ends before it"),
            ("a,1,bert,1,1,2", "line 2: 6 cells for 5 columns; quote the cell that holds a comma"),
            ('"a\nb",1,bert,1,12', "line 2, name = 'a\\nb': holds a line break"),
            ('"a,1,bert,1,12', "line 2: unexpected end of data; close every quote"),
            ("a" * 200 + ",x,bert,1,12", "line 2, time = 'x'"),
            ("a," + "9" * 5000 + ",bert,1,12", "is not finite"),
            ("a,1," + "y" * 200 + ",1,12", "yyyyy…: no such application"),
        ],
    )
    def test_a_damaged_row_is_named_with_line_column_value_and_fix(self, refused, row, expected):
        message = refused(HEADER + row + "\n")
        assert expected in message
        assert "1 problem:" in message or "the row ends" in message
        assert "docs/workloads.md" in message

    def test_names_must_be_unique_and_both_lines_are_named(self, refused):
        message = refused(HEADER + GOOD + "b,1,bert,1,12\n" + GOOD)
        assert "line 4, name = 'cifar10-0': line 2 has the same name; give each job a name of its own" in message

    def test_a_job_larger_than_the_cluster_is_refused(self, refused):
        message = refused(HEADER + GOOD, Cluster.uniform(1, 4))
        assert "line 2, num_replicas = '6': more GPUs than the 4 of the cluster; ask for 4 or fewer" in message

    def test_all_problems_come_in_one_error(self, refused):
        message = refused(HEADER + "a,-1,brt,0,0\n" + GOOD + "a,x,bert,1,9999\n\nb,1,bert,1\n")
        for expected in (
            "8 problems:",
            "line 2, time = '-1'",
            "line 2, application = 'brt'",
            "line 2, num_replicas = '0'",
            "line 2, batch_size = '0'",
            "line 4, name = 'a': line 2",
            "line 4, time = 'x'",
            "line 4, batch_size = '9999'",
            "line 6, batch_size: the row ends before it",
        ):
            assert expected in message
        assert "line 3" not in message

    def test_a_long_list_is_cut_and_counted(self, refused):
        message = refused(HEADER + "".join(f"j{i},-1,bert,1,12\n" for i in range(30)))
        assert message.startswith("workload = ")
        assert "30 problems:" in message
        assert message.count("is negative") == MAX_LISTED
        assert "… and 10 more" in message

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "the file is empty; begin it with the line name,time,application"),
            ("\n \n", "the file is empty"),
            (HEADER, "line 1: no jobs follow the names of the columns"),
            (GOOD, "names none of the columns; begin the file with name,time"),
            ("name;time;application;num_replicas;batch_size\n", "names none of the columns"),
            ("name,time,name,application,num_replicas,batch_size\n", "column 'name' occurs twice"),
            ('"', "line 1: unexpected end of data"),
        ],
    )
    def test_a_file_without_jobs_or_columns_is_refused(self, refused, text, expected):
        assert expected in refused(text)

    def test_a_missing_column_is_named_once_and_the_others_are_still_checked(self, refused):
        message = refused("name,application,num_replicas\na,bert,1\nb,bert,0\n")
        assert "3 problems:" in message
        assert "line 1: column 'time' is missing" in message
        assert "line 1: column 'batch_size' is missing" in message
        assert "line 3, num_replicas = '0'" in message

    def test_bytes_that_are_no_text_are_refused(self, refused):
        assert "line 2 holds a NUL byte" in refused((HEADER + "a\0,1,bert,1,12\n").encode())
        assert "is not UTF-8: byte 0xe9 on line 2" in refused(HEADER.encode() + b"\xe9,1,bert,1,12\n")

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere.csv", tmp_path / "a\0b"):
            with pytest.raises(InvalidDocument, match="cannot be read"):
                read_workload(path, LIMITS)


def workloads() -> st.SearchStrategy[Workload]:
    letters = string.ascii_letters + string.digits + " ,\"'-_.;é漢"
    name = st.text(letters, min_size=1, max_size=12).map(str.strip).filter(bool)
    time = st.one_of(st.integers(0, 10**7).map(float), st.floats(0, 1e300))
    job = st.tuples(name, time, st.integers(1, 32), st.integers(1024, 4096))

    def build(rows: list[tuple[str, float, int, int]]) -> Workload:
        ordered = sorted(rows, key=lambda row: row[1])
        return Workload("w", tuple(WorkloadJob(n, t, "cifar10", gpus, batch) for n, t, gpus, batch in ordered))

    return st.lists(job, min_size=1, max_size=20, unique_by=lambda row: row[0]).map(build)


@given(workload=workloads())
def test_what_was_written_is_read_back(tmp_path_factory, workload):
    path = tmp_path_factory.mktemp("written") / "w.csv"
    write_workload(workload, path)
    assert read_workload(path, LIMITS) == workload
    assert path.read_bytes().decode() == to_csv(workload)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "w.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidDocument):
        read_workload(path, LIMITS)


@given(rows=st.lists(st.lists(st.text(max_size=6), max_size=7), max_size=6))
def test_any_cells_are_read_or_refused(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("any") / "w.csv"
    text = HEADER + GOOD + "".join(",".join(row) + "\n" for row in rows)
    path.write_bytes(text.encode(errors="replace"))
    with contextlib.suppress(InvalidDocument):
        assert read_workload(path, LIMITS).jobs


def test_whole_seconds_are_written_without_a_point():
    jobs = (WorkloadJob("a", 107.0, "bert", 1, 12), WorkloadJob("b", 107.25, "bert", 1, 12))
    assert to_csv(Workload("w", jobs)) == HEADER + "a,107,bert,1,12\nb,107.25,bert,1,12\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    workload = Workload("w", ())
    with pytest.raises(InvalidDocument, match="cannot be written"):
        write_workload(workload, tmp_path / "no such folder" / "w.csv")


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": " a"},
        {"name": "a\nb"},
        {"submitted_at_s": -1.0},
        {"submitted_at_s": float("nan")},
        {"application": ""},
        {"num_gpus": 0},
        {"num_gpus": 1.5},
        {"batch_size": True},
    ],
)
def test_a_job_that_no_file_could_hold_is_refused(change):
    good = {"name": "a", "submitted_at_s": 1.0, "application": "bert", "num_gpus": 1, "batch_size": 12}
    WorkloadJob(**good)
    with pytest.raises(InvalidSpec):
        WorkloadJob(**{**good, **change})


def test_a_workload_is_sorted_and_its_names_are_unique():
    early, late = WorkloadJob("a", 1.0, "bert", 1, 12), WorkloadJob("b", 2.0, "bert", 1, 12)
    with pytest.raises(InvalidSpec, match="Sort the jobs"):
        Workload("w", (late, early))
    with pytest.raises(InvalidSpec, match="occurs twice"):
        Workload("w", (early, early))
    with pytest.raises(InvalidSpec, match="tuple"):
        Workload("w", [early])
    with pytest.raises(InvalidSpec):
        Workload("", (early,))


class TestDocument:
    """docs/workloads.md: its examples are read, its Python runs."""

    TEXT = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"```{language}\n(.*?)```", self.TEXT, re.DOTALL)

    def test_its_examples_of_files_are_accepted(self, read, tmp_path):
        (workload,) = self.blocks("csv")
        assert len(read(workload).jobs) == 3
        (tmp_path / "jobs.csv").write_text(workload)
        for suffix in ("toml", "json"):
            (example,) = self.blocks(suffix)
            path = tmp_path / f"cluster.{suffix}"
            path.write_text(example)
            cluster = read_cluster(path, "t4")
            assert cluster.cluster.num_gpus == 20
            assert len(simulate(Scenario(str(tmp_path / "jobs.csv"), "fifo", cluster)).jobs) == 3

    def test_its_example_of_an_error_is_what_is_said(self, refused):
        (broken,) = self.blocks("csv-broken")
        message = refused(broken).partition("jobs.csv': ")[2]
        assert message in self.blocks("text")[0]

    def test_its_python_runs(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        for block in self.blocks("python"):
            exec(compile(block, "docs/workloads.md", "exec"), {})
        assert "demo" in capsys.readouterr().out

    def test_it_names_every_built_in_workload(self):
        for name, built_in in BUILT_IN.items():
            row = f"| `{name}` | {built_in.title} | {built_in.num_nodes} × {built_in.gpus_per_node} |"
            assert row in self.TEXT
