"""What jobs find of the environment that their daemon was started in: what programs need to run, and no secrets.

`pollux up` is run in somebody's shell, and shells hold tokens and keys. So nothing is passed on but what is listed
here, and what the operator names: docs/operations.md, "What a job can see".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pollux.errors import InvalidSpec
from pollux.node.accounts import Account

OF_THE_USER = frozenset({"HOME", "USER", "LOGNAME", "SHELL"})
FOLDERS_OF_THE_USER = frozenset({"TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME"})
"""Of the user who started the daemon: another one can hardly write there."""
PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
PASSED_ON = (
    OF_THE_USER
    | FOLDERS_OF_THE_USER
    | PROXIES
    | {"PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"}
)
PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_")
FOR_SCRIPTS = frozenset(
    f"POLLUX_{name}"
    for name in (
        *("INITIAL_BATCH_SIZE", "MAX_BATCH_SIZE", "MIN_PER_GPU_BATCH_SIZE", "MAX_PER_GPU_BATCH_SIZE", "BATCH_SIZE"),
        *("FIXED_BATCH", "GROUP_TIMEOUT_S", "COMPRESS", "REALLOC_DELAY_S", "MACHINE_SLOTS"),
    )
)
"""What people set in their own shell for a script that they run: no credential, and nothing of another replica."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")


def inherited(given: Mapping[str, str], named: Iterable[str] = (), account: Account | None = None) -> dict[str, str]:
    """Of the daemon's environment what every job gets. `named`: by the operator; `account`: of the user jobs run as."""
    wanted = set(named)
    found = {name: value for name, value in given.items() if name in wanted or _is_passed_on(name, value)}
    if account is None:
        return found
    kept = {name: value for name, value in found.items() if name in wanted or name not in FOLDERS_OF_THE_USER}
    own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return {**kept, **{name: value for name, value in own.items() if name not in wanted}}


def whole(given: Mapping[str, str]) -> dict[str, str]:
    """All of it, for a launch: whoever runs a script by hand has it in the shell on purpose."""
    return {name: value for name, value in given.items() if not name.startswith("POLLUX_") or name in FOR_SCRIPTS}


def check_names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    """What the operator names, each once; `InvalidSpec` for what cannot be passed on."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if "=" in name:
            fix = f"Give the name alone: {option} {name.partition('=')[0]}; its value is taken from the environment"
            raise InvalidSpec(option, f"{name.partition('=')[0]}=…", "is more than a name", fix)
        if not _NAME.fullmatch(name):
            raise InvalidSpec(option, name, "is not the name of a variable", "Use letters, digits and '_'")
        if name.startswith("POLLUX_"):
            fix = "Leave it out; set it in the env of a job that needs it"
            raise InvalidSpec(option, name, "is Pollux's own, and no job gets those of its cluster", fix)
    return found


def _is_passed_on(name: str, value: str) -> bool:
    if name in PROXIES:
        return "@" not in value  # http://user:password@host
    return name in PASSED_ON or (name.startswith(PASSED_ON_PREFIXES) and not _SECRET.search(name))
