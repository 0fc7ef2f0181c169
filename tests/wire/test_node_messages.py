from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.node_strategies import NODE_MESSAGES

from pollux.core import Allocation, JobId, decode, encode
from pollux.errors import InvalidSpec
from pollux.wire.messages import pack, unpack
from pollux.wire.nodes import Launch, ResizeRun, RunJob, Spawn, Tell
from pollux.wire.replicas import Join


@given(st.sampled_from(list(NODE_MESSAGES)).flatmap(lambda kind: NODE_MESSAGES[kind]))
def test_every_message_of_the_nodes_comes_back_as_it_was(message):
    body = pack(message)
    assert unpack(body, type(message)) == message
    assert pack(unpack(body, type(message))) == body


@pytest.mark.parametrize("name", ["a/b", "..", "a\nb", ""])
def test_the_name_of_a_job_can_be_the_name_of_a_folder(name):
    with pytest.raises(InvalidSpec, match="job"):
        Launch(JobId(name), "/train.py")


def test_a_rank_lies_below_the_number_of_members():
    with pytest.raises(InvalidSpec, match="rank = 2: not below size = 2"):
        Join(JobId("j"), 1, 0, 2, 2, 1, "host:1")


def test_only_a_plain_command_holds_several_slots():
    assert Launch(JobId("j"), "make", is_plain=True, gpus=4).gpus == 4
    with pytest.raises(InvalidSpec, match="gpus = 4: a replica of an elastic job holds one"):
        Launch(JobId("j"), "/train.py", gpus=4)


@pytest.mark.parametrize(
    "message",
    [
        RunJob(JobId("j"), 1, Launch(JobId("j"), "/train.py"), Allocation.of({"a": 1})),
        ResizeRun(JobId("j"), 2, Allocation.of({"a": 1})),
        Spawn(JobId("j"), 1, Launch(JobId("j"), "/train.py"), (), "host:1"),
        Tell(JobId("j"), "1-0", Join(JobId("j"), 1, 0, 0, 1, 1, "host:1")),
    ],
)
def test_those_of_a_service_that_tells_no_experience_are_understood(message):
    plain = encode(message)
    plain.pop("experience", None)
    assert decode(plain, type(message)) == message


def test_experience_is_not_for_logs():
    assert "secret" not in repr(ResizeRun(JobId("j"), 2, Allocation.of({"a": 1}), experience="secret"))
