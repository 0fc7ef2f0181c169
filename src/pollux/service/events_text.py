"""Each event and each notice of an agent as one sentence for people, and as plain JSON without secrets.

A sentence uses what the event itself holds and no more: it reads the same whenever it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, assert_never

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobRecovered,
    JobReported,
    JobRescaled,
    JobResumed,
    JobSpec,
    JobStopped,
    JobSubmitted,
    KindsImported,
    NodeDrained,
    NodeJoined,
    NodeLost,
    Phase,
    PlanMade,
    ReplicaLost,
    ReplicasReady,
    RoundDue,
    encode,
)
from pollux.wire.entries import (
    BatchChanged,
    BatchSetting,
    CheckpointSaved,
    Entry,
    GuardFired,
    JournalEntry,
    LearningRateChanged,
    OutOfMemory,
    ReplicasChanged,
    TrainingFinished,
    TrainingResumed,
    TrainingStarted,
    TrainingStopped,
)

Document: TypeAlias = Event | JournalEntry

BLANK = "…"
"""What stands for the value of an environment variable."""
MAX_QUOTE = 160
"""Letters of a reason that a sentence quotes; the rest is in the detail."""


def sentence(document: Document, job: str = "") -> str:
    """What happened, in one line. `job` is whom a notice is about: it does not know itself."""
    text = _notice(document, job) if isinstance(document, Entry) else _event(document)
    # Reasons and names come from outside: nothing of them may move the cursor of a terminal.
    return "".join(letter if letter.isprintable() else " " for letter in text)


def detail(document: Document) -> FrozenMap[str, object]:
    """The document as plain JSON: values of environment variables blanked out, measurements only counted."""
    if isinstance(document, JobReported) and document.profile is not None:
        plain: dict[str, Any] = encode(replace(document, profile=None))
        plain["profile"] = {kind: len(found) for kind, found in document.profile.observations.items()}
        return FrozenMap(plain)
    if isinstance(document, KindsImported):
        plain = encode(replace(document, kinds=FrozenMap()))
        plain["kinds"] = {kind: len(found.profile) for kind, found in document.kinds.items()}
        return FrozenMap(plain)
    plain = encode(document)
    if isinstance(document, JobSubmitted | JobRecovered):
        plain["spec"]["env"] = dict.fromkeys(document.spec.env, BLANK)
    return FrozenMap(plain)


def _event(event: Event) -> str:
    match event:
        case JobRecovered(spec):
            return f"{spec.id}: found again, which the log had lost: {_recovered(event)}{_because(event.cause)}."
        case JobSubmitted(spec):
            return f"{spec.id}: submitted{_named(spec)}, wants {_wish(spec)}."
        case JobCancelled(job):
            return f"{job}: to be cancelled{_because(event.cause)}."
        case JobPaused(job):
            return f"{job}: to be paused{_because(event.cause)}."
        case JobResumed(job):
            return f"{job}: resumed{_because(event.cause)}."
        case JobRescaled(job, fewest, most):
            return f"{job}: may have {_bounds(fewest, most)} from now on."
        case NodeJoined(node):
            state = "" if node.schedulable else ", drained"
            return f"Node {node.id}: there with {_gpus(node.num_gpus)} of type {node.gpu_type}{state}."
        case NodeLost(node_id):
            return f"Node {node_id}: lost{_because(event.cause)}."
        case NodeDrained(node_id):
            return f"Node {node_id}: drained, takes nothing new{_because(event.cause)}."
        case RoundDue(number):
            return f"Round {number}: planning begins{_because(event.cause)}."
        case PlanMade(number, plan):
            return f"Round {number}: {_plan(list(plan.allocations.values()))}{_cost(event)}."
        case ReplicasReady(job, generation):
            return f"{job}: generation {generation} runs."
        case GenerationAbandoned(job, generation, reason):
            return f"{job}: generation {generation} was given up{_because(reason)}."
        case ReplicaLost(job, generation, membership, survivors):
            left = f"{_gpus(survivors.num_gpus)} ({_places(survivors)})"
            return f"{job}: lost replicas, trains on with {left}, generation {generation}, membership {membership}."
        case JobReported(job, generation):
            return f"{job}: reports {_reported(event)}, generation {generation}."
        case JobStopped(job, generation):
            return f"{job}: has stopped, generation {generation}{_because(event.cause)}."
        case JobFinished(job, generation):
            return f"{job}: finished, generation {generation}."
        case JobFailed(job, generation, reason, exit_code):
            code = "" if exit_code is None else f" with exit code {exit_code}"
            return f"{job}: failed{code}, generation {generation}{_because(_last_word(reason))}."
        case KindsImported(kinds):
            count = "1 kind" if len(kinds) == 1 else f"{len(kinds)} kinds"
            how = "in place of all that was there" if event.replaces else "added to what was there"
            return f"Profile registry: {count} of jobs imported, {how}."
        case _:
            assert_never(event)


def _recovered(event: JobRecovered) -> str:
    if event.outcome is not None:
        return f"it has {'been cancelled' if event.outcome is Phase.CANCELLED else event.outcome}"
    if event.trains:
        return f"it trains on {_places(event.allocation)}, generation {event.generation}"
    if event.allocation:
        return f"it runs on {_places(event.allocation)}, generation {event.generation}, saves and starts anew"
    return f"it waits, after generation {event.generation}" if event.generation else "it waits"


def _notice(notice: JournalEntry, job: str) -> str:
    state = notice.state
    at = f"at step {state.step}"
    match notice:
        case TrainingStarted():
            text = f"training starts with {_replicas(state.replicas)}, {_batch(state.batch)}"
        case TrainingResumed():
            text = f"training goes on {at} from checkpoint {notice.checkpoint}"
        case BatchChanged():
            gain = "" if notice.predicted_gain is None else f", goodput × {notice.predicted_gain:.3g} expected"
            text = f"{_batch_change(notice.before, state.batch)} {at} ({_quote(notice.reason)}{gain})"
        case ReplicasChanged():
            text = f"{notice.before} → {_replicas(state.replicas)} {at} ({_quote(notice.reason)})"
        case LearningRateChanged():
            text = f"learning rate × {_factors(notice.before)} → × {_factors(state.learning_rate_factors)} {at}"
        case GuardFired():
            text = f"guard {notice.kind.replace('_', ' ')} {at}: {_quote(notice.reason)}"
        case OutOfMemory():
            bound = f"at most {notice.max_per_gpu_batch_size} on one GPU from now on"
            text = f"out of memory with {notice.tried} examples {at}, {bound}"
        case CheckpointSaved():
            text = f"checkpoint {notice.checkpoint} saved, step {state.step}"
        case TrainingFinished():
            text = f"training finished {at}{_because(notice.reason)}"
        case TrainingStopped():
            text = f"training stopped {at}{_because(notice.reason)}"
        case _:
            assert_never(notice)
    return f"{job}: {text}." if job else f"{text[0].upper()}{text[1:]}."


def _named(spec: JobSpec) -> str:
    return f" as {spec.name!r}" if spec.name and spec.name != spec.id else ""


def _wish(spec: JobSpec) -> str:
    kind = "" if spec.gpu_type is None else f" of type {spec.gpu_type}"
    return f"{_bounds(*spec.gpu_bounds)}{kind}"


def _bounds(fewest: int, most: int | None) -> str:
    if most is None:
        return f"{_gpus(fewest)} or more"
    return _gpus(most) if fewest == most else f"{fewest} to {_gpus(most)}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _places(allocation: Allocation) -> str:
    return ", ".join(f"{node}: {count}" for node, count in allocation.gpus.items())


def _plan(allocations: list[Allocation]) -> str:
    if not allocations:
        return "nobody is to hold GPUs"
    jobs = "1 job is" if len(allocations) == 1 else f"{len(allocations)} jobs are"
    return f"{jobs} to hold {_gpus(sum(allocation.num_gpus for allocation in allocations))}"


def _cost(event: PlanMade) -> str:
    cost = "" if event.cpu_ms is None else f", planned in {event.cpu_ms:.0f} ms"
    return f"{cost}, search cut short" if event.stopped_early else cost


def _reported(event: JobReported) -> str:
    progress = None if event.model is None else event.model.progress
    if progress is not None and progress.total:
        return f"progress {min(progress.done / progress.total, 1.0):.1%}"
    return "a model" if event.model is not None else "measurements" if event.profile is not None else "nothing new"


def _batch(batch: BatchSetting) -> str:
    passes = f" in {batch.accumulation_steps + 1} passes" if batch.accumulation_steps else ""
    return f"batch size {batch.batch_size} ({batch.per_gpu_batch_size} on each GPU{passes})"


def _batch_change(before: BatchSetting, after: BatchSetting) -> str:
    if before.batch_size != after.batch_size:
        return f"batch size {before.batch_size} → {after.batch_size}"
    return f"batch size {after.batch_size} as before, {_cut(before)} → {_cut(after)} a GPU"


def _cut(batch: BatchSetting) -> str:
    """The share of a GPU: how many passes of how many examples."""
    passes = f"{batch.accumulation_steps + 1} × " if batch.accumulation_steps else ""
    return f"{passes}{batch.per_gpu_batch_size}"


def _factors(factors: tuple[float, ...]) -> str:
    return " / ".join(f"{factor:.3g}" for factor in factors) or "1"


def _because(reason: str) -> str:
    return f": {_quote(reason)}" if reason else ""


def _last_word(reason: str) -> str:
    """Of the end of a log that a reason quotes, its last line: that is where the error is."""
    what, _, quote = reason.partition(" Last lines of ")
    last = quote.rpartition(" | ")[2] if " | " in quote else quote.partition(": ")[2]
    return f"{what.rstrip('.')}: {last}" if last else reason


def _quote(reason: str) -> str:
    """The first line, of bearable length, fit to stand before a full stop."""
    lines = reason.strip().splitlines()
    line = lines[0].strip() if lines else ""
    return line.rstrip(".") if len(line) <= MAX_QUOTE else f"{line[: MAX_QUOTE - 1]}…"
