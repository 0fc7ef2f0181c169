"""How two sides prove to each other that they know the same key, without showing it.

The daemon sends 32 random bytes; the other side sends 32 of its own, a keyed hash over both and who it is; the daemon
answers with another hash, or with nothing: wrong key. The key is the token; of a side that names itself as a replica
it is the one of its credential.
"""

from __future__ import annotations

import hmac

from pollux.errors import InvalidSpec, Permanent
from pollux.wire.credentials import MAX_NAME_BYTES, ReplicaIdentity, key_of, parts

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_INTRODUCTION_BYTES = NONCE_BYTES + PROOF_BYTES + MAX_NAME_BYTES


def introduction(secret: str, of_daemon: bytes, of_client: bytes) -> bytes:
    """What somebody with this token or credential says to a daemon that has sent its random bytes."""
    identity, key = parts(secret)
    name = b"" if identity is None else str(identity).encode()
    return of_client + _proof(key, b"client", of_daemon, of_client) + name


def recognised(address: str, token: str, of_daemon: bytes, said: bytes) -> tuple[ReplicaIdentity | None, bytes]:
    """Who introduces itself so, and the daemon's own proof for it. `Permanent`: it does not know the key."""
    of_client, rest = said[:NONCE_BYTES], said[NONCE_BYTES:]
    proof, name = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
    try:
        identity = ReplicaIdentity.read(name.decode()) if name else None
    except (InvalidSpec, ValueError):
        raise Permanent(f"{address} gives a name that no replica has.") from None
    key = key_of(token, identity)
    if not hmac.compare_digest(proof, _proof(key, b"client", of_daemon, of_client)):
        what = "the token" if identity is None else f"the key of {identity}, which it claims to be"
        raise Permanent(f"{address} does not know {what}.")
    return identity, _proof(key, b"daemon", of_daemon, of_client)


def check_daemon(address: str, secret: str, of_daemon: bytes, of_client: bytes, proof: bytes) -> None:
    """That what answers there knows the key, too; else `Permanent`."""
    identity, key = parts(secret)
    if not proof and identity is not None:
        raise Permanent(f"{address} refuses the credential of {identity}. It is good for the daemon that gave it.")
    if not proof:
        raise Permanent(f"{address} refuses the token. Give the one in the folder of its daemon.")
    if not hmac.compare_digest(proof, _proof(key, b"daemon", of_daemon, of_client)):
        raise Permanent(f"{address} does not know the token: it is no daemon of ours. Check the address.")


def _proof(key: str, side: bytes, of_daemon: bytes, of_client: bytes) -> bytes:
    return hmac.digest(key.encode(), b"pollux " + side + of_daemon + of_client, "sha256")
