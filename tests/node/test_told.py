"""What replicas find in their environment, beside what their job says."""

import pytest

from pollux.core import FrozenMap, JobId
from pollux.node.hosted import Told
from pollux.wire.credentials import ReplicaIdentity, holder, job_secret
from pollux.wire.nodes import Launch, Seat

SEAT = Seat("1-1", 0, 1, 1, False)
TOKEN = "0123456789abcdef"


def told(extra=None, gpu_type="", devices=()):
    return Told("unix:/s", TOKEN, devices=devices, gpu_type=gpu_type, extra=FrozenMap(extra or {}))


def variables(of, **environment):
    launch = Launch(JobId("j"), "/train.py", environment=FrozenMap(environment))
    elastic = of.variables(launch, SEAT, 1, 0, 1, "host:1")
    return {**environment, **elastic}, {**environment, **of.plain_variables(launch, [0])}


def test_the_daemons_variables_give_way_to_the_jobs_own():
    for found in variables(told({"WHERE": "here", "MINE": "theirs"}), MINE="mine"):
        assert (found["WHERE"], found["MINE"]) == ("here", "mine")


def test_those_of_pollux_do_not_since_they_say_what_the_cluster_is():
    for found in variables(told({"POLLUX_PACE": "2"}), POLLUX_PACE="3"):
        assert found["POLLUX_PACE"] == "2"


def test_nobody_is_told_another_place_by_them():
    elastic, plain = variables(told({"POLLUX_JOB": "other", "RANK": "7"}))
    assert (elastic["POLLUX_JOB"], plain["POLLUX_JOB"]) == ("j", "j")
    assert elastic["RANK"] == "0"


def test_threads_may_be_theirs():
    for found in variables(told({"OMP_NUM_THREADS": "5"})):
        assert found["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("devices", [(), ("0",)])
def test_slots_are_called_as_the_daemon_was_told(devices):
    for found in variables(told(gpu_type="x1", devices=devices)):
        assert found["POLLUX_GPU_TYPE"] == "x1"


def test_a_replica_has_a_credential_of_its_own_and_never_the_token_whatever_its_job_asks_for():
    elastic, plain = variables(told(), POLLUX_CREDENTIAL="mine", POLLUX_JOB_SECRET="mine")
    assert holder(TOKEN, elastic["POLLUX_CREDENTIAL"]) == ReplicaIdentity(JobId("j"), "1-1")
    assert elastic["POLLUX_JOB_SECRET"] == job_secret(TOKEN, JobId("j"))
    assert (plain["POLLUX_CREDENTIAL"], plain["POLLUX_JOB_SECRET"]) == ("mine", "mine")
    for found in (elastic, plain, variables(told())[1]):
        assert TOKEN not in " ".join(found.values())
        assert "POLLUX_TOKEN_FILE" not in found
    assert not {"POLLUX_CREDENTIAL", "POLLUX_JOB_SECRET"} & variables(told())[1].keys()
    assert TOKEN not in repr(told())


def test_threads_that_jobs_inherit_are_theirs():
    of = Told("unix:/s", TOKEN, inherited=FrozenMap({"OMP_NUM_THREADS": "5"}))
    for found in variables(of):
        assert "OMP_NUM_THREADS" not in found


def test_cpu_slots_have_no_name():
    for found in variables(told()):
        assert "POLLUX_GPU_TYPE" not in found
