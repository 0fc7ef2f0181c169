"""Hypothesis strategies for what replicas, daemons and the service say to each other."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.core.strategies import (
    allocations,
    counts,
    events,
    generations,
    held_allocations,
    maps,
    maybe,
    names,
    sizes,
    texts,
    times,
)
from tests.wire.strategies import reports

from pollux.core import StopReason
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    Forget,
    HostStore,
    Kill,
    Launch,
    ListLogs,
    ListReplicas,
    ListRuns,
    LogHere,
    LogPart,
    LogsHere,
    NodeDescription,
    ReadLog,
    Refused,
    ReplicaHere,
    ReplicaList,
    ReplicaNews,
    ReportNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunPhase,
    Runs,
    RunStatus,
    Seat,
    Spawn,
    StopRun,
    StoreAt,
    Tell,
    Watch,
)
from pollux.wire.replicas import Join, Leave, ReplicaPhase, ReplicaStatus

flags = st.booleans()
job_names = names.map(lambda name: "j" + "".join(filter(str.isalnum, name)))
exit_codes = maybe(st.integers(-64, 255))


@st.composite
def joins(draw):
    rank = draw(st.integers(0, 63))
    size = draw(st.integers(rank + 1, 64))
    what = (draw(names), draw(generations), draw(counts), rank, size, draw(sizes), draw(names))
    return Join(*what, is_repair=draw(flags), takes_from_leaver=draw(flags))


leaves = st.builds(Leave, names, generations, counts, texts, flags)
instructions = st.one_of(joins(), leaves)
statuses = st.builds(
    ReplicaStatus, names, names, sizes, st.sampled_from(ReplicaPhase), generations, counts, counts, flags, times
)
scripts = st.builds(Launch, job_names, names, st.lists(texts, max_size=2).map(tuple), names, maps(names, texts), texts)
commands = st.builds(Launch, job_names, names, is_plain=st.just(True), gpus=sizes)
launches = st.one_of(scripts, commands)
seats = st.builds(Seat, names, counts, sizes, sizes, flags)
replicas = st.builds(ReplicaHere, names, generations, sizes, maybe(statuses), exit_codes, texts, texts)
runs = st.builds(
    RunStatus,
    names,
    st.sampled_from(RunPhase),
    generations,
    counts,
    generations,
    allocations,
    counts,
    st.lists(statuses, max_size=2).map(tuple),
)
addresses = maps(names, names)
logs = st.builds(LogHere, names, counts, flags, times)

NODE_MESSAGES = {
    Join: joins(),
    Leave: leaves,
    ReplicaStatus: statuses,
    Launch: launches,
    RunJob: st.builds(RunJob, names, generations, launches, held_allocations, addresses, texts),
    ResizeRun: st.builds(ResizeRun, names, generations, held_allocations, addresses, texts),
    StopRun: st.builds(StopRun, names, generations, st.sampled_from(StopReason)),
    ListRuns: st.just(ListRuns()),
    RunStatus: runs,
    Runs: st.lists(runs, max_size=2).map(tuple).map(Runs),
    DescribeNode: st.just(DescribeNode()),
    NodeDescription: st.builds(
        NodeDescription, names, sizes, texts, counts, names, st.lists(names, max_size=2).map(tuple)
    ),
    Seat: seats,
    Spawn: st.builds(
        Spawn, names, generations, launches, st.lists(seats, max_size=2).map(tuple), names, st.none() | texts
    ),
    Tell: st.builds(Tell, names, names, instructions, st.none() | texts),
    Kill: st.builds(Kill, names, names, st.sampled_from([9, 15])),
    HostStore: st.builds(HostStore, names),
    StoreAt: st.builds(StoreAt, names),
    Forget: st.builds(Forget, names, generations),
    ListReplicas: st.builds(ListReplicas, names),
    ReplicaHere: replicas,
    ReplicaList: st.lists(replicas, max_size=2).map(tuple).map(ReplicaList),
    ListLogs: st.builds(ListLogs, names),
    LogHere: logs,
    LogsHere: st.lists(logs, max_size=2).map(tuple).map(LogsHere),
    ReadLog: st.builds(ReadLog, names, names, st.integers(-1000, 1000), sizes),
    LogPart: st.builds(LogPart, texts, counts),
    Watch: st.builds(Watch, texts, flags),
    Done: st.just(Done()),
    Refused: st.builds(Refused, texts, flags),
    ReplicaNews: st.builds(ReplicaNews, names, names, replicas, flags),
    RunNews: st.builds(RunNews, times, events),
    ReportNews: st.builds(ReportNews, reports),
}
