"""Hypothesis strategies for every type of core; other test folders may use them."""

from __future__ import annotations

import dataclasses
from typing import get_args

from hypothesis import strategies as st

from pollux.core import (
    Action,
    Allocation,
    BatchLimits,
    BatchWishes,
    Cluster,
    Event,
    FrozenMap,
    GenerationAbandoned,
    GradientStats,
    GradientSums,
    Job,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobModel,
    JobPaused,
    JobRecovered,
    JobReported,
    JobRescaled,
    JobResumed,
    JobSpec,
    JobStopped,
    JobSubmitted,
    KindProfile,
    KindsImported,
    MakePlan,
    Node,
    NodeDrained,
    NodeJoined,
    NodeLost,
    Observation,
    ObservationKey,
    Oracle,
    Phase,
    Plan,
    PlanMade,
    Profile,
    ProfileRegistry,
    Progress,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    Shape,
    Snapshot,
    StartJob,
    StopJob,
    StopReason,
    Tally,
    ThroughputFit,
)

# A few letters with all that is awkward in JSON; the whole of Unicode takes seconds to prepare and finds no more.
LETTERS = 'abz09 ._-/"\\\n\0é→\u2028\ud800\U0001f600'
texts = st.text(LETTERS, max_size=8)
names = st.text(LETTERS, min_size=1, max_size=6)
counts = st.integers(0, 10**6)
sizes = st.integers(1, 10**5)
times = st.floats(-1e9, 1e9, allow_nan=False)
amounts = st.floats(0, 1e12, allow_nan=False)
generations = st.integers(1, 10**6)


def maps(keys, values, max_size=3):
    return st.dictionaries(keys, values, max_size=max_size).map(FrozenMap)


def maybe(strategy):
    return st.none() | strategy


nodes = st.builds(
    Node,
    names,
    st.integers(1, 16),
    names,
    maps(st.just("rack") | names, texts),
    st.booleans(),
)
clusters = st.lists(nodes, max_size=4, unique_by=lambda node: node.id).map(lambda found: Cluster.of(*found))


@st.composite
def shapes(draw):
    racks = draw(st.integers(1, 4))
    num_nodes = draw(st.integers(racks, 16))
    return Shape(draw(st.integers(num_nodes, 64)), num_nodes, racks)


allocations = st.dictionaries(names, st.integers(0, 8), max_size=4).map(Allocation.of)
held_allocations = st.dictionaries(names, st.integers(1, 8), min_size=1, max_size=4).map(Allocation.of)

keys = st.builds(ObservationKey, shapes(), sizes)


@st.composite
def observations(draw):
    accum_count, sync_count = draw(counts), draw(counts)
    accum = draw(amounts) if accum_count else 0.0
    sync_pass = draw(amounts) if sync_count else 0.0
    return Observation(accum, accum_count, sync_pass, draw(st.floats(0, sync_pass)), sync_count)


profiles = maps(names, maps(keys, observations()), max_size=2).map(Profile)


@st.composite
def limits(draw):
    initial, per_gpu = draw(sizes), draw(sizes)
    return BatchLimits(initial, draw(st.integers(initial, 10**6)), per_gpu, draw(st.integers(per_gpu, 10**6)))


@st.composite
def wishes(draw):
    least, initial, per_gpu, most = sorted(draw(st.lists(sizes, min_size=4, max_size=4)))
    return BatchWishes(*(draw(maybe(st.just(size))) for size in (initial, most, least, per_gpu)))


gradients = st.tuples(amounts, amounts).filter(any).map(lambda pair: GradientStats(*pair))


@st.composite
def fits(draw):
    params = draw(maps(names, times))
    priors = draw(st.sets(st.sampled_from(list(params)))) if params else set()
    return ThroughputFit(
        draw(names), params, tuple(sorted(priors)), draw(amounts), draw(st.booleans()), draw(counts), draw(counts)
    )


@st.composite
def progresses(draw):
    total = draw(maybe(amounts))
    return Progress(draw(amounts), total, None if total is None else draw(maybe(amounts)))


models = st.builds(
    JobModel,
    limits(),
    maybe(gradients),
    maps(names, fits(), max_size=2),
    maybe(progresses()),
    maybe(amounts),
    maybe(names),
)


@st.composite
def specs(draw):
    min_gpus = draw(st.integers(1, 8))
    requested_gpus, requested_batch_size = draw(maybe(st.integers(1, 64))), draw(maybe(sizes))
    return JobSpec(
        id=draw(names),
        name=draw(texts),
        command=tuple(draw(st.lists(names, max_size=3))),
        working_dir=draw(texts),
        env=draw(maps(names, texts)),
        checkpoint_dir=draw(texts),
        application=draw(maybe(names)),
        min_gpus=min_gpus,
        max_gpus=draw(maybe(st.integers(min_gpus, 64))),
        gpu_type=draw(maybe(names)),
        requested_gpus=requested_gpus,
        rigid=requested_gpus is not None and draw(st.booleans()),
        single_node=draw(st.booleans()),
        preemptible=draw(st.booleans()),
        limits=draw(maybe(limits())),
        batch=draw(wishes()),
        requested_batch_size=requested_batch_size,
        fixed_batch=draw(st.booleans()),
        priority=draw(st.integers(-9, 9)),
        team=draw(texts),
        deadline_s=draw(maybe(st.floats(1e-3, 1e9))),
        retries=draw(st.integers(0, 9)),
    )


@st.composite
def jobs(draw):
    phase = draw(st.sampled_from(Phase))
    generation = draw(counts)
    leaves = phase in (Phase.STOPPING, Phase.PAUSING, Phase.CANCELLING)
    target = held_allocations if phase is Phase.RESIZING else maybe(held_allocations) if leaves else st.none()
    return Job(
        spec=draw(specs()),
        submitted_at_s=draw(times),
        sequence=draw(counts),
        phase=phase,
        generation=generation,
        issued_generation=generation + draw(st.integers(0, 3)),
        membership=draw(counts),
        allocation=draw(held_allocations) if phase.holds_gpus else Allocation(),
        next_allocation=draw(target),
        model=draw(maybe(models)),
        profile=draw(profiles),
        num_reallocations=draw(counts),
        num_failures=draw(counts),
        attained_gpu_s=draw(amounts),
        held_since_s=draw(times) if phase.holds_gpus else None,
        first_started_at_s=draw(maybe(times)),
        retry_at_s=draw(maybe(times)),
        finished_at_s=draw(times) if phase.is_terminal else None,
        exit_reason=draw(texts),
        exit_code=draw(maybe(st.integers(-64, 255))),
    )


gradient_sums = st.builds(lambda seen, count: GradientSums(seen.sqr, seen.var, count), gradients, sizes)
tallies = st.just(Tally()) | st.builds(Tally, sizes, amounts, amounts)
kind_profiles = st.builds(
    KindProfile,
    profiles,
    counts,
    maps(st.integers(0, 19), gradient_sums),
    tallies,
    tallies,
    maybe(limits()),
    times,
)
kinds = maps(names, kind_profiles, max_size=2)

oracles = st.builds(Oracle, maybe(amounts), maybe(amounts), maps(shapes(), amounts))


@st.composite
def snapshots(draw, job_strategy=None):
    found = draw(st.lists(job_strategy or jobs(), max_size=2, unique_by=lambda job: job.id))
    return Snapshot(
        draw(times),
        draw(counts),
        draw(clusters),
        FrozenMap({job.id: job for job in found}),
        draw(maybe(maps(names, oracles, max_size=2))),
        draw(kinds),
    )


plans = maps(names, held_allocations).map(Plan)

_FIELDS = {
    JobSubmitted: {"spec": specs()},
    JobRecovered: {
        "spec": specs(),
        "submitted_at_s": times,
        "allocation": held_allocations,
        "trains": st.booleans(),
        "finished_at_s": maybe(times),
        "num_failures": st.integers(0, 3),
        "membership": st.integers(0, 3),
        "outcome": maybe(st.sampled_from([Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED])),
        "reason": texts,
        "exit_code": maybe(st.integers(-64, 255)),
    },
    JobRescaled: {"min_gpus": st.integers(1, 4), "max_gpus": maybe(st.integers(4, 64))},
    NodeJoined: {"node": nodes},
    NodeLost: {"node": names},
    NodeDrained: {"node": names},
    RoundDue: {"round": counts},
    PlanMade: {
        "round": counts,
        "plan": plans,
        "stopped_early": st.booleans(),
        "cpu_ms": maybe(amounts),
        "stats": maps(names, times),
    },
    GenerationAbandoned: {"reason": texts},
    ReplicaLost: {"membership": generations, "survivors": held_allocations},
    JobReported: {"profile": maybe(profiles), "model": maybe(models)},
    JobFailed: {"reason": texts, "exit_code": maybe(st.integers(-64, 255)), "may_retry": st.booleans()},
    JobCancelled: {},
    JobPaused: {},
    JobResumed: {},
    ReplicasReady: {},
    JobStopped: {},
    JobFinished: {},
    KindsImported: {"kinds": kinds, "replaces": st.booleans()},
    MakePlan: {"round": counts, "snapshot": snapshots(), "seed": counts},
    StartJob: {"allocation": held_allocations},
    ResizeJob: {"allocation": held_allocations},
    StopJob: {"reason": st.sampled_from(StopReason)},
}


def message(kind):
    """Events or actions of one class."""
    shared = {"cause": texts, "job": names, "generation": generations}
    present = {field.name for field in dataclasses.fields(kind)}
    return st.builds(kind, **_FIELDS[kind], **{name: shared[name] for name in shared.keys() & present})


EVENT_TYPES = get_args(Event)
ACTION_TYPES = get_args(Action)
events = st.one_of(*map(message, EVENT_TYPES))
actions = st.one_of(*map(message, ACTION_TYPES))

DOCUMENTS = {
    **{kind: message(kind) for kind in (*EVENT_TYPES, *ACTION_TYPES)},
    Allocation: allocations,
    Cluster: clusters,
    Job: jobs(),
    JobModel: models,
    JobSpec: specs(),
    Node: nodes,
    Plan: plans,
    Profile: profiles,
    ProfileRegistry: st.builds(ProfileRegistry, kinds, texts),
    Shape: shapes(),
    Snapshot: snapshots(),
}
"""Every type that can be a document of its own, and how to draw one."""
