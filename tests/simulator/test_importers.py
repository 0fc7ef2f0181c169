"""Job lists of real clusters: what is read of each format, what is passed over, and what is refused."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import string
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.refusals import refusing

from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.simulator.documents import MAX_LISTED, PACKED, read_text
from pollux.simulator.importers import FORMATS, JobList, LoggedJob, read_log
from pollux.simulator.importers.formats import guessed_format
from pollux.simulator.importers.recorded import parse_time

PHILLY_CSV = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,a1
2017-10-10 23:59:59,3600,8,28800.0,b2
2017-10-11 00:00:00,10,0,0,b2
2017-10-11 00:00:01,,2,0,b2
"""
HELIOS_HEADER = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
HELIOS = HELIOS_HEADER + (
    "7,u1,vcA,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:42:27,2020-06-09 18:45:36,189,60\n"
    "8,u1,vcA,0,1,1,COMPLETED,2020-06-09 18:41:28,2020-06-09 18:41:28,2020-06-09 19:41:28,3600,0\n"
    "9,u2,vcB,1,1,1,CANCELLED,2020-06-09 18:41:29,,2020-06-09 18:50:00,0,511\n"
    "10,u2,vcB,1,1,1,RUNNING,2020-06-09 18:41:30,2020-06-09 18:41:30,NaT,,0\n"
)
PAI = """\
j1,ps,1.0,Terminated,100000.0,100500.0,600.0,30.0,,
j1,worker,2.0,Terminated,100010.0,100610.0,400.0,30.0,50.0,MISC
j1,evaluator,1.0,Terminated,100100.0,100400.0,400.0,30.0,25.0,MISC
j2,tensorflow,1.0,Running,100200.0,,600.0,30.0,100.0,T4
j3,tensorflow,1.0,Waiting,,,600.0,30.0,100.0,T4
j4,tensorflow,1.0,Terminated,100300.0,100301.0,600.0,30.0,,
j5,worker,3.0,Terminated,100400.0,100460.0,600.0,30.0,800.0,V100
j6,worker,1.0,Failed,0,100460.0,600.0,30.0,100.0,V100
"""
PAI_HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"


def attempt(start: object, end: object, *gpus: int) -> dict[str, Any]:
    nodes = [{"ip": f"m{index}", "gpus": [f"gpu{gpu}" for gpu in range(count)]} for index, count in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": nodes}


def philly_job(*attempts: object, **others: object) -> dict[str, Any]:
    job = {"status": "Pass", "vc": "v1", "jobid": "app_1", "user": "u", "submitted_time": "2017-10-07 01:11:39"}
    return {**job, "attempts": list(attempts), **others}


PHILLY = [
    philly_job(
        attempt("2017-10-07 01:12:00", "2017-10-07 01:13:00", 2),
        attempt("2017-10-07 02:00:00", "2017-10-07 02:00:30", 8, 8),
    ),
    philly_job(attempt("None", "2017-10-07 01:13:00", 1), attempt("2017-10-07 02:00:00", "2017-10-07 02:00:09", 1)),
    philly_job(jobid="app_2"),
    philly_job(attempt("2017-10-07 01:12:00", None, 1), jobid="app_3"),
    philly_job(attempt("2017-10-07 01:12:00", "2017-10-07 01:12:05"), jobid="app_4"),
    philly_job(attempt(None, "2017-10-07 01:12:05", 1), jobid="app_5"),
]


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.fixture
def read(tmp_path):
    def read(text: str | bytes, format_name: str | None = None, skip_damaged: bool = False) -> JobList:
        path = tmp_path / "jobs.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_log(path, format_name, skip_damaged=skip_damaged)

    return read


@pytest.fixture
def refused(read):
    return refusing(read, "log", "jobs")


@pytest.fixture
def packed() -> dict[str, bytes]:
    """A log in each of the ways in which logs are published; of one that Python cannot write only the beginning."""
    content, archive, ball = HELIOS.encode(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("cluster_log.csv", HELIOS)
    with tarfile.open(fileobj=ball, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        entry = tarfile.TarInfo("cluster_log.csv")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return {
        "gzip": gzip.compress(content),
        "zip": archive.getvalue(),
        "xz": lzma.compress(content),
        "bzip2": bz2.compress(content),
        "zstd": b"\x28\xb5\x2f\xfd\x04\x00",
        "tar": ball.getvalue(),
    }


class TestPhillyCsv:
    def test_rows_become_jobs(self, read):
        found = read(PHILLY_CSV)
        assert found == JobList(
            "jobs",
            (
                LoggedJob("line-2", at("2017-10-09 07:01:55"), 66.0, 1, "a1"),
                LoggedJob("line-3", at("2017-10-10 23:59:59"), 3600.0, 8, "b2"),
            ),
            found.passed_over,
        )
        assert found.passed_over == {"no GPUs": 1, "no end recorded": 1}
        assert found.num_logged == 4
        assert found.jobs[1].gpu_hours == 8.0

    def test_three_columns_are_enough_for_ones_own_log(self, read):
        (job,) = read("num_gpus,timestamp,duration\n2,2024-01-01T10:00:00.5,5\n").jobs
        assert job == LoggedJob("line-2", at("2024-01-01 10:00:00.5"), 5.0, 2)

    def test_the_example_of_the_documentation_is_read(self, read):
        document = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"```csv-log\n(.*?)```", document, re.DOTALL)
        assert [(job.num_gpus, job.cluster) for job in read(block).jobs] == [(4, "research"), (1, "research")]

    def test_a_time_with_an_offset_is_moved_to_utc(self, read):
        (job,) = read("num_gpus,timestamp,duration\n2,2024-01-01 10:00:00+02:00,5\n").jobs
        assert job.submitted_at == at("2024-01-01 08:00:00")

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ("noon,5,1", "line 2, timestamp = 'noon': is not a time; write it as 2017-10-09 05:08:23"),
            ("2017-10-09,5,1", "timestamp = '2017-10-09': is not a time"),
            ("2017-13-09 05:08:23,5,1", "timestamp = '2017-13-09 05:08:23': is not a time"),
            ("15071215110,5,1", "timestamp = '15071215110': is not a time"),
            (",5,1", "line 2, timestamp = '': is left open; give the time of submission"),
            ("2017-10-09 05:08:23,-5,1", "line 2, duration = '-5': is negative; give seconds, 0 or more"),
            ("2017-10-09 05:08:23,long,1", "line 2, duration = 'long': is not a number"),
            ("2017-10-09 05:08:23,inf,1", "line 2, duration = 'inf': is not finite"),
            ("2017-10-09 05:08:23,5,-1", "line 2, num_gpus = '-1': is less than 0; give a whole number of 0 or more"),
            ("2017-10-09 05:08:23,5,1.5", "line 2, num_gpus = '1.5': is not a whole number; give 2"),
            ("2017-10-09 05:08:23,5,", "line 2, num_gpus = '': is empty; fill the cell"),
            ("2017-10-09 05:08:23,5", "line 2, num_gpus: the row ends before it; complete the row"),
            ("2017-10-09 05:08:23,5,1,2", "line 2: 4 cells for 3 columns; quote"),
            ('"2017-10-09 05:08:23,5,1', "line 2: unexpected end of data; close every quote"),
        ],
    )
    def test_a_damaged_row_is_named_with_line_column_value_and_fix(self, refused, row, expected):
        message = refused(f"timestamp,duration,num_gpus\n{row}\n")
        assert expected in message
        assert "1 problem:" in message
        assert "docs/workloads.md" in message

    def test_missing_columns_are_named(self, refused):
        message = refused("timestamp,num_gpus\n2017-10-09 05:08:23,1\n", "philly-csv")
        assert "line 1: column 'duration' is missing; add it" in message
        assert "--skip-damaged" not in message

    def test_an_empty_table_is_refused(self, refused):
        assert "no jobs follow" in refused("timestamp,duration,num_gpus\n")
        assert "the file is empty" in refused("", "philly-csv")


class TestHelios:
    def test_rows_become_jobs(self, read):
        found = read(HELIOS)
        assert found.jobs == (LoggedJob("7", at("2020-06-09 18:41:27"), 189.0, 4, "vcA"),)
        assert found.passed_over == {"no GPUs": 1, "no start recorded": 1, "no end recorded": 1}

    @pytest.mark.parametrize(
        ("cell", "value", "expected"),
        [
            (0, "", "line 2, job_id = '': is empty"),
            (3, "x", "line 2, gpu_num = 'x': is not a number"),
            (7, "", "line 2, submit_time = '': is left open"),
            (8, "9 June", "line 2, start_time = '9 June': is not a time"),
            (
                9,
                "2020-06-09 18:41:26",
                "end_time = '2020-06-09 18:41:26': is before start_time = '2020-06-09 18:42:27'",
            ),
        ],
    )
    def test_damage_is_named(self, refused, cell, value, expected):
        cells = HELIOS.splitlines()[1].split(",")
        cells[cell] = value
        assert expected in refused(HELIOS_HEADER + ",".join(cells) + "\n")

    def test_a_missing_column_is_named(self, refused):
        assert "column 'end_time' is missing" in refused(HELIOS.replace("end_time", "stop"), "helios")


class TestPai:
    EXPECTED = (
        # 2 × 50 % + 25 %, rounded up; from the first GPU task's start to the last end; clocks of UTC+8
        LoggedJob("j1", 100010.0 + 8 * 3600, 600.0, 2),
        LoggedJob("j5", 100400.0 + 8 * 3600, 60.0, 24),
    )

    @pytest.mark.parametrize("header", ["", PAI_HEADER])
    def test_tasks_become_jobs_with_and_without_a_header(self, read, header):
        found = read(header + PAI, "pai")
        assert found.jobs == self.EXPECTED
        assert found.passed_over == {"no GPUs": 1, "no start recorded": 2, "no end recorded": 1}
        assert found.num_logged == 6

    def test_shares_of_a_gpu_that_sum_to_one_are_one(self, read):
        row = "j,worker,3,Terminated,10,70,600,30,33.3333333333,T4\n"
        assert read(row, "pai").jobs[0].num_gpus == 1

    @pytest.mark.parametrize(
        ("cell", "value", "expected"),
        [
            (0, "", "line 1, job_name = '': is empty"),
            (2, "many", "line 1, inst_num = 'many': is not a number"),
            (2, "1e308", "line 1, inst_num = '1e308': is too many of plan_gpu = '100'"),
            (2, "1.5", "line 1, inst_num = '1.5': is not a whole number"),
            (4, "-1", "line 1, start_time = '-1': is negative"),
            (5, "5", "line 1, end_time = '5': is before start_time = '10'"),
            (8, "-50", "line 1, plan_gpu = '-50': is negative; give percent of a GPU"),
        ],
    )
    def test_damage_is_named(self, refused, cell, value, expected):
        cells = ["j", "worker", "3", "Terminated", "10", "70", "600", "30", "100", "T4"]
        cells[cell] = value
        message = refused(",".join(cells) + "\n", "pai")
        assert expected in message
        assert "1 problem:" in message

    def test_a_row_that_ends_early_is_named(self, refused):
        assert "line 1, plan_gpu: the row ends before it" in refused("j,worker,3,Terminated,10,70\n", "pai")

    def test_a_damaged_task_takes_its_whole_job_with_it(self, read):
        found = read(PAI + "j5,ps,x,Terminated,1,2,1,1,100,T4\n", "pai", skip_damaged=True)
        assert found.jobs == self.EXPECTED[:1]
        assert found.passed_over["damaged"] == 1
        assert found.num_logged == 6


class TestPhilly:
    def test_objects_become_jobs(self, read):
        found = read(json.dumps(PHILLY))
        submitted = at("2017-10-07 01:11:39")
        assert found.jobs == (
            LoggedJob("app_1", submitted, 90.0, 16, "v1"),
            LoggedJob("app_1", submitted, 9.0, 1, "v1"),
        )
        assert found.passed_over == {"no GPUs": 1, "no start recorded": 2, "no end recorded": 1}
        assert found.num_logged == len(PHILLY)

    @pytest.mark.parametrize(
        ("job", "expected"),
        [
            (7, "[1] = 7: is not an object"),
            ({"jobid": "a", "submitted_time": "2017-10-07 01:11:39"}, "[1].attempts: is missing; add it"),
            (philly_job(jobid=3), "[1].jobid = 3: is not text"),
            (philly_job(jobid=None), "[1].jobid = null: is not text"),
            (philly_job(jobid=[None, True]), "[1].jobid = [null, true]: is not text"),
            (philly_job(submitted_time=None), "[1].submitted_time = null: is left open"),
            (philly_job(submitted_time="None"), "[1].submitted_time = 'None': is left open"),
            (philly_job(submitted_time="today"), "[1].submitted_time = 'today': is not a time; write it as"),
            (philly_job(submitted_time=12), "[1].submitted_time = 12: is not a time"),
            (philly_job(attempts="none"), "[1].attempts = 'none': is not an array"),
            (philly_job(5), "[1].attempts[0] = 5: is not an object"),
            (philly_job({"end_time": None, "detail": []}), "[1].attempts[0].start_time: is missing"),
            (
                philly_job({**attempt(None, None), "detail": [{"ip": "m"}]}),
                "[1].attempts[0].detail[0].gpus: is missing",
            ),
            (
                philly_job(attempt("2017-10-07 01:12:00", "2017-10-07 01:11:00", 1)),
                "[1].attempts[0].end_time = '2017-10-07 01:11:00': is before start_time = '2017-10-07 01:12:00'; mend",
            ),
        ],
    )
    def test_damage_is_named_with_its_place(self, refused, job, expected):
        message = refused(json.dumps([PHILLY[0], job]))
        assert expected in message
        assert "1 problem:" in message

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("[{", "is no JSON"),
            ("[]", "where an array of jobs belongs"),
            ('{"jobs": []}', "where an array of jobs belongs"),
            ("[" * 100_000, "is nested too deeply"),
        ],
    )
    def test_what_is_no_list_of_jobs_is_refused(self, refused, text, expected):
        assert expected in refused(text, "philly")


class TestAllFormats:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (json.dumps(PHILLY, indent=2), "philly"),
            ("\n " + json.dumps(PHILLY), "philly"),
            (PHILLY_CSV, "philly-csv"),
            (HELIOS, "helios"),
            ("\ufeff" + HELIOS, "helios"),
            (PAI_HEADER + PAI, "pai"),
        ],
    )
    def test_the_format_is_told_by_the_first_line(self, tmp_path, text, expected):
        path = tmp_path / "log"
        path.write_text(text, encoding="utf-8")
        assert guessed_format(path, read_text("log", path)) == expected
        assert read_log(path) == read_log(path, expected)

    def test_a_log_is_read_once_and_may_be_a_pipe(self):
        end, begin = os.pipe()
        os.write(begin, HELIOS.encode())
        os.close(begin)
        try:
            assert len(read_log(Path(f"/dev/fd/{end}")).jobs) == 1
        finally:
            os.close(end)

    @pytest.mark.parametrize("text", ["", PAI, "name,time\n", "x" * 200_000, '"never closed'])
    def test_an_unknown_beginning_is_refused_with_the_formats(self, refused, text):
        message = refused(text)
        assert "--format" in message
        assert all(name in message for name in FORMATS)
        assert "Alibaba's published table has no header: --format pai" in message

    @pytest.mark.parametrize("name", PACKED)
    @pytest.mark.parametrize("format_name", [None, "helios", "philly"])
    def test_what_is_still_packed_is_said_to_be(self, refused, packed, name, format_name):
        message = refused(packed[name], format_name)
        assert f"is compressed or an archive ({name}). Unpack it first." in message

    def test_an_unknown_format_is_refused(self, read):
        with pytest.raises(UnknownName, match="Did you mean 'helios'"):
            read(HELIOS, "helio")

    def test_all_problems_come_at_once_and_the_rest_is_counted(self, refused):
        message = refused("timestamp,duration,num_gpus\n" + "x,5,1\n" * (MAX_LISTED + 5))
        assert f"{MAX_LISTED + 5} problems:" in message
        assert f"line {MAX_LISTED + 1}, " in message
        assert f"line {MAX_LISTED + 2}, " not in message
        assert "… and 5 more" in message
        assert "--skip-damaged" in message

    def test_damaged_jobs_may_be_passed_over_instead(self, read):
        found = read(PHILLY_CSV + "x,y,z\n2017-10-09 05:08:23,5,1,0,a,b,c\n", skip_damaged=True)
        assert len(found.jobs) == 2
        assert found.passed_over["damaged"] == 2

    def test_a_damaged_table_cannot_be_passed_over(self, read):
        with pytest.raises(InvalidDocument, match="close every quote"):
            read(PHILLY_CSV + '"x', skip_damaged=True)

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(InvalidDocument, match="cannot be read"):
            read_log(tmp_path / "none.csv")

    @pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
    def test_each_says_what_it_is(self, known):
        assert known.summary
        assert len(known.columns) >= 3

    @given(
        name=st.sampled_from(sorted(set(FORMATS) - {"philly"})),
        cells=st.lists(
            st.sampled_from(["", "0", "1", "-1", "1e400", "2017-10-09 05:08:23", "None", "9" * 400])
            | st.text(string.printable, max_size=6),
            min_size=1,
            max_size=7,
        ),
    )
    @settings(max_examples=100)
    def test_any_cells_are_read_or_refused(self, tmp_path_factory, name, cells):
        path: Path = tmp_path_factory.mktemp("any") / "log.csv"
        quoted = ",".join(f'"{cell}"' if '"' not in cell else cell for cell in cells)
        path.write_text(",".join(FORMATS[name].columns) + "\n" + quoted + "\n", encoding="utf-8")
        with contextlib.suppress(InvalidDocument):
            assert read_log(path, name).num_logged == 1
        with contextlib.suppress(InvalidDocument):
            assert read_log(path, name, skip_damaged=True).num_logged == 1


class TestLoggedJob:
    @pytest.mark.parametrize(
        ("field", "value"),
        [("name", ""), ("submitted_at", float("nan")), ("duration_s", -1.0), ("num_gpus", 0), ("num_gpus", 1.0)],
    )
    def test_checks_its_fields(self, field, value):
        fields = {"name": "a", "submitted_at": 0.0, "duration_s": 0.0, "num_gpus": 1, field: value}
        with pytest.raises(InvalidSpec, match=field):
            LoggedJob(**fields)

    def test_times(self):
        assert parse_time("1970-01-02 00:00") == 86400.0
        assert parse_time("1970-01-01T00:00:00Z") == 0.0
        assert parse_time("0001-01-01 00:00:00+14:00") is not None
        assert parse_time("1970-01-01 25:00") is None
