"""A scheduler that is told what happens, and asked what it does about it."""

from pollux.core import Allocation, JobSpec, JobSubmitted, Node, NodeJoined, Plan, PlanMade, ReplicasReady, RoundDue
from pollux.scheduler import Scheduler, SchedulerOptions
from pollux.scheduler.invariants import violations


def gpus(**counts):
    return Allocation.of(counts)


class Script:
    """A scheduler with two nodes of four GPUs, `a` and `b`, and jobs `x`, `y` …; time passes by `at` only."""

    def __init__(self, jobs="x", in_place=True, options=None, **spec):
        self.scheduler = Scheduler(options=options or SchedulerOptions(in_place=in_place))
        self.now = 0.0
        self.tell(NodeJoined(Node("a", 4)), NodeJoined(Node("b", 4)))
        self.tell(*(JobSubmitted(JobSpec(name, **spec)) for name in jobs))

    @property
    def state(self):
        return self.scheduler.state

    def at(self, now):
        self.now = now
        return self

    def tell(self, *events):
        actions = []
        for event in events:
            actions += self.scheduler.handle(event, self.now)
            assert violations(self.state) == []
        return actions

    def plan(self, **allocations):
        """One round, answered at once; what follows from the plan."""
        number = self.state.round + 1
        self.tell(RoundDue(number))
        return self.tell(PlanMade(number, Plan.of(allocations)))

    def run(self, **allocations):
        """Bring jobs to run there."""
        for action in self.plan(**allocations):
            self.tell(ReplicasReady(action.job, action.generation))
        return self

    def job(self, name="x"):
        return self.state.job(name)

    def phase(self, name="x"):
        return self.job(name).phase
