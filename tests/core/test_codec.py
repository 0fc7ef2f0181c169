import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import Enum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.core import (
    SCHEMA_VERSION,
    Action,
    Allocation,
    BatchLimits,
    Cluster,
    Event,
    FrozenMap,
    Job,
    JobFinished,
    JobModel,
    JobSpec,
    JobSubmitted,
    Observation,
    ObservationKey,
    Phase,
    Plan,
    Profile,
    Progress,
    RoundDue,
    Shape,
    Snapshot,
    decode,
    dumps,
    encode,
    from_json,
    loads,
    register,
    to_json,
)
from pollux.core.codec import _TYPES
from pollux.errors import InvalidDocument

from .strategies import DOCUMENTS, actions, events

SNAPSHOT = Snapshot(1.0, 2, Cluster.uniform(1, 4), FrozenMap({"a": Job(JobSpec("a"), 0.0)}))


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_reads_back_equal(kind, data):
    value = data.draw(DOCUMENTS[kind])
    text = dumps(value)
    assert loads(text) == value
    assert dumps(loads(text)) == text
    assert from_json(to_json(value), kind) == value
    assert decode(encode(value), kind) == value
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert hash(copy) == hash(value)
    assert dumps(copy) == text


def test_every_document_type_has_a_strategy():
    assert {kind for kind in _TYPES.values() if kind.__module__.startswith("pollux.core.")} == set(DOCUMENTS)


@settings(max_examples=50)
@given(events, actions)
def test_unions_are_told_apart_by_a_tag(event, action):
    assert decode(encode(event, Event), Event) == event
    assert from_json(to_json(action, Action), Action) == action
    assert loads(dumps(event), Event) == event


def test_the_envelope_is_compact_sorted_and_versioned():
    assert dumps(RoundDue(3)) == '{"body":{"cause":"","round":3},"schema":1,"type":"RoundDue"}'
    assert SCHEMA_VERSION == 1


def test_equal_values_give_equal_bytes():
    assert to_json(Progress(1, 2)) == to_json(Progress(1.0, 2.0)) == '{"done":1.0,"total":2.0,"total_stddev":null}'
    assert to_json(Progress(-0.0)) == to_json(Progress(0.0))
    one, other = Allocation.of({"a": 1, "b": 2}), Allocation.of({"b": 2, "a": 1})
    assert dumps(one) == dumps(other)


def test_bytes_do_not_depend_on_the_hash_seed():
    program = (
        "from pollux.core import *; c = Cluster.uniform(3, 4);"
        "print(dumps(Snapshot(0.0, 1, c, FrozenMap({n: Job(JobSpec(n), 0.0) for n in 'cab'}))))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_keys_that_are_not_text_become_pairs():
    profile = Profile().add("gpu", ObservationKey(Shape(2), 8), Observation(0.0, 0, 2.0, 0.5, 2))
    pairs = encode(profile)["observations"]["gpu"]
    assert pairs[0][0] == {"shape": {"num_gpus": 2, "num_nodes": 1, "num_racks": 1}, "per_gpu_batch_size": 8}
    plain = {"observations": {"gpu": pairs * 2}}
    with pytest.raises(InvalidDocument, match="occurs twice") as caught:
        decode(plain, Profile)
    assert caught.value.field == 'observations["gpu"][1][0]'
    with pytest.raises(InvalidDocument, match="must be a pair"):
        decode({"observations": {"gpu": [[1]]}}, Profile)
    with pytest.raises(InvalidDocument, match="list of"):
        decode({"observations": {"gpu": {}}}, Profile)


def test_fields_that_an_older_log_lacks_take_their_defaults():
    old = '{"schema":1,"type":"JobSubmitted","body":{"spec":{"id":"a"}}}'
    assert loads(old) == JobSubmitted(JobSpec("a"))


def change(document, path, value):
    *parents, last = path
    for step in parents:
        document = document[step]
    if value is ...:
        del document[last]
    else:
        document[last] = value


JOB = ("body", "jobs", "a")


@pytest.mark.parametrize(
    ("path", "value", "field", "message"),
    [
        ((*JOB, "phase"), "runing", 'body.jobs["a"].phase', "Did you mean 'running'"),
        ((*JOB, "phase"), 3, 'body.jobs["a"].phase', "is no Phase"),
        ((*JOB, "spec"), ..., 'body.jobs["a"].spec', "is missing"),
        ((*JOB, "spec", "comand"), [], 'body.jobs["a"].spec.comand', "Did you mean 'command'"),
        ((*JOB, "spec", "command"), ["x", 1], 'body.jobs["a"].spec.command[1]', "must be text"),
        ((*JOB, "spec", "command"), "x", 'body.jobs["a"].spec.command', "must be a list"),
        ((*JOB, "spec", "rigid"), 0, 'body.jobs["a"].spec.rigid', "true or false"),
        ((*JOB, "generation"), True, 'body.jobs["a"].generation', "whole number"),
        ((*JOB, "generation"), 1.0, 'body.jobs["a"].generation', "whole number"),
        ((*JOB, "generation"), -1, 'body.jobs["a"].generation', "at least 0"),
        ((*JOB, "submitted_at_s"), "soon", 'body.jobs["a"].submitted_at_s', "must be a number"),
        ((*JOB, "submitted_at_s"), False, 'body.jobs["a"].submitted_at_s', "must be a number"),
        ((*JOB, "submitted_at_s"), float("nan"), 'body.jobs["a"].submitted_at_s', "must be finite"),
        ((*JOB, "submitted_at_s"), 10**400, 'body.jobs["a"].submitted_at_s', "must be finite"),
        ((*JOB, "allocation", "gpus"), {"n": 1}, 'body.jobs["a"].allocation', "must not hold GPUs"),
        ((*JOB, "allocation", "gpus"), {"n": 0}, 'body.jobs["a"].allocation.gpus["n"]', "zeros are left out"),
        ((*JOB, "allocation"), None, 'body.jobs["a"].allocation', "must be an object"),
        (("body", "jobs"), [], "body.jobs", "must be an object"),
        (("body",), 3, "body", "must be an object"),
        (("schema",), 2, "schema", "reads schema 1"),
        (("schema",), True, "schema", "reads schema 1"),
        (("schema",), ..., "document", "not one of our documents"),
        (("type",), "Snapshut", "type", "Did you mean 'Snapshot'"),
        (("type",), None, "type", "is no document type"),
        (("extra",), 1, "document", "has other fields"),
    ],
)
def test_a_bad_document_is_refused_with_the_path_of_the_culprit(path, value, field, message):
    document = json.loads(dumps(SNAPSHOT))
    change(document, path, value)
    with pytest.raises(InvalidDocument, match=message) as caught:
        loads(json.dumps(document))
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "nonsense", b"\xff\xfe\xfa", "[" * 100_000, "[1]", "null", "9" * 5000])
def test_what_is_not_a_document_is_refused(text):
    with pytest.raises(InvalidDocument) as caught:
        loads(text)
    assert len(str(caught.value)) < 400


def test_paths_begin_at_the_root_without_an_envelope():
    with pytest.raises(InvalidDocument) as caught:
        from_json('{"initial_batch_size": 9, "max_batch_size": 8}', BatchLimits)
    assert caught.value.field == "max_per_gpu_batch_size"
    with pytest.raises(InvalidDocument, match="greater than max_batch_size") as caught:
        decode(
            {"limits": {**encode(BatchLimits(8, 8, 1, 8)), "initial_batch_size": 9}},
            JobModel,
        )
    assert caught.value.field == "limits.initial_batch_size"


def test_only_expected_types_are_let_in():
    with pytest.raises(InvalidDocument, match="may stand here"):
        loads(dumps(Plan()), Event)
    with pytest.raises(InvalidDocument, match="Known: Snapshot"):
        loads(dumps(Plan()), Snapshot)
    with pytest.raises(InvalidDocument, match="may stand here"):
        encode(Plan(), Event)
    assert loads(dumps(Plan()), Plan) == Plan()


@pytest.mark.parametrize(
    ("plain", "field"),
    [
        ({"type": "Nothing", "body": {}}, "type"),
        ({"type": 3, "body": {}}, "type"),
        ({"type": "RoundDue"}, "document"),
        ({"type": "RoundDue", "body": {"round": "x"}}, "body.round"),
        (3, "document"),
    ],
)
def test_bad_tags_are_refused(plain, field):
    with pytest.raises(InvalidDocument) as caught:
        decode(plain, Event)
    assert caught.value.field == field


def test_numbers_that_json_lacks_are_refused_when_writing():
    with pytest.raises(InvalidDocument, match="JSON has no such number") as caught:
        encode(FrozenMap({"a": float("nan")}), FrozenMap[str, float])
    assert caught.value.field == '["a"]'


def test_only_registered_classes_can_be_documents():
    with pytest.raises(InvalidDocument, match="Register"):
        dumps(Progress(1.0))

    class Plan:
        pass

    with pytest.raises(TypeError, match="another document type"):
        register(Plan)
    assert register(JobFinished) is JobFinished


@dataclass(frozen=True)
class Odd:
    value: int | str


class Colour(Enum):
    RED = "red"


def test_hints_that_core_does_not_use_are_refused():
    for hint in (Odd, dict[str, int], complex, int | str):
        with pytest.raises(TypeError, match="codec"):
            decode({"value": 1}, hint)


def test_plain_enums_and_optional_unions_work():
    assert decode(encode(Colour.RED), Colour) is Colour.RED
    assert decode(None, Event | None) is None
    assert decode(encode(Phase.RUNNING), Phase) is Phase.RUNNING
    assert decode(encode(RoundDue(1), Event | None), Event | None) == RoundDue(1)


def test_replace_keeps_documents_valid():
    job = replace(SNAPSHOT.jobs["a"], phase=Phase.PAUSED)
    assert loads(dumps(job), Job).phase is Phase.PAUSED
