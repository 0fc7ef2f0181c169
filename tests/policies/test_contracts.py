"""Every policy keeps the contract."""

from __future__ import annotations

import pytest

from pollux.policies import Policy, make, registry
from pollux.policies.pollux import reach
from pollux.testing import PolicyContract, WorkConservingContract, policies, stores


class TestFifo(PolicyContract):
    def make(self) -> Policy:
        return make("fifo")


class TestFifoWithBackfill(WorkConservingContract):
    def make(self) -> Policy:
        return make("fifo-backfill")


class TestSrtf(WorkConservingContract):
    def make(self) -> Policy:
        return make("srtf")


class TestSrsf(WorkConservingContract):
    def make(self) -> Policy:
        return make("srtf", {"by": "service"})


class TestSjf(WorkConservingContract):
    def make(self) -> Policy:
        return make("srtf", {"preempt": False})


class TestTiresias(WorkConservingContract):
    def make(self) -> Policy:
        return make("tiresias")


class TestOptimus(WorkConservingContract):
    def make(self) -> Policy:
        return make("optimus")


class TestCastor(PolicyContract):
    def make(self) -> Policy:
        return make("castor")


class TestPollux(PolicyContract):
    def make(self) -> Policy:
        return make("pollux")


class TestPolluxWithoutAvoidingInterference(WorkConservingContract):
    def make(self) -> Policy:
        return make("pollux", {"avoid_interference": False})


class TestPolluxWithManyJobs(PolicyContract):
    """As with thousands, of whom not all is worked out that they may have."""

    @classmethod
    def setup_class(cls) -> None:
        cls.patch = pytest.MonkeyPatch()
        cls.patch.setattr(reach, "MANY_JOBS", 0)
        cls.patch.setattr(reach, "SHARES", 1)

    @classmethod
    def teardown_class(cls) -> None:
        cls.patch.undo()

    def make(self) -> Policy:
        return make("pollux", {"churn_factor": 0.9})


class TestGeneticPollux(PolicyContract):
    def make(self) -> Policy:
        return make("pollux", {"solver": "genetic", "population": 10, "generations": 4})


class TestGeneticPolluxAsPublished(PolicyContract):
    def make(self) -> Policy:
        return make("pollux", {"solver": "genetic", "population": 10, "generations": 4, "published_search": True})


class TestPolluxForTheSlowest(PolicyContract):
    def make(self) -> Policy:
        return make("pollux", {"p": -10.0})


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_name_is_held_to_the_contract(name: str) -> None:
    here = [kind for kind in globals().values() if isinstance(kind, type) and kind.__module__ == __name__]
    held = [kind().make() for kind in here if issubclass(kind, PolicyContract)]
    assert make(name) in held, "policies are equal if their classes and options are"


def test_pytest_explains_what_fails_in_a_contract() -> None:
    for module in (policies, stores):
        assert "@pytest_ar" in vars(module), "it was imported before its assertions could be rewritten"
