import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.kinds import registry
from tests.core.strategies import events as core_events
from tests.wire.strategies import entries, entry_at, report_at, state_at

from pollux.core import (
    Allocation,
    BatchLimits,
    BatchWishes,
    Event,
    FrozenMap,
    Job,
    JobFailed,
    JobFinished,
    JobModel,
    JobReported,
    JobRescaled,
    JobSpec,
    JobSubmitted,
    KindProfile,
    KindsImported,
    Node,
    NodeJoined,
    Observation,
    ObservationKey,
    Phase,
    Plan,
    PlanMade,
    Profile,
    Progress,
    ReplicaLost,
    Shape,
    ThroughputFit,
)
from pollux.service import events_text, views
from pollux.wire.answers import from_plain, to_plain
from pollux.wire.api import ClusterView, EventView, JobDetail, JobView, KindView
from pollux.wire.entries import (
    BatchChanged,
    BatchSetting,
    GuardFired,
    JournalEntry,
    LearningRateChanged,
    OutOfMemory,
    ReplicasChanged,
)

from .fake_service import START_S, FakeService

MODEL = JobModel(
    BatchLimits(32, 512, 1, 64),
    throughput=FrozenMap({"gpu": ThroughputFit("paper", FrozenMap(), mean_relative_error=0.07)}),
    progress=Progress(10.0, 1000.0),
    realloc_delay_s=1.5,
)
HELD = Allocation(FrozenMap({"n0": 2, "n1": 1}))


def job_of(**changes) -> Job:
    spec = JobSpec("j", name="train", min_gpus=1, max_gpus=4, env=FrozenMap({"KEY": "hush"}), deadline_s=60.0)
    running = {"phase": Phase.RUNNING, "generation": 3, "issued_generation": 3, "allocation": HELD}
    return dataclasses.replace(Job(spec, START_S, **running, held_since_s=START_S, model=MODEL), **changes)


def ended(phase: Phase) -> Job:
    return job_of(phase=phase, allocation=Allocation(), held_since_s=None, finished_at_s=START_S + 9)


def test_a_running_job_shows_what_its_agent_reports():
    report = report_at(200, goodput=320.0, throughput=400.0, efficiency=0.8, loss=1.5, noise_scale=90.0)
    view = views.job_view(job_of(), report, START_S + 10)
    assert (view.gpus, view.batch_size, view.per_gpu_batch_size, view.learning_rate_factor) == (3, 64, 32, 1.0)
    assert (view.goodput, view.efficiency, view.loss, view.noise_scale) == (320.0, 0.8, 1.5, 90.0)
    assert view.progress == pytest.approx(0.2)
    assert view.eta_s == pytest.approx(800 * 32 / 320)  # 800 iterations of M0 = 32 examples
    assert view.attained_gpu_s == pytest.approx(30)
    assert view.deadline_at_s == START_S + 60


def test_figures_say_on_which_gpus_they_were_measured():
    key, seen = ObservationKey(Shape(1), 32), Observation(0.0, 0, 1.0, 0.0, 1)
    report = dataclasses.replace(report_at(5), profile=Profile().add("emulated-t4", key, seen))
    assert views.job_view(job_of(), report, START_S).gpu_types == ("emulated-t4",)
    assert views.job_view(job_of(), None, START_S).gpu_types == ()


def test_before_the_first_report_the_model_of_the_scheduler_tells_the_progress():
    view = views.job_view(job_of(), None, START_S)
    assert view.progress == pytest.approx(0.01)
    assert view.eta_s is view.batch_size is view.reported_at_s is None


def test_a_report_of_an_earlier_generation_is_still_shown():
    assert views.job_view(job_of(generation=9, issued_generation=9), report_at(5), START_S).step == 5


def test_an_ended_job_keeps_its_last_figures_but_has_no_eta():
    view = views.job_view(ended(Phase.SUCCEEDED), report_at(990, goodput=10.0), START_S + 20)
    assert view.progress == pytest.approx(0.99)
    assert view.goodput == 10.0
    assert view.eta_s is None
    assert view.gpus == 0


@pytest.mark.parametrize(
    "report",
    [
        report_at(5),
        report_at(5, goodput=0.0),
        report_at(5, goodput=5e-324),
        report_at(5, goodput=9.0, state=state_at(5, progress=Progress(5.0))),
    ],
    ids=["no goodput", "none at all", "hardly any", "no end known"],
)
def test_there_is_no_eta_where_it_cannot_be_told(report):
    assert views.job_view(job_of(), report, START_S).eta_s is None


def test_progress_beyond_what_was_expected_is_all():
    report = report_at(5, state=state_at(5, progress=Progress(1200.0, 1000.0)), goodput=1.0)
    view = views.job_view(job_of(), report, START_S)
    assert (view.progress, view.eta_s) == (1.0, 0.0)


def test_a_resizing_job_shows_both_allocations():
    job = job_of(phase=Phase.RESIZING, issued_generation=4, next_allocation=Allocation(FrozenMap({"n1": 2})))
    view = views.job_view(job, None, START_S)
    assert (view.gpus, view.allocation, view.next_allocation) == (3, {"n0": 2, "n1": 1}, {"n1": 2})


def test_the_bounds_of_a_rigid_job_are_its_size():
    spec = JobSpec("j", rigid=True, requested_gpus=2)
    view = views.job_view(Job(spec, START_S), None, START_S, "free GPUs")
    assert (view.name, view.is_rigid, view.min_gpus, view.max_gpus) == ("j", True, 2, 2)
    assert view.waits_for == "free GPUs"


def test_the_detail_names_variables_and_hides_their_values():
    detail = views.job_detail(job_of(), report_at(5), START_S)
    assert detail.env_names == ("KEY",)
    assert "hush" not in json.dumps(to_plain(detail))
    assert (detail.initial_batch_size, detail.max_batch_size, detail.realloc_delay_s) == (32, 512, 1.5)
    assert detail.fit_error == 0.07


def test_before_the_agent_speaks_the_owner_s_wishes_are_shown():
    spec = JobSpec("j", batch=BatchWishes(initial_batch_size=16, max_batch_size=64))
    detail = views.job_detail(Job(spec, START_S), None, START_S)
    assert (detail.initial_batch_size, detail.max_batch_size, detail.fit_error) == (16, 64, None)


def test_the_fit_error_is_that_of_the_gpus_it_runs_on():
    fits = {
        name: ThroughputFit("paper", FrozenMap(), mean_relative_error=error) for name, error in (("a", 1), ("b", 2))
    }
    model = dataclasses.replace(MODEL, throughput=FrozenMap(fits))
    cluster = FakeService().scheduler.state.cluster
    assert views.job_detail(job_of(model=model), None, START_S, cluster=cluster).fit_error is None
    nodes = [dataclasses.replace(node, gpu_type="b") for node in cluster]
    for node in nodes:
        cluster = cluster.with_node(node)
    assert views.job_detail(job_of(model=model), None, START_S, cluster=cluster).fit_error == 2


def test_the_cluster_shows_who_holds_what():
    service = FakeService()
    for name in ("a", "b"):
        service.hear(JobSubmitted(JobSpec(name)))
    service.place(a={"n0": 2, "n1": 1})
    service.drain("n1")
    view = views.cluster_view(service, START_S)
    assert (view.gpus, view.free_gpus, view.num_jobs) == (4, 0, {"running": 1, "pending": 1})
    assert [(node.state, node.free_gpus, node.jobs) for node in view.nodes] == [
        ("ready", 0, {"a": 2}),
        ("drained", 0, {"a": 1}),
    ]
    assert [node.labels for node in view.nodes] == [{}, {}]
    service.undrain("n1")
    assert views.cluster_view(service, START_S).free_gpus == 1
    service.hear(NodeJoined(Node("n1", 2, "x1", FrozenMap({"rack": "r"}))))
    named = views.cluster_view(service, START_S).nodes[1]
    assert (named.gpu_type, named.labels) == ("x1", {"rack": "r"})
    service.away.add("n1")
    assert views.cluster_view(service, START_S).nodes[1].state == "away"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (JobSubmitted(JobSpec("j", name="train", max_gpus=4)), "j: submitted as 'train', wants 1 to 4 GPUs."),
        (JobRescaled("j", 2, None), "j: may have 2 GPUs or more from now on."),
        (JobRescaled("j", 1, 1), "j: may have 1 GPU from now on."),
        (PlanMade(7, Plan(FrozenMap({"j": HELD})), cpu_ms=12.3), "Round 7: 1 job is to hold 3 GPUs, planned in 12 ms."),
        (PlanMade(7, Plan()), "Round 7: nobody is to hold GPUs."),
        (
            ReplicaLost("j", 4, 2, HELD),
            "j: lost replicas, trains on with 3 GPUs (n0: 2, n1: 1), generation 4, membership 2.",
        ),
        (JobReported("j", 4, model=MODEL), "j: reports progress 1.0%, generation 4."),
        (JobFailed("j", 4, "Out of luck.\nTraceback …", 1), "j: failed with exit code 1, generation 4: Out of luck."),
        (KindsImported(registry().kinds), "Profile registry: 1 kind of jobs imported, added to what was there."),
        (
            KindsImported(FrozenMap(), replaces=True),
            "Profile registry: 0 kinds of jobs imported, in place of all that was there.",
        ),
    ],
)
def test_an_event_is_a_sentence(event, text):
    assert events_text.sentence(event) == text


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (
            BatchChanged(1.0, state_at(8), BatchSetting(32, 16), "goodput", 1.25),
            "j: batch size 32 → 64 at step 8 (goodput, goodput × 1.25 expected).",
        ),
        (
            BatchChanged(1.0, state_at(8), BatchSetting(64, 8, 3), "memory"),
            "j: batch size 64 as before, 4 × 8 → 32 a GPU at step 8 (memory).",
        ),
        (ReplicasChanged(1.0, state_at(8), 1, "resized"), "j: 1 → 2 replicas at step 8 (resized)."),
        (LearningRateChanged(1.0, state_at(8), (0.5,)), "j: learning rate × 0.5 → × 1 at step 8."),
        (GuardFired(1.0, state_at(8), "slow"), "j: guard stepped back at step 8: slow."),
        (
            OutOfMemory(1.0, state_at(8), 64, 32),
            "j: out of memory with 64 examples at step 8, at most 32 on one GPU from now on.",
        ),
    ],
)
def test_a_notice_is_a_sentence(notice, text):
    assert events_text.sentence(notice, "j") == text


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(core_events, entries))
def test_every_event_and_notice_has_a_sentence_and_plain_json(document):
    text = events_text.sentence(document, "j")
    assert text.endswith(".")
    assert "\n" not in text
    view = EventView(1, 0.0, type(document).__name__, "j", text, events_text.detail(document))
    assert from_plain(json.loads(json.dumps(to_plain(view))), EventView) == view


def test_no_kind_of_event_was_forgotten():
    source = Path(events_text.__file__).read_text()
    assert [kind.__name__ for kind in get_args(Event | JournalEntry) if f"case {kind.__name__}(" not in source] == []


def test_the_detail_of_a_submission_blanks_the_environment():
    detail = events_text.detail(JobSubmitted(JobSpec("j", env=FrozenMap({"KEY": "hush"}))))
    assert detail["spec"]["env"] == {"KEY": "…"}
    assert "hush" not in json.dumps(to_plain(detail))


def test_measurements_are_only_counted_in_the_detail():
    profile = Profile().add("gpu", ObservationKey(Shape(2), 8), Observation(0.0, 0, 2.0, 0.5, 2))
    assert events_text.detail(JobReported("j", 1, profile))["profile"] == {"gpu": 1}
    assert events_text.detail(JobReported("j", 1))["profile"] is None
    assert events_text.detail(KindsImported(registry().kinds))["kinds"] == {"net": 2}


def test_a_job_says_of_which_kind_it_is():
    job = Job(JobSpec("j"), 0.0)
    assert views.job_detail(job, None, 0.0).kind is None
    told = report_at(1, model=dataclasses.replace(MODEL, fingerprint="mlp-0"))
    assert views.job_detail(job, told, 0.0).kind == "mlp-0"
    assert views.job_detail(dataclasses.replace(job, spec=JobSpec("j", application="net")), told, 0.0).kind == "net"


def test_the_registry_is_told_in_figures():
    (view,) = views.kind_list(registry().kinds).kinds
    assert view == KindView("net", 3, 2, ("t4",), 4, 3200.0, 2.0, 5.0)
    (view,) = views.kind_list(FrozenMap({"net": KindProfile()})).kinds
    assert (view.max_gpus, view.work, view.realloc_delay_s) == (0, None, None)


def test_an_event_view_of_a_notice_says_whose_it_is():
    service = FakeService()
    service.log.note(START_S, entry_at(5), "j")
    view = views.event_view(service.log.stored[-1])
    assert (view.job, view.kind, view.text) == ("j", "CheckpointSaved", "j: checkpoint checkpoints/5 saved, step 5.")


@pytest.mark.parametrize("kind", [JobView, JobDetail, ClusterView])
def test_an_answer_reads_back_equal_and_fields_from_the_future_are_passed_over(kind):
    service = FakeService()
    made = {
        JobView: views.job_view(job_of(), report_at(5), START_S),
        JobDetail: views.job_detail(ended(Phase.FAILED), report_at(5), START_S),
        ClusterView: views.cluster_view(service, START_S),
    }[kind]
    plain = json.loads(json.dumps(to_plain(made)))
    assert from_plain(plain, kind) == made
    assert from_plain({**plain, "from_the_future": [1]}, kind) == made


def test_a_finished_event_is_told():
    assert events_text.sentence(JobFinished("j", 2)) == "j: finished, generation 2."
