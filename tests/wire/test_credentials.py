import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidSpec
from pollux.wire.credentials import PREFIX, ReplicaIdentity, credential, holder, job_secret, key_of, parts

TOKEN = "a token of the cluster"
NAMES = st.text(min_size=1, max_size=20).filter(lambda name: not set(name) & set("/\0\n") and name.isprintable())
IDENTITIES = st.builds(ReplicaIdentity, NAMES, NAMES)
MINE = ReplicaIdentity("j-1", "1-0")


@given(IDENTITIES)
def test_a_credential_names_its_replica_and_is_known_by_the_token(identity):
    text = credential(TOKEN, identity)
    assert parts(text) == (identity, key_of(TOKEN, identity))
    assert holder(TOKEN, text) == identity
    assert holder("another token", text) is None
    assert TOKEN not in text


@given(IDENTITIES, IDENTITIES)
def test_no_two_replicas_and_no_two_jobs_share_a_key(one, other):
    keys = {key_of(TOKEN, one), key_of(TOKEN, other), job_secret(TOKEN, one.job), job_secret(TOKEN, other.job)}
    assert len(keys) == len({one, other}) + len({one.job, other.job})


def test_names_that_run_together_are_others():
    assert key_of(TOKEN, ReplicaIdentity("ab", "c")) != key_of(TOKEN, ReplicaIdentity("a", "bc"))


def test_the_token_is_its_own_key_and_nobodys_credential():
    assert parts(TOKEN) == (None, TOKEN)
    assert key_of(TOKEN, None) == TOKEN
    assert holder(TOKEN, TOKEN) is None


@pytest.mark.parametrize(
    "forged",
    [
        f"{PREFIX}j-1/1-0:",
        f"{PREFIX}j-1/1-0:{'0' * 64}",
        f"{PREFIX}j-1/1-0:é",
        credential(TOKEN, MINE)[:-1],
        credential(TOKEN, MINE).upper(),
        credential(TOKEN, MINE).replace("1-0", "1-1"),
        credential(TOKEN, MINE).replace("j-1", "j-2"),
        f"{PREFIX}j-1/1-0:{job_secret(TOKEN, 'j-1')}",
        PREFIX,
        "",
    ],
)
def test_what_is_forged_belongs_to_nobody(forged):
    assert holder(TOKEN, forged) is None


def test_a_damaged_credential_is_told_without_being_shown():
    with pytest.raises(InvalidSpec, match="JOB/REPLICA") as told:
        parts(f"{PREFIX}5ecret")
    assert "5ecret" not in str(told.value)


@pytest.mark.parametrize(("job", "replica"), [("", "1"), ("j", ""), ("j", "a/b"), ("j\0", "1"), ("j\n", "1")])
def test_odd_names_get_none(job, replica):
    with pytest.raises(InvalidSpec):
        ReplicaIdentity(job, replica)
