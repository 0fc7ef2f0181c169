"""What `pollux up` is told, on top of what it was told before, and the options of a service that follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pollux
from pollux.cli import output
from pollux.cli.compressed import compressed, slots_of
from pollux.cli.emulated import DEFAULT_TYPE
from pollux.core import FrozenMap
from pollux.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    from pollux.service.options import ServiceOptions
    from pollux.service.place import ClusterConfig, ClusterFolder

FLAGS = {"interval_s": "--interval", "policy": "--policy"}
"""What people typed, by the field of the service's options that it became."""


def merged(
    before: ClusterConfig,
    nodes: int | None,
    slots: int | None,
    policy: str | None,
    settings: Sequence[str] | None,
    interval: float | None,
    host: str | None,
    port: int | None,
) -> ClusterConfig:
    """What was told before, with what is told now. Another policy begins without the options of the last one."""
    given = {"nodes": nodes, "policy": policy, "interval_s": interval, "host": host, "port": port}
    config = replace(before, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    if slots is not None:
        config = replace(config, slots=slots or None)
    if config.policy != before.policy:
        config = replace(config, policy_options=FrozenMap())
    return replace(config, policy_options=FrozenMap({**config.policy_options, **_settings(settings or ())}))


def with_emulation(
    before: ClusterConfig,
    emulate: bool | None,
    compress: float | None,
    gpu_type: str | None,
    realloc_delay: float | None,
) -> ClusterConfig:
    """The same for what only an emulated cluster has; `InvalidInput` if it is none."""
    is_emulated = before.acts_as is not None if emulate is None else emulate
    if not is_emulated:
        for flag, value in (("--compress", compress), ("--gpu-type", gpu_type), ("--realloc-delay", realloc_delay)):
            if value is not None:
                raise InvalidInput(flag, value, "only emulated GPUs have it", "Give --emulate, too")
        return replace(before, acts_as=None)
    return replace(
        before,
        acts_as=gpu_type or before.acts_as or DEFAULT_TYPE,
        compress=before.compress if compress is None else compress,
        realloc_delay_s=before.realloc_delay_s if realloc_delay is None else realloc_delay,
    )


def with_jobs(before: ClusterConfig, job_env: Sequence[str] | None, job_user: str | None) -> ClusterConfig:
    """The same for what jobs find, and whom they run as. An empty text takes back what was told before."""
    from pollux.node.accounts import account_of
    from pollux.node.inherited import check_names

    named = before.job_env if job_env is None else check_names("--job-env", filter(None, job_env))
    user = before.job_user if job_user is None else job_user or None
    if user is not None:
        account_of(user)  # says what is wrong with it
    return replace(before, job_env=named, job_user=user)


def check_jobs(folder: ClusterFolder, config: ClusterConfig) -> None:
    """That jobs get to what they need; a note on what they will miss."""
    from pollux.node.accounts import account_of, unreachable

    if missing := [name for name in config.job_env if name not in os.environ]:
        output.note(f"Not set here, so that jobs do not find it: {', '.join(missing)}.")
    if config.job_user is None:
        return
    account = account_of(config.job_user)
    if (barred := unreachable(folder.path.parent, account)) is not None:
        fix = "Give a --dir that it gets to, such as /var/lib/pollux"
        raise InvalidInput("--job-user", config.job_user, f"cannot get to {folder.path} past {barred}", fix)
    for path in (Path(sys.executable), Path(pollux.__file__).parent):
        if unreachable(path.resolve().parent, account) is not None:
            output.note(
                f"User {config.job_user} cannot read {path.resolve()}: scripts that import more than is loaded already "
                "fail. Install Python and Pollux where that user gets to."
            )


def _settings(assignments: Sequence[str]) -> dict[str, object]:
    from pollux.simulator.settings import parse

    found = {}
    for key, value in parse(assignments, example="policy.p=-1").items():
        section, _, name = key.partition(".")
        if section != "policy" or not name:
            raise UnknownName("--set", key, ["policy.<option>"])
        found[name] = value
    return found


def options_of(folder: ClusterFolder, config: ClusterConfig) -> ServiceOptions:
    """Checked: what is wrong with them is better said here than in the log of a process in the background."""
    from pollux.service.options import ServiceOptions

    try:
        options = ServiceOptions(
            folder.path,
            config.host,
            config.port,
            config.nodes,
            config.slots,
            config.policy,
            config.policy_options,
            config.interval_s,
            job_env=config.job_env,
            job_user=config.job_user or "",
        )
    except InvalidInput as wrong:
        if wrong.field not in FLAGS:
            raise
        raise InvalidInput(FLAGS[wrong.field], wrong.value, wrong.problem, wrong.fix) from None
    return options if config.acts_as is None else compressed(options, config)


def summary(config: ClusterConfig) -> str:
    """What it is told of emulation, in a few words."""
    if config.acts_as is None:
        return "not emulated"
    gpus = f"{config.nodes} × {slots_of(config)} {config.acts_as}"
    return f"emulated ({gpus}, --compress {config.compress:g}, --realloc-delay {config.realloc_delay_s:g})"
