"""What a replica may ask its daemon for with its own credential: nothing but to be heard."""

import os
from typing import get_args

import pytest

from pollux.core import Allocation, FrozenMap, StopReason
from pollux.errors import InvalidDocument, Permanent, Temporary
from pollux.wire.credentials import ReplicaIdentity, credential
from pollux.wire.frames import Channel, ask
from pollux.wire.nodes import (
    DescribeNode,
    Forget,
    HostStore,
    Kill,
    Launch,
    ListLogs,
    ListReplicas,
    ListRuns,
    NodeRequest,
    ReadLog,
    Refused,
    ResizeRun,
    RunJob,
    Seat,
    Spawn,
    StopRun,
    Tell,
    Watch,
)
from pollux.wire.replicas import Join, ReplicaPhase, ReplicaStatus

from .daemons import PATIENT_S, Node, Replica, launch, report, short_folder, until

LAUNCH = Launch("j", "/bin/true", is_plain=True)
REQUESTS = (
    RunJob("j", 2, LAUNCH, Allocation(FrozenMap({"a": 1}))),
    ResizeRun("j", 2, Allocation(FrozenMap({"a": 1}))),
    StopRun("j", 1, StopReason.CANCELLED),
    ListRuns(),
    DescribeNode(),
    Spawn("j", 2, LAUNCH, (Seat("2-0", 0, 1, 1, False),), ""),
    Tell("j", "1-0", Join("j", 2, 0, 0, 1, 1, "127.0.0.1:1")),
    Kill("j", "1-0", 9),
    HostStore("j"),
    Forget("j", 1),
    ListReplicas("j"),
    ListLogs("j"),
    ReadLog("j", "1-0"),
    Watch("j"),
)

pytestmark = pytest.mark.usefixtures("nobody_closes")


@pytest.fixture
def node():
    with short_folder() as folder:
        node = Node(folder / "a").start()
        node.ask(Spawn("j", 1, launch(folder), tuple(Seat(f"1-{i}", i, 2, 1, False) for i in range(2)), "127.0.0.1:1"))
        node.ask(Spawn("k", 1, launch(folder, "k"), (Seat("1-0", 0, 1, 1, False),), "127.0.0.1:1"))
        until(lambda: all(here.pid for job in "jk" for here in node.replicas(job).values()))
        yield node
        node.end()


def own(node, replica="1-0", job="j"):
    return credential(node.token, ReplicaIdentity(job, replica))


def says(job="j", replica="1-0", pid=None):
    return ReplicaStatus(job, replica, pid or os.getpid(), ReplicaPhase.TRAINING, 1, 0, 1, True, 0.0)


def refusal(node, message, address=""):
    """What the daemon answers to a replica's word; then the connection must have ended."""
    with Channel.connect(address or node.daemon.folder.address, own(node), PATIENT_S) as channel:
        channel.send(message)
        answer = channel.receive(Refused, PATIENT_S)
        with pytest.raises(Temporary):
            channel.receive(Refused, PATIENT_S)
    return answer.problem


def test_this_knows_every_request():
    assert {type(request) for request in REQUESTS} == set(get_args(NodeRequest))


@pytest.mark.parametrize("over_tcp", [False, True])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_no_request_is_for_a_replica(node, request_, over_tcp):
    before = {job: node.replicas(job) for job in "jk"}
    problem = refusal(node, request_, node.address if over_tcp else "")
    assert type(request_).__name__ in problem
    assert {job: node.replicas(job) for job in "jk"} == before


def test_who_knows_the_token_may_ask(node):
    assert ask(node.daemon.folder.address, node.token, DescribeNode(), PATIENT_S).node == "a"


def test_it_speaks_for_no_other_replica_and_no_other_job(node):
    for other in (says(replica="1-1"), says(job="k"), says(replica="9-9")):
        assert "j/1-0 speaks for" in refusal(node, other)
    assert all(here.status is None for job in "jk" for here in node.replicas(job).values())


def test_it_speaks_for_its_own_process_alone(node):
    """Else it could have a signal sent to any other."""
    assert "speaks for j/1-0 with pid" in refusal(node, says(pid=node.pid("1-0")))
    assert "speaks for j/1-0 with pid 1 " in refusal(node, says(pid=1))


def test_it_is_heard_on_its_node_alone(node):
    assert "on its node" in refusal(node, says(), node.address)


def test_a_credential_of_a_replica_that_was_never_started_is_of_no_use(node):
    with Channel.connect(node.daemon.folder.address, own(node, "9-9"), PATIENT_S) as channel:
        channel.send(says(replica="9-9"))
        assert "is not a replica of this node" in channel.receive(Refused, PATIENT_S).problem


def test_a_report_as_the_first_word_is_refused(node):
    assert refusal(node, report())


def test_of_the_token_nothing_is_asked_but_what_was(node):
    replica = Replica(node, "1-0").say()
    until(lambda: node.replicas()["1-0"].status is not None)
    replica.channel.send(DescribeNode())
    with pytest.raises((InvalidDocument, Permanent, Temporary)):
        replica.hears_to_the_end()
