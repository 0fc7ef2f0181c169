"""A replica that looks around, and then trains as `train.py` does."""

import pollux.torch  # noqa: F401  # by which it is known as elastic

import probe  # type: ignore[import-not-found]  # isort: skip  # beside this script

probe.look()

import train  # type: ignore[import-not-found]  # noqa: E402, F401  # beside this script, too
