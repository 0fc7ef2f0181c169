"""From what `pollux up --emulate` was told to plain options of a service: every duration divided by F.

The service and all below it see the compressed seconds only, and do not know that there are others. What belongs to
the real machine, such as how long a daemon may be silent, stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pollux.cli.emulated import COMPRESS, PREFIX
from pollux.core import FrozenMap, checks
from pollux.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    from pollux.service.options import ServiceOptions
    from pollux.service.place import ClusterConfig

DEFAULT_SLOTS = 4
"""Of a node: as in the paper's testbed. Cores say nothing about GPUs that are not there."""
LONGEST_DELAY_S = 60.0
"""Real seconds. Services, daemons and replicas have time-outs that are not compressed: much longer and a job that waits
is taken for one that hangs."""
REPLICA_START_S = 1.0
"""About. It does not compress: no re-allocation that is to be emulated may be shorter here."""


def compressed(options: ServiceOptions, config: ClusterConfig) -> ServiceOptions:
    """The options of a service whose cluster is emulated as `config` says; `options`: if it were not."""
    by, delay_s = config.compress, config.realloc_delay_s
    check_pace(by, delay_s)
    known = known_types()
    if config.acts_as not in known:
        raise UnknownName("--gpu-type", config.acts_as or "", known)
    slots = slots_of(config)
    told = {"COMPRESS": by, "REALLOC_DELAY_S": delay_s, "MACHINE_SLOTS": config.nodes * slots}
    return replace(
        options,
        slots=slots,
        policy_options=FrozenMap(_policy_options(config)),
        interval_s=options.interval_s / by,
        usual_delay_s=delay_s / by,
        early_gap_s=options.early_gap_s / by,
        retry_pause_s=options.retry_pause_s / by,
        gpu_type=f"{PREFIX}{config.acts_as}",
        node_labels=FrozenMap({COMPRESS: f"{by:g}"}),
        replica_env=FrozenMap({f"POLLUX_{name}": f"{value:g}" for name, value in told.items()}),
    )


def check_pace(compress: float, realloc_delay_s: float) -> None:
    """Refuse (`InvalidInput`) what no emulated cluster could keep to."""
    checks.finite(InvalidInput, "--compress", compress, 0, above=True)
    checks.finite(InvalidInput, "--realloc-delay", realloc_delay_s, 0)
    real_s = realloc_delay_s / compress
    if real_s > LONGEST_DELAY_S:
        problem = f"is {real_s:.4g} real seconds with --compress {compress:g}, and at most {LONGEST_DELAY_S:g} will do"
        fix = f"Lower it to {LONGEST_DELAY_S * compress:g}, or raise --compress"
        raise InvalidInput("--realloc-delay", realloc_delay_s, problem, fix)


def haste_of(compress: float, realloc_delay_s: float) -> str:
    """What to say of a compression that processes here cannot follow; empty: nothing."""
    if realloc_delay_s / compress >= REPLICA_START_S:
        return ""
    most = realloc_delay_s / REPLICA_START_S
    honest = f"the figures mean something up to --compress {most:g}" if most else "no figures mean much"
    return (
        "Replicas need about a second to start, which is not compressed: "
        f"with --realloc-delay {realloc_delay_s:g} {honest}."
    )


def known_types() -> tuple[str, ...]:
    """The GPU types on which the built-in applications were measured."""
    from pollux.applications import load, names

    return tuple(sorted({gpu_type for name in names() for gpu_type in load(name).throughput}))


def slots_of(config: ClusterConfig) -> int:
    """Of each node."""
    return config.slots or DEFAULT_SLOTS


def _policy_options(config: ClusterConfig) -> dict[str, object]:
    """Those that are seconds, or GPU-seconds, are compressed, whether they were set or not."""
    from pollux.policies import registry

    usual = registry.describe(config.policy)["options"]
    usual = {**usual, "unmeasured_delay_s": config.realloc_delay_s} if "unmeasured_delay_s" in usual else usual
    seconds = {
        name: value / config.compress
        for name, value in {**usual, **config.policy_options}.items()
        if name.endswith("_s") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**config.policy_options, **seconds}
