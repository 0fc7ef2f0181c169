"""When rounds are due: each interval, and sooner where GPUs lie idle while a job waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pollux.core import (
    Allocation,
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobId,
    JobReported,
    JobSpec,
    JobSubmitted,
    Node,
    NodeDrained,
    NodeId,
    NodeJoined,
    Plan,
    PlanMade,
    ReplicasReady,
    RoundDue,
)
from pollux.scheduler import Scheduler, SchedulerOptions
from pollux.scheduler.rounds import RoundTimes, is_somebody_waiting, num_free

INTERVAL, GAP = 60.0, 5.0
A, B = JobId("a"), JobId("b")


class Clocked:
    """A scheduler with one node of two GPUs, and the times of its rounds; `tell` says what happens when."""

    def __init__(self, gather_s: float = 0.0, options: SchedulerOptions | None = None) -> None:
        self.scheduler = Scheduler(options=options)
        self.times = RoundTimes(INTERVAL, GAP, gather_s, 0.0)
        self.tell(0.0, NodeJoined(Node(NodeId("n"), 2)))

    def tell(self, now_s: float, *events: Event) -> None:
        for event in events:
            self.scheduler.handle(event, now_s)
            self.times.note(event, self.scheduler.state, now_s)

    def round(self, now_s: float, **gpus: int) -> None:
        """One that is due, and gives out so many GPUs."""
        assert self.times.next_s <= now_s
        self.times.begin(now_s)
        number = self.scheduler.state.round + 1
        plan = Plan.of({JobId(job): Allocation.of({NodeId("n"): count}) for job, count in gpus.items()})
        self.tell(now_s, RoundDue(number), PlanMade(number, plan))

    @property
    def next_s(self) -> float:
        return self.times.next_s


def submitted(job: JobId, **spec: object) -> JobSubmitted:
    return JobSubmitted(JobSpec(job, **spec))  # type: ignore[arg-type]


class TestTheInterval:
    def test_the_first_round_is_due_at_once(self) -> None:
        assert RoundTimes(INTERVAL, GAP, 0.0, 17.0).next_s == 17.0

    def test_it_counts_from_the_last_round_whatever_that_came_for(self) -> None:
        clocked = Clocked()
        clocked.round(0.0)
        assert clocked.next_s == 60.0
        clocked.tell(20.0, submitted(A))
        clocked.round(20.0, a=1)
        assert clocked.next_s == 80.0

    def test_a_round_that_is_late_moves_those_after_it(self) -> None:
        clocked = Clocked()
        clocked.round(3.5)
        assert clocked.next_s == 63.5


class TestEarlyRounds:
    def test_a_job_that_comes_while_a_gpu_is_free_is_planned_at_once(self) -> None:
        clocked = Clocked()
        clocked.round(0.0)
        clocked.tell(20.0, submitted(A))
        assert clocked.next_s == 20.0

    def test_but_not_within_the_gap(self) -> None:
        clocked = Clocked()
        clocked.round(0.0)
        clocked.tell(2.0, submitted(A))
        assert clocked.next_s == 5.0

    def test_those_that_come_together_are_planned_together(self) -> None:
        clocked = Clocked(gather_s=0.5)
        clocked.round(0.0)
        clocked.tell(20.0, submitted(A))
        clocked.tell(20.25, submitted(B))
        assert clocked.next_s == 20.5
        clocked.round(20.5, a=1, b=1)
        assert clocked.next_s == 80.5

    def test_a_job_that_comes_while_all_gpus_are_held_waits_for_the_interval(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A))
        clocked.round(0.0, a=2)
        clocked.tell(20.0, submitted(B))
        assert clocked.next_s == 60.0

    def test_gpus_that_become_free_are_given_out_at_once(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A))
        clocked.round(0.0, a=2)
        clocked.tell(1.0, ReplicasReady(A, 1))
        clocked.tell(20.0, submitted(B))
        clocked.tell(30.0, JobFinished(A, 1))
        assert clocked.next_s == 30.0

    def test_a_start_that_came_to_nothing_is_tried_again_at_once(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A))
        clocked.round(0.0, a=2)
        clocked.tell(30.0, GenerationAbandoned(A, 1, "no room"))
        assert clocked.next_s == 30.0

    def test_nobody_waits_whose_next_try_is_not_due_yet(self) -> None:
        clocked = Clocked(options=SchedulerOptions(retry_pause_s=30.0))
        clocked.tell(0.0, submitted(A))
        clocked.round(0.0, a=2)
        clocked.tell(10.0, ReplicasReady(A, 1), JobFailed(A, 1, "out of memory"))
        assert not is_somebody_waiting(clocked.scheduler.state)
        assert clocked.next_s == 60.0
        clocked.tell(40.0, NodeJoined(Node(NodeId("m"), 2)))
        assert is_somebody_waiting(clocked.scheduler.state)
        assert clocked.next_s == 40.0

    def test_nobody_waits_who_is_about_to_get_some(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A), submitted(B))
        clocked.round(0.0, a=2)
        clocked.tell(1.0, ReplicasReady(A, 1))
        number = clocked.scheduler.state.round + 1
        half = Allocation.of({NodeId("n"): 1})
        clocked.tell(10.0, RoundDue(number), PlanMade(number, Plan.of({A: half, B: half})))
        clocked.tell(20.0, ReplicasReady(A, 2))  # makes room for b, which starts
        assert clocked.next_s == 60.0

    def test_free_gpus_alone_are_no_reason(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A))
        clocked.round(0.0, a=1)
        clocked.tell(20.0, ReplicasReady(A, 1))
        assert clocked.next_s == 60.0

    def test_nor_is_a_report_while_somebody_waits_whom_the_policy_passed_over(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, submitted(A), submitted(B))
        clocked.round(0.0, a=1)
        clocked.tell(20.0, JobReported(A, 1))
        assert is_somebody_waiting(clocked.scheduler.state)
        assert clocked.next_s == 60.0

    def test_gpus_of_a_drained_node_are_not_free(self) -> None:
        clocked = Clocked()
        clocked.tell(0.0, NodeDrained(NodeId("n")))
        clocked.round(0.0)
        clocked.tell(20.0, submitted(A))
        assert num_free(clocked.scheduler.state) == 0
        assert clocked.next_s == 60.0


class TestHurry:
    def test_a_round_can_be_wanted_later_than_the_next_one(self) -> None:
        times = RoundTimes(INTERVAL, GAP, 0.0, 0.0)
        times.begin(0.0)
        times.hurry(50.0, 0.0)
        times.hurry(20.0, 0.0)
        assert times.next_s == 20.0
        times.begin(20.0)
        assert times.next_s == 50.0
        times.begin(50.0)
        assert times.next_s == 110.0

    def test_a_round_serves_all_who_wanted_one_by_then(self) -> None:
        times = RoundTimes(INTERVAL, GAP, 0.0, 0.0)
        times.begin(0.0)
        for delay_s in (6.0, 7.0, 8.0):
            times.hurry(delay_s, 0.0)
        times.begin(9.0)
        assert times.next_s == 69.0


@given(
    gap=st.sampled_from([0.0, 1.0, 10.0]),
    interval=st.sampled_from([10.0, 60.0]),
    pauses=st.lists(st.floats(0.0, 30.0), max_size=30),
)
def test_rounds_keep_their_gap_come_when_they_are_wanted_and_at_the_latest_after_the_interval(
    gap: float, interval: float, pauses: list[float]
) -> None:
    times = RoundTimes(interval, gap, 0.0, 0.0)
    times.begin(0.0)
    now_s, last_s = 0.0, 0.0
    for pause_s in pauses:
        now_s += pause_s
        while (next_s := times.next_s) <= now_s:
            assert next_s >= last_s + gap
            last_s = next_s
            times.begin(last_s)
        times.hurry(0.0, now_s)
        assert times.next_s == min(max(now_s, last_s + gap), last_s + interval)
