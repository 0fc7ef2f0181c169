"""Files of jobs: every value has its line, YAML's traps are faults, and nothing in a file can do harm."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pollux.cli.job_file import check_file, load_jobs
from pollux.cli.job_options import document_of, request_of, with_job_options
from pollux.errors import InvalidJob
from pollux.wire.jobspec.fields import FIELDS

SECRET = "hunter2-sekret"


@pytest.fixture
def write(tmp_path):
    (tmp_path / "train.py").touch()

    def write(text: str | bytes) -> Path:
        path = tmp_path / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems(path: Path) -> list[str]:
    """As `line: field: problem` of what is wrong whatever the machine."""
    return [f"{fault.line}: {fault.field}: {fault.problem}" for fault in check_file(path, None).faults]


def test_a_job_is_read_with_the_folder_of_its_file(write, tmp_path):
    path = write("command: python train.py --lr 1e-3\nenv:\n  A: 010\n  B: yes\n  HOME: ~\n")
    (job,) = load_jobs(path, {"HOME": "/home/me"})
    assert job.working_dir == str(tmp_path)
    assert job.command == ("python", "train.py", "--lr", "1e-3")
    assert dict(job.env) == {"A": "010", "B": "yes", "HOME": "/home/me"}


def test_arguments_count_as_they_are_written(write):
    (job,) = load_jobs(write("command: [python, train.py, 1e-3, 0x10, 1.50, yes, 2024-01-01, =]"), {})
    assert job.command[2:] == ("1e-3", "0x10", "1.50", "yes", "2024-01-01", "=")


def test_documents_are_jobs(write):
    path = write("command: python train.py\n---\n---\nname: b\ncommand: python train.py\n---\n")
    assert [job.name for job in load_jobs(path, {})] == ["train", "b"]


def test_json_is_read_as_well(write):
    (job,) = load_jobs(write('{"command": ["python", "train.py"],\n  "min_gpus": 2}'), {})
    assert job.min_gpus == 2


def test_anchors_and_merges_work(write):
    path = write(
        "env:\n  <<: &base {A: 1, B: 2}\n  B: 3\ncommand: &c [python, train.py]\n"
        "---\nenv: {<<: [&x {A: 1}, &y {A: 2, C: 3}]}\ncommand: python train.py"
    )
    first, second = load_jobs(path, {})
    assert dict(first.env) == {"A": "1", "B": "3"}
    assert dict(second.env) == {"A": "1", "C": "3"}


def test_faults_of_all_documents_come_with_their_lines(write):
    path = write(
        "name: yes\ncommand: python train.py\nmax_gpus: 2\nenv:\n  A: 1\n  A: 2\nmin_gpus: 4\n"
        "---\ncommand:\n  - python\n  - -m\n  - x\nretires: 1\n"
    )
    assert problems(path) == [
        "1: name: read as true, not as text",
        "6: env.A: given twice, first on line 5",
        "7: min_gpus: more than max_gpus = 2",
        "11: command[1]: replicas are not started with Python's option -m",
        "13: retires: no such field",
    ]
    with pytest.raises(InvalidJob, match=r"job.yaml:6: env.A: given twice") as caught:
        load_jobs(path, {})
    assert len(caught.value.faults) == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("command: python train.py\nretries: 010", "2: retries: YAML reads this as 8"),
        ("command: python train.py\nretries: 1e3", "2: retries: not a whole number"),
        ("command: python train.py\ndeadline: 1:30", "2: deadline: not a duration"),
        ("command: python train.py\nworking_dir: ~", "2: working_dir: YAML reads ~ as nothing"),
        ("command: python train.py\nteam: off", "2: team: read as false, not as text"),
        ("command: python train.py\nname:", "2: name: no value"),
        ("command: python train.py\nname: !x y", "2: name: has a tag, which is not read"),
        ("command: python train.py\nname: !!python/name:os.system x", "2: name: has a tag, which is not read"),
        ("command: !!python/tuple [python]", "1: command: has a tag, which is not read"),
        ("command: python train.py\nretries: !!int x", "2: retries: cannot be read as a number or flag"),
        ("command: python train.py\nretries: " + "1" * 5000, "2: retries: cannot be read as a number or flag"),
        ("command: python train.py\n<<: x", "2: : << takes a mapping"),
        ("command: python train.py\n? [a]\n: b", "2: : a key that is not text"),
        ("- a\n- b", "1: : a job is a mapping of fields to values"),
        ("just text", "1: : a job is a mapping of fields to values"),
        ("command: python train.py\n\tname: x", "2: : not YAML (found character '\\t' that cannot start any token)"),
        ("command: [python", "1: : not YAML (expected ',' or ']', but got '<stream end>')"),
        ("", "None: : the file holds no job"),
        ("---\n---\n", "None: : the file holds no job"),
        ("# only a comment", "None: : the file holds no job"),
        (b"name: \xff", "None: : the file is no UTF-8 text"),
        ("a: " + "[" * 2000, "None: : not YAML (values are too deep inside each other)"),
        ("#" * (1 << 21), "None: : the file is longer than 1 MiB"),
    ],
)
def test_a_trap_is_a_fault(write, text, problem):
    assert problem in problems(write(text))


def test_a_broken_document_does_not_hide_the_faults_of_others(write):
    found = problems(write("nme: x\ncommand: python train.py\n---\na: [\n"))
    assert found[0] == "1: nme: no such field"
    assert "not YAML" in found[1]


def test_anchors_cannot_blow_up(write):
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    merges = "m0: &m0 {a: 1}\n" + "".join(
        f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
    )
    for text in (laughs, merges, "a: &a [*a]", "a: &a {b: *a}"):
        assert any("too many values" in problem for problem in problems(write(text)))


def test_secrets_are_in_no_fault(write):
    for text in (f"env:\n  T: *{SECRET}", f"env:\n  T: !{SECRET} x", f"env:\n  T: [{SECRET}]\n  T={SECRET}: 1"):
        found = check_file(write(f"command: python train.py\n{text}"), {})
        assert found.faults
        assert SECRET not in repr(found.faults)


def test_a_variable_that_is_not_set_is_a_fault_where_it_counts(write):
    path = write("command: python train.py\nenv: {TOKEN: null}")
    assert problems(path) == []
    assert [fault.field for fault in check_file(path, {}).faults] == ["env.TOKEN"]


def test_missing_files_have_the_line_of_their_field(write):
    (fault,) = check_file(write("name: x\ncommand: python nowhere.py"), {}).faults
    assert (fault.line, fault.problem) == (2, "no such script")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidJob, match=r"nowhere\.yaml: cannot be read"):
        load_jobs(tmp_path / "nowhere.yaml", {})


def test_overrides_win_over_the_file(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write("command: python train.py\nretries: 010\nenv: {A: 1, B: 2}\nworking_dir: elsewhere")
    (job,) = load_jobs(path, {"B": "5"}, {"retries": 1, "env": {"B": None}, "working_dir": "."})
    assert (job.retries, dict(job.env), job.working_dir) == (1, {"A": "1", "B": "5"}, str(tmp_path))


def test_standard_input_is_a_file(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"command: sh -c true\ngpus: 1")))
    (job,) = load_jobs(Path("-"), {})
    assert job.working_dir == str(Path.cwd())


@given(st.text(st.sampled_from("ab:-[]{}&*!<>|'\"#%? \n\t1~=,"), max_size=40))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    found = check_file(path, None)
    assert found.faults or None not in found.requests


class TestOptions:
    def document(self, *arguments: str) -> dict[str, object]:
        seen: list[dict[str, object]] = []
        app = typer.Typer()

        @app.command()
        @with_job_options
        def submit(fields: dict[str, object], command: list[str] | None = None, dry_run: bool = False) -> None:
            """Submit."""
            seen.append({**document_of(fields, command or []), "dry_run": dry_run})

        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return seen[0] if seen else {"help": result.output}

    def test_every_field_has_an_option(self):
        shown = self.document("--help")["help"]
        for field in FIELDS:
            assert field.name == "command" or field.flag in str(shown)

    def test_what_was_given_is_a_document(self):
        given = ["--min-gpus", "2", "--deadline", "2h", "--fixed-batch", "--no-preemptible", "-e", "A=1=2", "-e", "B"]
        assert self.document("--dry-run", "--priority", "-3", *given) == {
            "dry_run": True,
            "env": {"A": "1=2", "B": None},
            "min_gpus": 2,
            "fixed_batch": True,
            "preemptible": False,
            "priority": -3,
            "deadline": "2h",
        }

    def test_wrong_options_are_told_at_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        given = self.document("--min-gpus", "x", "--name", "a b", "--retries", "-1")
        with pytest.raises(InvalidJob) as caught:
            request_of({**given, "command": ["python", "train.py"]}, {})
        assert {fault.field for fault in caught.value.faults} == {"min_gpus", "name", "retries", "dry_run"}
        assert request_of({"command": ["python", "train.py"]}, {}).working_dir == str(tmp_path)
        with pytest.raises(InvalidJob, match="no such script"):
            request_of({"command": ["python", "t.py"]}, {})
