import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.core import (
    BatchLimits,
    FrozenMap,
    JobModel,
    JobReported,
    Observation,
    ObservationKey,
    Profile,
    Progress,
    RoundDue,
    Shape,
    dumps,
    loads,
)
from pollux.core.codec import _TYPES
from pollux.errors import InvalidDocument, InvalidSpec
from pollux.wire.entries import (
    BatchChanged,
    BatchSetting,
    GuardFired,
    JournalEntry,
    LearningRateChanged,
    RunState,
    TrainingResumed,
    TrainingStarted,
    surviving,
)
from pollux.wire.messages import MAX_MESSAGE_BYTES, AgentReport, finite, pack, unpack

from .node_strategies import NODE_MESSAGES
from .strategies import ENTRIES, entry_at, report_at, reports, state_at

MODEL = JobModel(BatchLimits(32, 512, 1, 64), progress=Progress(1.0))
PROFILE = Profile().add("gpu", ObservationKey(Shape(2), 8), Observation(0.0, 0, 2.0, 0.5, 2))


@pytest.mark.parametrize("kind", ENTRIES, ids=lambda kind: kind.__name__)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_entry_reads_back_equal(kind, data):
    entry = data.draw(ENTRIES[kind])
    text = dumps(entry)
    assert "\n" not in text
    assert loads(text, JournalEntry) == entry
    assert dumps(loads(text)) == text
    assert hash(pickle.loads(pickle.dumps(entry))) == hash(entry)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(reports)
def test_a_report_reads_back_equal(report):
    body = pack(report)
    assert unpack(body, AgentReport) == report
    assert pack(unpack(body, AgentReport)) == body


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(reports)
def test_a_report_becomes_the_event_that_the_scheduler_hears(report):
    event = report.as_event(cause="POST /v1/reports")
    assert loads(dumps(event), JobReported) == event
    assert (event.job, event.generation, event.profile) == (report.job, report.generation, report.profile)
    assert (event.model is None) == (report.model is None)
    if report.model is not None:
        assert event.model == replace(report.model, progress=report.state.progress)


def test_every_document_of_this_room_has_a_strategy():
    ours = {kind for kind in _TYPES.values() if kind.__module__.startswith("pollux.wire.")}
    assert ours == {*ENTRIES, AgentReport, *NODE_MESSAGES}


def test_the_envelope_names_type_and_schema():
    document = json.loads(pack(report_at(7, profile=PROFILE, model=MODEL)))
    assert (document["type"], document["schema"]) == ("AgentReport", 1)
    assert document["body"]["state"]["batch"] == {"batch_size": 64, "per_gpu_batch_size": 32, "accumulation_steps": 0}


def test_a_report_of_an_older_agent_lacks_fields_that_have_defaults():
    body = json.loads(pack(report_at(7)))["body"]
    short = {name: body[name] for name in ("job", "generation", "sent_at_s", "state")}
    assert unpack(json.dumps({"schema": 1, "type": "AgentReport", "body": short}).encode(), AgentReport) == report_at(7)


def test_what_is_too_large_is_neither_sent_nor_read():
    many = tuple(GuardFired(0.0, state_at(0), "x" * 5000) for _ in range(MAX_MESSAGE_BYTES // 5000))
    with pytest.raises(InvalidDocument, match="larger than"):
        pack(report_at(1, notices=many))
    with pytest.raises(InvalidDocument, match="larger than"):
        unpack(b" " * (MAX_MESSAGE_BYTES + 1), AgentReport)


def test_ten_thousand_observations_fit_into_a_message():
    seen = Observation(1 / 3e3, 123456, 1 / 7e-3, 1 / 7e3, 123456)
    of_type = FrozenMap({ObservationKey(Shape(64, 16), size): seen for size in range(100_000, 110_000)})
    assert len(pack(report_at(1, profile=Profile(FrozenMap({"gpu": of_type}))))) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", dumps(RoundDue(1)).encode(), b'{"schema":9}'])
def test_what_is_not_a_report_is_refused(body):
    with pytest.raises(InvalidDocument):
        unpack(body, AgentReport)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"job": ""}, "job"),
        ({"generation": 0}, "generation"),
        ({"sent_at_s": float("nan")}, "sent_at_s"),
        ({"state": None}, "state"),
        ({"profile": {}}, "profile"),
        ({"model": 1}, "model"),
        ({"loss": float("inf")}, "loss"),
        ({"throughput": -1.0}, "throughput"),
        ({"efficiency": float("nan")}, "efficiency"),
        ({"goodput": "fast"}, "goodput"),
        ({"noise_scale": -1.0}, "noise_scale"),
        ({"notices": [entry_at(1)]}, "notices"),
        ({"notices": (entry_at(1), "x")}, "notices[1]"),
        ({"notices_dropped": -1}, "notices_dropped"),
    ],
)
def test_a_bad_report_is_refused_with_its_field(changes, field):
    with pytest.raises(InvalidSpec) as caught:
        report_at(1, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BatchSetting(0, 1), "batch_size"),
        (lambda: BatchSetting(1, 0), "per_gpu_batch_size"),
        (lambda: BatchSetting(1, 1, -1), "accumulation_steps"),
        (lambda: replace(state_at(1), step=-1), "step"),
        (lambda: state_at(1, progress=1.0), "progress"),
        (lambda: state_at(1, replicas=0), "replicas"),
        (lambda: state_at(1, batch=64), "batch"),
        (lambda: state_at(1, learning_rate_factors=[1.0]), "learning_rate_factors"),
        (lambda: state_at(1, learning_rate_factors=(1.0, float("nan"))), "learning_rate_factors[1]"),
        (lambda: state_at(1, data_pass=-1), "data_pass"),
        (lambda: state_at(1, data_offset=0.5), "data_offset"),
        (lambda: TrainingStarted(float("inf"), state_at(0)), "at_s"),
        (lambda: TrainingStarted(0.0, None), "state"),
        (lambda: TrainingResumed(0.0, state_at(0), ""), "checkpoint"),
        (lambda: BatchChanged(0.0, state_at(0), 64, "more GPUs"), "before"),
        (lambda: BatchChanged(0.0, state_at(0), BatchSetting(1, 1), "tuned", float("nan")), "predicted_gain"),
        (lambda: LearningRateChanged(0.0, state_at(0), (-1.0,)), "before[0]"),
        (lambda: GuardFired(0.0, state_at(0), "slow", FrozenMap({"ratio": float("nan")})), 'figures["ratio"]'),
    ],
)
def test_a_bad_entry_is_refused_with_its_field(make, field):
    with pytest.raises(InvalidSpec) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("value", "sent"),
    [(None, None), (0.0, 0.0), (-2.5, -2.5), (float("nan"), None), (float("-inf"), None)],
)
def test_a_number_that_no_message_may_carry_becomes_none(value, sent):
    assert finite(value) == sent


def taken(batch_size, step, offset, kind=TrainingStarted, **more) -> JournalEntry:
    setting = BatchSetting(batch_size, batch_size)
    return kind(0.0, RunState(step, Progress(0.0), 1, setting, (1.0,), 0, offset), **more)


def samples_by_step(entries, steps):
    """Replays a journal: which samples each step took, by the state that the newest entry before it gives."""
    kept, found = surviving(entries), {}
    for step in range(steps):
        state = [entry.state for entry in kept if entry.state.step <= step][-1]
        start = state.data_offset + (step - state.step) * state.batch.batch_size
        found[step] = range(start, start + state.batch.batch_size)
    return found


def test_the_journal_is_enough_to_replay_a_run_with_a_crash_in_it():
    before = BatchSetting(2, 2)
    entries = [
        taken(2, 0, 0, seed=1),
        taken(4, 3, 6, BatchChanged, before=before, reason="tuned"),
        taken(8, 5, 14, BatchChanged, before=before, reason="tuned"),
        taken(4, 4, 10, TrainingResumed, checkpoint="c/4"),
        taken(1, 6, 18, BatchChanged, before=before, reason="guard"),
    ]
    took = samples_by_step(entries, 8)
    assert [sample for step in took.values() for sample in step] == list(range(20))
    assert [len(step) for step in took.values()] == [2, 2, 2, 4, 4, 4, 1, 1]


def test_a_run_from_the_beginning_forgets_the_one_before():
    again = taken(2, 0, 0, seed=2)
    assert surviving([taken(2, 0, 0, seed=1), entry_at(9), again]) == [again]


def test_importing_it_loads_no_third_party_module():
    script = (
        "import sys; before = set(sys.modules)\n"
        "import pollux.wire\n"
        "print(*({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {'pollux'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
