"""`python -m pollux.testing.chaos [--minutes N] [--faults N] [--seed S …] [--only FAULT,…] [--list]`."""

from __future__ import annotations

import argparse
import sys

from pollux.cli.trial.cluster import ended_by_sigterm
from pollux.errors import PolluxError
from pollux.testing.chaos.campaign import run_campaign
from pollux.testing.chaos.fault import FAULTS
from pollux.testing.chaos.local_bed import LocalBed
from pollux.testing.chaos.plan import chosen
from pollux.testing.chaos.report import summary

MINUTES = 5.0


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 if something was broken, 2 for wrong input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m pollux.testing.chaos", description="Disturb a cluster by a seed.")
    parser.add_argument("--minutes", type=float, help=f"for how long faults fall (default {MINUTES:g})")
    parser.add_argument("--faults", type=int, help="end after so many instead")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one campaign for each (default 0)")
    parser.add_argument("--only", help="these faults alone, with commas between them")
    parser.add_argument("--list", action="store_true", help="show the faults and exit")
    given = parser.parse_args(arguments)
    if given.list:
        for one in FAULTS.values():
            print(f"{one.name:26} {one.sentence}")
        return 0
    try:
        faults = chosen(given.only.split(",") if given.only else None)
    except PolluxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    minutes = MINUTES if given.minutes is None and given.faults is None else given.minutes
    results = []
    try:
        with ended_by_sigterm():
            for seed in given.seed:
                bed = LocalBed()
                _say(f"seed {seed}: a cluster in {bed.home}")
                results.append(run_campaign(bed, seed, faults, minutes=minutes, most_faults=given.faults, say=_say))
    except KeyboardInterrupt:
        print("Interrupted: the cluster is ended, and its files are removed.", file=sys.stderr)
        return 130
    print()
    print(summary(results))
    return 1 if any(result.violations for result in results) else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
