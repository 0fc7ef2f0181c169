"""The document of a job: what is read, what is refused and how, and what becomes of it."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pollux.core import BatchWishes, FrozenMap, JobId, JobSpec
from pollux.errors import InvalidJob, InvalidSpec, Refusal
from pollux.wire.api import Fault
from pollux.wire.jobspec import JobRequest, check_files, json_schema, parse, resolve_env, uses_pollux
from pollux.wire.jobspec.fields import FIELDS, meant_by
from pollux.wire.jobspec.launch import launch_of

PYTHON = "python train.py"
SECRET = "hunter2-sekret"


def read(document: object, **options: Any) -> JobRequest:
    return parse(document, **{"base_dir": "/work", **options})


def faults(document: object, **options: Any) -> dict[str, Fault]:
    with pytest.raises(InvalidJob) as caught:
        read(document, **options)
    return {fault.field: fault for fault in caught.value.faults}


class TestReading:
    def test_a_command_is_enough(self):
        request = read({"command": PYTHON})
        assert request.command == ("python", "train.py")
        assert request.working_dir == "/work"
        assert request.name == "train"
        assert request.script == "/work/train.py"
        assert not request.is_plain

    def test_every_example_of_the_table_is_read(self):
        elastic = {field.name: field.example for field in FIELDS if field.name != "gpus"}
        request = read(resolve_env(elastic, {"WANDB_API_KEY": SECRET}))
        assert request.deadline_s == 7200.0
        assert request.env["WANDB_API_KEY"] == SECRET
        plain = {field.name: field.example for field in FIELDS if not field.is_elastic and field.name != "env"}
        assert read(plain).gpus == 1

    def test_text_is_split_into_words_without_a_shell(self):
        request = read({"command": "python train.py --name 'a b' \\\n  $HOME *"})
        assert request.command[2:] == ("--name", "a b", "$HOME", "*")

    def test_numbers_among_the_arguments_count_as_written(self):
        command = ["python", "train.py", 10, 0.5, True, ""]
        assert read({"command": command}).command[2:] == ("10", "0.5", "true", "")
        assert read({"command": command}, texts={"command[2]": "010"}).command[2] == "010"

    def test_values_of_env_count_as_written(self):
        document = {"command": PYTHON, "env": {"A": 1, "B": True, "C": "x", "D": 1.5}}
        assert dict(read(document).env) == {"A": "1", "B": "true", "C": "x", "D": "1.5"}
        assert read(document, texts={"env.B": "yes"}).env["B"] == "yes"

    @pytest.mark.parametrize(("given", "seconds"), [(90, 90.0), (0.5, 0.5), ("90m", 5400.0), ("1d1h30m", 91800.0)])
    def test_a_deadline_is_seconds_or_text(self, given, seconds):
        assert read({"command": PYTHON, "deadline": given}).deadline_s == seconds

    @pytest.mark.parametrize("name", ["cifar10", "cifar10:0.2", "ncf:20", "bert:1e-05"])
    def test_an_application_may_say_how_long_it_is(self, name):
        assert read({"command": PYTHON, "application": name}).application == name
        assert complaints(json_schema(), {"command": PYTHON, "application": name}) == []
        assert "name" in faults({"command": PYTHON, "name": "a:2"})

    @pytest.mark.parametrize("name", [":0.2", "ncf:", "ncf:long", "ncf:1:2", "a b:1"])
    def test_and_nothing_else(self, name):
        assert "cannot be a name" in faults({"command": PYTHON, "application": name})["application"].problem

    def test_paths_start_from_the_base_and_then_from_the_working_dir(self):
        request = read({"command": PYTHON, "working_dir": "a/../b", "checkpoint_dir": "saved"})
        assert (request.working_dir, request.checkpoint_dir) == ("/work/b", "/work/b/saved")

    def test_without_a_base_the_working_dir_must_be_absolute(self):
        assert faults({"command": PYTHON}, base_dir=None)["working_dir"].problem == "missing"
        assert "absolute" in faults({"command": PYTHON, "working_dir": "x"}, base_dir=None)["working_dir"].problem
        assert read({"command": PYTHON, "working_dir": "/x"}, base_dir=None).working_dir == "/x"

    def test_a_request_becomes_the_document_that_it_came_from(self):
        document = {"name": "a", "command": ["python", "t.py"], "working_dir": "/x", "env": {"A": "1"}, "max_gpus": 3}
        assert read(document).as_document() == document


class TestFaults:
    def test_all_are_found_at_once_in_the_order_of_lines(self):
        document = {"retries": -1, "name": "a b", "max_gpus": 2, "min_gpus": 4, "bach_size": 3}
        lines = {"": 1, "retries": 9, "name": 2, "max_gpus": 5, "min_gpus": 4, "bach_size": 7}
        with pytest.raises(InvalidJob) as caught:
            read(document, lines=lines)
        found = [(fault.line, fault.field) for fault in caught.value.faults]
        assert found == [(1, "command"), (2, "name"), (5, "max_gpus"), (7, "bach_size"), (9, "retries")]
        assert "line 5: max_gpus = 2: less than min_gpus = 4. Lower min_gpus or raise max_gpus." in str(caught.value)

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("name", True, "quotes"),
            ("name", "", "empty"),
            ("name", "../x", "letters"),
            ("name", "a" * 81, "longer"),
            ("team", "x\x1b[31m", "printed"),
            ("name", None, "no value"),
            ("min_gpus", "4", "Write 4, without quotes"),
            ("min_gpus", "1e3", "Write 1000."),
            ("min_gpus", 4.0, "Write 4."),
            ("min_gpus", True, "whole number"),
            ("min_gpus", 10**400, "more than"),
            ("fixed_batch", "true", "without quotes"),
            ("fixed_batch", 1, "true or false"),
            ("deadline", "soon", "2h"),
            ("deadline", 0, "above 0"),
            ("deadline", "99999d", "ten years"),
            ("deadline", float("nan"), "duration"),
            ("deadline", 10**400, "ten years"),
            ("working_dir", ["x"], "not text"),
            ("working_dir", "a\0b", "printed"),
            ("command", "python 'x", "quote"),
            ("command", "", "no program"),
            ("command", [], "no program"),
            ("command", {"a": 1}, "list of texts"),
            ("command", "python train.py && rm x", "shell"),
            ("command", "python \ud800.py", "command line"),
            ("command", ["python"] * 1001, "1000"),
            ("command", "x" * 300_000, "longer"),
            ("env", ["A=1"], "mapping"),
            ("retries", 10**9, "1000"),
        ],
    )
    def test_a_value_that_cannot_be_used_is_named_with_a_fix(self, field, value, words):
        fault = faults({"command": PYTHON, field: value})[field]
        assert words in f"{fault.problem}. {fault.fix}."
        assert len(fault.value) <= 70
        assert fault.value.isprintable()

    @pytest.mark.parametrize(
        ("document", "field"),
        [
            ({"min_gpus": 3, "max_gpus": 2}, "max_gpus"),
            ({"min_gpus": 3, "requested_gpus": 2}, "requested_gpus"),
            ({"requested_gpus": 3, "max_gpus": 2}, "max_gpus"),
            ({"initial_batch_size": 9, "max_batch_size": 8}, "max_batch_size"),
            ({"batch_size": 9, "max_batch_size": 8, "fixed_batch": True}, "max_batch_size"),
            ({"batch_size": 7, "initial_batch_size": 8}, "batch_size"),
            ({"min_per_gpu_batch_size": 9, "max_per_gpu_batch_size": 8}, "max_per_gpu_batch_size"),
            ({"min_per_gpu_batch_size": 9, "max_batch_size": 8}, "max_batch_size"),
            ({"min_gpus": 9, "batch_size": 8, "fixed_batch": True}, "min_gpus"),
            ({"min_gpus": 9, "max_batch_size": 8}, "min_gpus"),
            ({"gpus": 1, "min_gpus": 1}, "min_gpus"),
            ({"gpus": 1, "requested_gpus": 1}, "requested_gpus"),
            ({"gpus": 1, "fixed_batch": True}, "fixed_batch"),
            ({"gpus": 1, "batch_size": 1}, "batch_size"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, document, field):
        assert list(faults({"command": PYTHON, **document})) == [field]

    def test_a_contradiction_is_shown_at_what_comes_later(self):
        document = {"command": PYTHON, "max_gpus": 2, "min_gpus": 4}
        assert faults(document, lines={"max_gpus": 2, "min_gpus": 3})["min_gpus"].line == 3

    @pytest.mark.parametrize(
        ("key", "field"),
        [("gpu", "gpus"), ("min-gpus", "min_gpus"), ("Environment", "env"), ("comand", "command"), ("M0", None)],
    )
    def test_a_misspelt_key_is_answered_by_the_right_one(self, key, field):
        fault = faults({"command": PYTHON, key: 1}, lines={key: 7})[key]
        assert fault.fix == f"Write {field or 'initial_batch_size'} if that is meant"
        assert fault.line == 7

    def test_a_key_like_no_other_is_answered_by_all(self):
        assert meant_by("qqqqqqq") is None
        assert "max_batch_size" in faults({"command": PYTHON, "qqqqqqq": 1})["qqqqqqq"].fix

    def test_a_misspelt_command_is_not_also_missing(self):
        assert list(faults({"comand": PYTHON})) == ["comand"]

    @pytest.mark.parametrize("text", ["010", "0x10", "1:30"])
    def test_numbers_that_yaml_reads_in_its_own_way_are_refused(self, text):
        assert "Write 8" in faults({"command": PYTHON, "retries": 8}, texts={"retries": text})["retries"].fix

    @pytest.mark.parametrize(
        "document",
        [
            {"env": {"TOKEN": [SECRET]}},
            {"env": {"TOKEN": SECRET, "B": None}},
            {"env": {"TOKEN": SECRET + "\0"}},
            {"env": {"TOKEN": SECRET * 5000}},
            {"env": {f"TOKEN={SECRET}": 1}},
            {"env": [f"TOKEN={SECRET}"]},
            {"env": f"TOKEN={SECRET}"},
            {"enviroment": {"TOKEN": SECRET}},
            {"enviroment": SECRET},
            {f"TOKEN={SECRET}": 1},
            {"name": {"TOKEN": SECRET}},
        ],
    )
    def test_no_fault_tells_a_secret(self, document):
        with pytest.raises(InvalidJob) as caught:
            read({"command": PYTHON, **document})
        assert SECRET not in str(caught.value) + repr(caught.value) + repr(caught.value.faults)

    def test_a_request_does_not_show_its_environment(self):
        assert SECRET not in repr(read({"command": PYTHON, "env": {"TOKEN": SECRET}}))

    def test_a_hostile_document_has_a_limited_answer(self):
        with pytest.raises(InvalidJob) as caught:
            read({"x" * 10_000 + str(i): {} for i in range(5_000)})
        assert len(caught.value.faults) <= 101
        assert len(str(caught.value)) < 100_000

    def test_faults_survive_the_way_to_another_process(self):
        with pytest.raises(InvalidJob) as caught:
            read({})
        assert pickle.loads(pickle.dumps(caught.value)).faults == caught.value.faults
        refusal = Refusal(422, "Invalid job", "One fault.", caught.value.faults)
        assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal)
        assert "command: missing" in str(refusal)


class TestElasticCommands:
    @pytest.mark.parametrize("python", ["python", "python3", "python3.12", "/usr/bin/python3"])
    def test_python_runs_a_script(self, python):
        assert read({"command": [python, "-u", "a/t.py", "-m", "x"]}).script == "/work/a/t.py"

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("torchrun t.py", "replicas"),
            ("./t.py", "Write python ./t.py"),
            ("bash t.sh", "only Python"),
            (".venv/bin/python t.py", "relative"),
            ("python", "no script"),
            ("python -m pkg", "module"),
            ("python -c 1", "script"),
            ("python -O t.py", "env"),
            ("python -u", "no script"),
            ("python t", "ends in .py"),
            ("pythonic t.py", "only Python"),
        ],
    )
    def test_anything_else_is_refused_with_the_way_out(self, command, words):
        fault = faults({"command": command})["command"]
        assert words in f"{fault.problem}. {fault.fix}."
        assert "gpus: n" in fault.fix
        assert read({"command": command, "gpus": 1}).is_plain

    def test_the_item_of_a_list_is_named(self):
        assert faults({"command": ["python", "-m", "x"]}, lines={"command": 1, "command[1]": 3})["command[1]"].line == 3


class TestPlain:
    def test_a_request_without_wishes_becomes_plain(self):
        request = read({"command": PYTHON, "requested_gpus": 2}).with_gpus()
        assert (request.gpus, request.requested_gpus) == (2, None)
        assert read({"command": PYTHON}).with_gpus(3).gpus == 3

    def test_what_a_plain_command_cannot_do_is_not_forgotten(self):
        with pytest.raises(InvalidJob) as caught:
            read({"command": PYTHON, "max_gpus": 2, "max_batch_size": 9}).with_gpus(3)
        assert [fault.field for fault in caught.value.faults] == ["max_gpus", "max_batch_size"]


class TestSpec:
    def test_an_elastic_job(self):
        document = {"command": PYTHON, "batch_size": 64, "initial_batch_size": 32, "team": "a", "priority": 3}
        spec = read(document).spec(JobId("j1"), "/saved")
        assert spec.batch == BatchWishes(initial_batch_size=32)
        assert (spec.requested_batch_size, spec.checkpoint_dir, spec.team, spec.priority) == (64, "/saved", "a", 3)
        assert spec.preemptible
        assert not spec.rigid

    def test_a_plain_command_keeps_its_gpus_on_one_node(self):
        spec = read({"command": "./run.sh", "gpus": 2, "checkpoint_dir": "/mine"}).spec(JobId("j1"), "/saved")
        assert spec.rigid
        assert spec.single_node
        assert not spec.preemptible
        assert spec.gpu_bounds == (2, 2)
        assert spec.checkpoint_dir == "/mine"

    def test_a_plain_command_may_be_preemptible_if_its_owner_says_so(self):
        assert read({"command": "./run.sh", "gpus": 2, "preemptible": True}).spec(JobId("j"), "").preemptible


class TestLaunch:
    def test_an_elastic_job_is_told_its_batch_sizes(self):
        document = {
            "command": "python -u a/t.py --x",
            "batch_size": 64,
            "initial_batch_size": 32,
            "max_batch_size": 128,
            "min_per_gpu_batch_size": 4,
            "max_per_gpu_batch_size": 16,
            "fixed_batch": True,
            "env": {"A": "1", "POLLUX_BATCH_SIZE": "48"},
        }
        launch = launch_of(read(document).spec(JobId("j"), "/saved"))
        assert (launch.script, launch.arguments, launch.directory) == ("/work/a/t.py", ("--x",), "/work")
        assert launch.checkpoint_dir == "/saved"
        assert dict(launch.environment) == {
            "A": "1",
            "POLLUX_BATCH_SIZE": "48",
            "POLLUX_FIXED_BATCH": "1",
            "POLLUX_INITIAL_BATCH_SIZE": "32",
            "POLLUX_MAX_BATCH_SIZE": "128",
            "POLLUX_MAX_PER_GPU_BATCH_SIZE": "16",
            "POLLUX_MIN_PER_GPU_BATCH_SIZE": "4",
        }

    def test_a_policy_that_does_not_adapt_keeps_the_batch(self):
        spec = read({"command": PYTHON}).spec(JobId("j"), "/saved")
        assert dict(launch_of(spec).environment) == {}
        assert dict(launch_of(spec, fixed_batch=True).environment) == {"POLLUX_FIXED_BATCH": "1"}

    def test_a_plain_command_is_run_as_it_is(self):
        spec = read({"command": [*PYTHON.split(), "-x"], "gpus": 2}).spec(JobId("j"), "/saved")
        launch = launch_of(spec, fixed_batch=True)
        assert launch.is_plain
        assert (launch.script, launch.arguments, launch.gpus) == ("python", ("train.py", "-x"), 2)
        assert launch.environment == FrozenMap()

    @pytest.mark.parametrize("command", [(), ("bash", "x")])
    def test_a_specification_that_cannot_run_is_refused(self, command):
        with pytest.raises(InvalidSpec):
            launch_of(JobSpec(JobId("j"), command=command))


class TestFiles:
    def fields(self, folder: Path, **document: object) -> list[str]:
        request = parse({"command": PYTHON, **document}, base_dir=str(folder))
        return [f"{fault.field}: {fault.problem}" for fault in check_files(request)]

    def test_all_is_there(self, tmp_path):
        (tmp_path / "train.py").touch()
        assert self.fields(tmp_path) == []
        assert self.fields(tmp_path, command=f"{sys.executable} train.py") == []
        assert self.fields(tmp_path, command="sh -c true", gpus=1, checkpoint_dir="a/b/c") == []

    def test_what_is_missing_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        assert self.fields(tmp_path) == ["command: no such script"]
        assert self.fields(tmp_path, gpus=1) == ["command: no such script"]
        assert self.fields(tmp_path, working_dir="x") == ["working_dir: no such folder"]
        assert self.fields(tmp_path, working_dir="file") == ["working_dir: not a folder"]
        assert self.fields(tmp_path, command="no-such-program", gpus=1) == ["command: no such program in PATH"]
        assert self.fields(tmp_path, command="./x", gpus=1) == ["command: no such program"]
        assert self.fields(tmp_path, command="./file", gpus=1) == ["command: not executable"]
        (tmp_path / "train.py").touch()
        assert self.fields(tmp_path, checkpoint_dir="file/x") == [
            f"checkpoint_dir: {tmp_path / 'file'} is not a folder"
        ]

    def test_the_path_of_the_job_counts(self, tmp_path):
        (tmp_path / "tool").touch(mode=0o755)
        assert self.fields(tmp_path, command="tool", gpus=1, env={"PATH": str(tmp_path)}) == []

    def test_another_python_than_that_of_the_cluster_is_refused(self, tmp_path):
        (tmp_path / "train.py").touch()
        for python in ("python3.1", "/nowhere/bin/python"):
            (problem,) = self.fields(tmp_path, command=f"{python} train.py")
            assert sys.executable in problem


class TestUsesPollux:
    @pytest.mark.parametrize(
        "source",
        [
            "import pollux.torch",
            "from pollux import torch",
            "def f():\n    from pollux.torch import Job",
            "import beside",
        ],
    )
    def test_it_does(self, tmp_path, source):
        (tmp_path / "beside.py").write_text("from pollux.torch import Job")
        (tmp_path / "t.py").write_text(source)
        assert uses_pollux(tmp_path / "t.py")

    @pytest.mark.parametrize(
        "source", ["import torch", "import pollux", "'pollux.torch'", "from pollux.torch import", ""]
    )
    def test_it_does_not(self, tmp_path, source):
        (tmp_path / "t.py").write_text(source)
        assert not uses_pollux(tmp_path / "t.py")

    def test_a_module_of_a_package_beside_it(self, tmp_path):
        (tmp_path / "kit").mkdir()
        (tmp_path / "kit" / "loop.py").write_text("import pollux.torch as pt")
        (tmp_path / "t.py").write_text("from kit import loop")
        assert uses_pollux(tmp_path / "t.py")
        assert not uses_pollux(tmp_path / "missing.py")

    def test_the_examples(self):
        examples = Path(__file__).resolve().parents[2] / "examples"
        assert uses_pollux(examples / "classifier_adaptive.py")
        assert not uses_pollux(examples / "classifier.py")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.sampled_from(["python", "python3", "-u", "-m", "train.py", "a b.py", "/bin/sh", "--x", ""])
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    field.name: st.just(field.example) | st.integers(-1, 9) | st.booleans() | JSON for field in FIELDS
}
LIKELY["command"] = st.just(PYTHON) | st.lists(WORDS, max_size=4) | st.text(max_size=20) | JSON
DOCUMENTS = st.fixed_dictionaries({}, optional=LIKELY) | st.dictionaries(st.text(max_size=9), JSON, max_size=4)


@given(DOCUMENTS | JSON)
@example({"command": PYTHON, "min_gpus": True})
def test_any_document_is_read_or_refused(document):
    try:
        request = read(document)
    except InvalidJob as invalid:
        refused = invalid
    else:
        refused = None
    if refused is not None:
        assert all(fault.problem and fault.fix for fault in refused.faults)
        assert str(refused).encode()
        return
    launch_of(request.spec(JobId("j"), "/saved"))
    assert read(json.loads(json.dumps(request.as_document())), base_dir=None) == request


WISHES = {field.name: st.integers(1, 6) for field in FIELDS if field.is_elastic and field.name != "fixed_batch"}


@given(st.fixed_dictionaries({"command": st.just(PYTHON)}, optional={**WISHES, "fixed_batch": st.booleans()}))
def test_whatever_is_read_can_be_scheduled(document):
    try:
        request = read(document)
    except InvalidJob:
        return
    assert launch_of(request.spec(JobId("j"), "/saved")).job == "j"


class TestSchema:
    def test_every_field_is_described(self):
        schema = json_schema()
        assert schema["additionalProperties"] is False
        assert list(schema["properties"]) == [field.name for field in FIELDS]
        for name, about in schema["properties"].items():
            assert about["description"], name
            assert about["type"], name
            assert about["examples"], name
            assert ("default" in about) != bool(re.search(r"Default: .*\.$|Required\.$", about["description"])), name

    def test_examples_and_defaults_are_of_their_type(self):
        for name, about in json_schema()["properties"].items():
            values = [*about["examples"], *([about["default"]] if "default" in about else [])]
            assert all(complaints(about, value) == [] for value in values), name

    @given(DOCUMENTS)
    def test_what_is_read_fits_the_schema(self, document):
        try:
            read(document)
        except InvalidJob:
            return
        assert complaints(json_schema(), document) == []

    def test_the_schema_refuses_what_is_refused(self):
        for wrong in ({"nme": 1}, {"name": "a b"}, {"gpus": 0}, {"deadline": "x"}, {"gpus": 1, "min_gpus": 1}):
            assert complaints(json_schema(), {"command": PYTHON, **wrong}) != []
        assert complaints(json_schema(), {}) != []


TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
TYPES |= {"array": (list, tuple), "object": dict}


def is_type(value: object, name: str) -> bool:
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def complaints(schema: Any, value: Any) -> list[str]:
    """What the keywords of JSON Schema that we use say of a value. Unknown keywords fail the test."""
    found: list[str] = []
    if schema is False:
        return ["never"]
    for keyword, rule in schema.items():
        match keyword:
            case "type":
                names = [rule] if isinstance(rule, str) else rule
                holds = any(is_type(value, name) for name in names)
            case "pattern":
                holds = not isinstance(value, str) or re.search(rule, value) is not None
            case "minLength":
                holds = not isinstance(value, str) or len(value) >= rule
            case "maxLength":
                holds = not isinstance(value, str) or len(value) <= rule
            case "minimum":
                holds = not is_type(value, "number") or value >= rule
            case "maximum":
                holds = not is_type(value, "number") or value <= rule
            case "exclusiveMinimum":
                holds = not is_type(value, "number") or value > rule
            case "minItems":
                holds = not isinstance(value, list) or len(value) >= rule
            case "maxItems":
                holds = not isinstance(value, list) or len(value) <= rule
            case "items":
                holds = not isinstance(value, list) or not any(complaints(rule, item) for item in value)
            case "required":
                holds = set(rule) <= set(value)
            case "properties":
                holds = not any(complaints(rule[name], value[name]) for name in rule.keys() & value.keys())
            case "additionalProperties":
                others = [name for name in value if name not in schema.get("properties", {})]
                holds = not any(complaints(rule, value[name]) for name in others)
            case "propertyNames":
                holds = not any(complaints(rule, name) for name in value)
            case "maxProperties":
                holds = not isinstance(value, dict) or len(value) <= rule
            case "dependentSchemas":
                holds = not any(complaints(rule[name], value) for name in rule if name in value)
            case "$schema" | "title" | "description" | "examples" | "default":
                holds = True
            case _:
                raise AssertionError(f"unknown keyword {keyword}")
        if not holds:
            found.append(keyword)
    return found
