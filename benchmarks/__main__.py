"""`python -m benchmarks [--only AREA …] [--list] [--render]`."""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.harness import UnknownArea, areas, chosen, run
from benchmarks.results import Store

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Pollux beside its baselines.")
    parser.add_argument("--only", nargs="+", metavar="AREA", help="measure these areas, keep the figures of the others")
    parser.add_argument("--list", action="store_true", help="show the areas and exit")
    parser.add_argument("--render", action="store_true", help="write RESULTS.md anew from results.json and exit")
    options = parser.parse_args(arguments)
    known = areas()
    if options.list:
        for name, title in known.items():
            print(f"{name:12} {title}")
        return 0
    if options.render:
        Store().render()
        return 0
    try:
        names = chosen(options.only, list(known))
    except UnknownArea as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Before NumPy is imported, which only areas do: CPU time of one thread is what can be compared.
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    return 0 if run(names) else 1


if __name__ == "__main__":
    sys.exit(main())
