"""The folder of a cluster: where the service, its daemons and the command line find each other.

token            0600; of the REST API and of all daemons
lock             held by the service that runs here
service.json     where it listens; stale if nobody holds the lock
cluster.json     what `pollux up` was told, for the next one
service.log      what the service logs, JSON lines; service.out: what its process prints
pollux.db        the event log
nodes/n0 …       state folders of the daemons
jobs/ID/checkpoints
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pollux.core import FrozenMap
from pollux.errors import InvalidSpec, Permanent
from pollux.node.accounts import Account, give
from pollux.node.folder import PASSABLE, PRIVATE, _token, is_locked, keep_private, write
from pollux.node.launched import pollux_home
from pollux.wire.frames import parse_address

log = logging.getLogger(__name__)

DEFAULT_PORT = 7333


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """What service.json says of the service that runs, or ran, on a folder."""

    pid: int
    url: str
    version: str
    started_at_s: float


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What `pollux up` was told, or would do by itself."""

    nodes: int = 1
    slots: int | None = None
    """Of each node; None: its share of the GPUs, or the cores."""
    policy: str = "pollux"
    policy_options: FrozenMap[str, object] = field(default_factory=FrozenMap)
    interval_s: float = 60.0
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    acts_as: str | None = None
    """The GPU type as which its slots act; None: they are what they are. The two below mean something only then."""
    compress: float = 20.0
    """How much faster than real all goes."""
    realloc_delay_s: float = 30.0
    """What a re-allocation costs, before it is compressed (paper, section 5.1)."""
    job_env: tuple[str, ...] = ()
    """Names of variables that jobs find as `pollux up` did."""
    job_user: str | None = None
    """Whom jobs run as; None: who started the cluster."""


class ClusterFolder:
    """Paths and files. Making one touches nothing; see `make`."""

    def __init__(self, path: Path | None = None) -> None:
        """None: `cluster` in the user's own folder of Pollux."""
        self.path = (path or pollux_home() / "cluster").expanduser().absolute()
        self.token_file = self.path / "token"
        self.lock_file = self.path / "lock"
        self.log = self.path / "service.log"
        self.out = self.path / "service.out"
        self.database = self.path / "pollux.db"
        self.nodes = self.path / "nodes"
        self.jobs = self.path / "jobs"
        self._service_json = self.path / "service.json"
        self._cluster_json = self.path / "cluster.json"
        self._lock: int | None = None
        self._account: Account | None = None

    def make(self) -> None:
        """The folder, for its owner alone, and the token. Leaves what is there already."""
        parse_address(f"unix:{self.nodes / 'n999' / 'keeper.sock'}")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_private(self.path)
            _token(self.token_file, may_make=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            problem = f"cannot be used as a folder ({error.strerror})"
            fix = "Give one that you own and may write to, or set POLLUX_HOME"
            raise InvalidSpec("--dir", str(self.path), problem, fix) from None

    def admit(self, account: Account | None) -> None:
        """Let jobs of this user pass through to what is theirs, and read nothing else; None: let nobody pass."""
        self._account = account
        for folder in (self.path, self.nodes, self.jobs):
            folder.mkdir(mode=PRIVATE, exist_ok=True)
            folder.chmod(PRIVATE if account is None else PASSABLE)

    def make_checkpoints(self, job: str, folder: str) -> None:
        """Where jobs run as another user, they can make no folder in ours: it is made for them, and given to them.

        One that their owners name is left as it is: it is theirs to see to. A job without ends by saying so.
        """
        if self._account is None or Path(folder) != self.checkpoint_dir(job):
            return
        try:
            self.checkpoint_dir(job).mkdir(parents=True, exist_ok=True)
            (self.jobs / job).chmod(PASSABLE)
            give(self.checkpoint_dir(job), self._account)
        except OSError as error:
            log.warning("The checkpoints of job %s cannot be given to user %s: %s", job, self._account.name, error)

    def token(self) -> str:
        """Who knows it may do everything. `Permanent`: it cannot be read."""
        return read_token(self.token_file)

    def checkpoint_dir(self, job: str) -> Path:
        """Where a job saves that names no folder of its own."""
        return self.jobs / job / "checkpoints"

    def node_folders(self) -> tuple[Path, ...]:
        """The state folders of all daemons that ever ran here."""
        found = (path for path in self.nodes.glob("n*/") if path.name[1:].isdecimal())
        return tuple(sorted(found, key=lambda path: int(path.name[1:])))

    # Who runs here

    @property
    def is_locked(self) -> bool:
        """A service runs here, or is just starting."""
        return is_locked(self.lock_file)

    def lock(self) -> None:
        """Be the only service here until `unlock` or the end of the process; children do not inherit it."""
        lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise Permanent(self.in_use()) from None
        self._lock = lock

    def unlock(self) -> None:
        """May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def in_use(self) -> str:
        """The sentence for somebody who wanted to start another service here."""
        file = self.service_file()
        who = f"pid {file.pid}, {file.url}" if file else "it is just starting"
        return f"A cluster runs already in {self.path} ({who}). End it with pollux down, or give another --dir."

    def service_file(self) -> ServiceFile | None:
        """None: no service has listened here since the last clean end, or the file is damaged."""
        with suppress(OSError, ValueError, TypeError):
            return ServiceFile(**json.loads(self._service_json.read_text("utf-8")))
        return None

    def running(self) -> ServiceFile | None:
        """Where the service is that runs here now and has begun to listen."""
        return self.service_file() if self.is_locked else None

    def write_service_file(self, file: ServiceFile) -> None:
        """When it listens."""
        write(self._service_json, json.dumps(asdict(file)))

    def remove_service_file(self) -> None:
        """At a clean end."""
        self._service_json.unlink(missing_ok=True)

    # What it was told

    def config(self) -> ClusterConfig | None:
        """None: nobody has started a cluster here. Fields of another version are passed over."""
        try:
            plain = dict(json.loads(self._cluster_json.read_text("utf-8")).items())
            known = {item.name: plain[item.name] for item in fields(ClusterConfig) if item.name in plain}
            known["policy_options"] = FrozenMap(known.get("policy_options", {}))
            return ClusterConfig(**{**known, "job_env": tuple(known.get("job_env", ()))})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise Permanent(f"{self._cluster_json} cannot be read ({error}). Mend it, or remove it.") from None

    def write_config(self, config: ClusterConfig) -> None:
        plain = {item.name: getattr(config, item.name) for item in fields(config)}
        text = json.dumps({**plain, "policy_options": dict(config.policy_options)}, indent=2)
        write(self._cluster_json, f"{text}\n", is_durable=True)


def read_token(path: Path) -> str:
    """The token in that file. `Permanent` says why not."""
    try:
        token = path.read_text("ascii").strip()
    except PermissionError:
        raise Permanent(f"You may not read the token {path}: the cluster belongs to another user.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no plain text"
        raise Permanent(f"The token {path} cannot be read: {reason}.") from None
    if not token:
        raise Permanent(f"The token {path} is empty. End the cluster, remove the file, and run pollux up.")
    return token
