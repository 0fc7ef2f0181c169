"""The folder of a cluster: where the service, its daemons and the command line find each other.

token            0600; of the REST API and of all daemons, who have copies; made by whoever holds the lock alone
lock             held by the service that runs here
service.json     where it listens; stale if nobody holds the lock
cluster.json     what `pollux up` was told, for the next one
service.log      what the service logs, JSON lines; service.out: what its process prints
pollux.db        the event log
nodes/n0 …       state folders of the daemons
jobs/ID/checkpoints
"""

from __future__ import annotations

import errno
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pollux.core import FrozenMap
from pollux.errors import InvalidSpec, Permanent
from pollux.node.accounts import Account, give
from pollux.node.folder import PASSABLE, PRIVATE, NodeFiles, is_locked, keep_private, make_token, write
from pollux.node.launched import pollux_home
from pollux.node.locks import hold, holder, is_held
from pollux.wire.frames import parse_address

log = logging.getLogger(__name__)

DEFAULT_PORT = 7333
SHORTEST_TOKEN = 16


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
        self._token = ""
        self.regained_from: Path | None = None
        """The copy of the token that `lock` has put in place of the lost one."""
        self._account: Account | None = None

    def make(self) -> None:
        """The folder, for its owner alone. Leaves what is there already."""
        parse_address(f"unix:{self.nodes / 'n999' / 'keeper.sock'}")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_private(self.path)
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
        return self._token or read_token(self.token_file)

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
        """Be the only service here until `unlock` or the end of the process, and see to it that there is a token.

        Nobody makes one without the lock: a service that runs would not know it.
        """
        try:
            self._lock = hold(self.lock_file)
            if self._lock is None:
                raise Permanent(self.in_use())
            self._token = self._settle_token()
        except BaseException as error:
            self.unlock()
            if isinstance(error, OSError):
                raise self.unwritable(error) from None
            raise

    def unwritable(self, error: OSError) -> Permanent:
        fix = "Make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "See that you may write to it"
        return Permanent(f"{self.path} cannot be written to ({error.strerror}). {fix}, or give another --dir.")

    def unlock(self) -> None:
        """May be called again."""
        self._token = ""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def in_use(self) -> str:
        """The sentence for somebody who wanted to start another service here."""
        file = self.service_file()
        who = f"pid {file.pid}, {file.url}" if file else f"{self.holder}; it is just starting"
        return f"A cluster runs already in {self.path} ({who}). End it with pollux down, or give another --dir."

    @property
    def holder(self) -> str:
        """Who holds the lock, for people: its process, or how to find it."""
        pid = holder(self.lock_file)
        return f"pid {pid}" if pid else f"see fuser {self.lock_file}"

    def _settle_token(self) -> str:
        """The one in its file; else the one that daemons and replicas know which are left here; else a new one."""
        if self.token_file.exists() and self.token_file.read_bytes().strip():
            return _checked(self.token_file)
        copies = [copy for path in self.node_folders() if (copy := NodeFiles(path).token_copy).exists()]
        for copy in sorted(copies, key=lambda path: path.stat().st_mtime, reverse=True):
            with suppress(Permanent):
                token = _checked(copy)
                write(self.token_file, token)
                self.regained_from = copy
                return token
        self.token_file.unlink(missing_ok=True)  # an empty one
        make_token(self.token_file)
        return read_token(self.token_file)

    def forget_token_copies(self) -> None:
        """When nothing is left here that knows the token: whoever removes its file then gets another one."""
        for path in self.node_folders():
            NodeFiles(path).token_copy.unlink(missing_ok=True)

    def keep(self, file: ServiceFile, config: ClusterConfig | None) -> list[str]:
        """Write again what the service that runs here is found by, where somebody has removed or damaged it: what.

        `OSError` if that cannot be done now. A config that can be read is left as it is: it is for the next service.
        """
        found = []
        self.path.stat()  # a folder that is gone is not made again
        if self._lock is not None and not is_held(self._lock, self.lock_file):
            again = hold(self.lock_file, patience_s=0.0)
            if again is not None:  # else somebody tries to start another service, and will not get at the log
                os.close(self._lock)
                self._lock = again
                found.append(self.lock_file.name)
        if self._token != _text(self.token_file).strip():
            write(self.token_file, self._token)
            found.append(self.token_file.name)
        if self.service_file() != file:
            self.write_service_file(file)
            found.append(self._service_json.name)
        if config is not None and not self._has_config():
            self.write_config(config)
            found.append(self._cluster_json.name)
        return found

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

    def _has_config(self) -> bool:
        with suppress(Permanent):
            return self.config() is not None
        return False

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


def _checked(path: Path) -> str:
    token = read_token(path)
    if len(token) < SHORTEST_TOKEN:
        problem = f"is shorter than {SHORTEST_TOKEN} characters"
        raise Permanent(f"The token {path} {problem}. Remove the file, and run pollux up, which makes another one.")
    return token


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text("ascii")
    return ""
