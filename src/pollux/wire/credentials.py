"""Who is at the other end of a connection: somebody of the cluster, who knows its token, or one replica of a job.

Everything that a job is given is derived from the token by a keyed hash, from which nobody gets back to the token, and
nothing is stored. A replica's name is used once, so that its credential means nothing after its end.

token                          may do everything
pollux-replica:JOB/REPLICA:KEY what that replica says of itself, to the daemon of its node
secret of a job                what its replicas prove each other before the state goes from one to another
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from pollux.core import JobId
from pollux.errors import InvalidSpec

PREFIX = "pollux-replica:"
"""No token begins so."""
MAX_NAME_BYTES = 512
"""Of job and replica together: each of them is the name of a file."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """One replica of one job."""

    job: JobId
    replica: str

    def __post_init__(self) -> None:
        for field, name in (("job", self.job), ("replica", self.replica)):
            if not name or any(letter in name for letter in "/\0\n"):
                raise InvalidSpec(field, name, "is no name for which a credential is made", "Leave it to the daemon")

    def __str__(self) -> str:
        return f"{self.job}/{self.replica}"

    @classmethod
    def read(cls, text: str) -> ReplicaIdentity:
        """The opposite of `str`."""
        job, _, replica = text.partition("/")
        return cls(JobId(job), replica)


def key_of(token: str, identity: ReplicaIdentity | None) -> str:
    """What this replica proves to know; None: the cluster, which proves to know the token itself."""
    return token if identity is None else _derived(token, "replica", identity.job, identity.replica)


def credential(token: str, identity: ReplicaIdentity) -> str:
    """For the replica of that name, as text that says what it is."""
    return f"{PREFIX}{identity}:{key_of(token, identity)}"


def job_secret(token: str, job: JobId) -> str:
    """What all replicas of the job know, and nobody else but the cluster."""
    return _derived(token, "job", job)


def parts(secret: str) -> tuple[ReplicaIdentity | None, str]:
    """Who has this token or credential, and the key to prove it by."""
    if not secret.startswith(PREFIX):
        return None, secret
    name, _, key = secret.removeprefix(PREFIX).rpartition(":")
    try:
        return ReplicaIdentity.read(name), key
    except InvalidSpec:  # which would show the name, and all of the rest if there is no key
        fix = "Leave it to the daemon to set it"
        raise InvalidSpec("credential", "…", "is not pollux-replica:JOB/REPLICA:KEY", fix) from None


def holder(token: str, text: str) -> ReplicaIdentity | None:
    """The replica whose credential this is under that token; None: it is forged, or none at all."""
    try:
        identity, key = parts(text)
    except InvalidSpec:
        return None
    if identity is None or not hmac.compare_digest(key.encode(), key_of(token, identity).encode()):
        return None
    return identity


def _derived(token: str, *names: str) -> str:
    """Other texts that are hashed with the token begin in another way, and no name holds a zero."""
    return hmac.digest(token.encode(), b"pollux " + "\0".join(names).encode(), "sha256").hex()
