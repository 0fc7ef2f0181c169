"""Agents that are told what jobs of their kind have measured."""

from __future__ import annotations

from pollux.applications import PassTime
from pollux.core import FrozenMap, GradientStats, JobId, JobSpec, KindProfile, Shape
from pollux.core.kinds import pooled
from pollux.policies import make
from pollux.policies.registry import BUILT_IN
from pollux.simulator.compat import options_of
from pollux.simulator.lore import Lore
from pollux.simulator.options import AgentOptions
from pollux.simulator.run import Training
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.truth import truths_built_in

CIFAR = truths_built_in()["cifar10"]
NOISY = GradientStats(sqr=0.01, var=10.0)
PLACES = [(1,), (4,), (4, 4)]


def training(name, kind="cifar10", measures=(), slower=lambda m: 1.0):
    found = Training(JobSpec(JobId(name), application=kind, limits=CIFAR.limits), CIFAR, AgentOptions())
    for placement in measures:
        for m in (32, 128, 512):
            passes = PassTime(*(slower(m) * seconds for seconds in CIFAR.passes("t4", placement, m)))
            found.agent.observe("t4", Shape(sum(placement), len(placement)), m, passes)
    return found


def known(*jobs):
    """A registry that these have gone into."""
    kinds = FrozenMap()
    for job in jobs:
        kinds = pooled(kinds, FrozenMap({job.spec.application: KindProfile(job.agent.profile, 1)}))
    return kinds


def tuned(of, kinds, lore=None, gpu_type="t4"):
    """What it begins with on eight GPUs of two nodes."""
    (lore or Lore()).tell(of, gpu_type, kinds)
    return of.agent.tune(gpu_type, Shape(8, 2), NOISY)


def test_a_job_that_is_told_begins_with_the_batch_size_that_suits_its_kind():
    experienced, told = training("first", measures=PLACES), training("told")
    untold = tuned(told, known())
    m, s = tuned(told, known(experienced))
    assert (m, s) == experienced.agent.tune("t4", Shape(8, 2), NOISY)
    assert m * (s + 1) > untold[0] * (untold[1] + 1)


def test_jobs_of_other_kinds_or_of_none_and_other_gpus_are_not_meant():
    kinds = known(training("first", measures=PLACES))
    untold = tuned(training("untold"), known())
    assert tuned(training("other", "bert"), kinds) == untold
    assert tuned(training("nobody", None), kinds) == untold
    assert tuned(training("elsewhere"), kinds, gpu_type="v100") == untold


def test_what_the_registry_learns_later_is_told_when_the_job_gets_other_gpus():
    lore, early = Lore(), training("early")
    before = tuned(early, known(), lore)
    kinds = known(training("first", measures=PLACES))
    assert early.agent.tune("t4", Shape(8, 2), NOISY) == before
    assert tuned(early, kinds, lore) != before


def test_jobs_of_a_kind_share_its_model_until_the_registry_has_more():
    lore, one, other = Lore(), training("one"), training("other")
    kinds = known(training("first", measures=PLACES[:1]))
    lore.tell(one, "t4", kinds)
    lore.tell(other, "t4", kinds)
    assert one.agent.told is other.agent.told
    lore.tell(other, "t4", known(training("first", measures=PLACES[:1]), training("second", measures=PLACES)))
    assert one.agent.told is not other.agent.told


def test_a_job_that_is_not_like_its_kind_goes_by_what_it_measured():
    kinds = known(training("first", measures=PLACES))
    odd, lone = (training(name, kind, PLACES[:2], lambda m: m) for name, kind in (("odd", "cifar10"), ("lone", None)))
    assert tuned(odd, kinds) == tuned(lone, kinds) != tuned(training("usual"), kinds)


def test_only_castor_shares_what_the_registry_has_and_not_without_it():
    assert [name for name in BUILT_IN if make(name).shares_experience] == ["castor"]
    assert not make("castor", {"registry": False}).shares_experience


def test_agents_are_told_under_policies_that_share_unless_that_is_switched_off():
    def jcts(**settings):
        options = options_of(["castor"], {key.replace("__", "."): value for key, value in settings.items()})["castor"]
        return [job.jct_s for job in simulate(Scenario("demo", "castor", options=options)).jobs]

    assert jcts() != jcts(agent__kind_prior=False)
    assert jcts(policy__registry=False) == jcts(policy__registry=False, agent__kind_prior=False)
    assert not options_of(["castor"], {}, "artifact")["castor"].agent.kind_prior
