"""What every test may use: the measured data, and hypothesis with settings that suit this project."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
IS_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")

# No deadline: a shared machine is slow at times, and no test here asserts wall-clock time.
settings.register_profile("default", deadline=None)
# The same examples on every run, so that a red build is red for its change alone.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if IS_CI else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden event logs anew")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache."""
    before = os.environ.get("POLLUX_CACHE")
    os.environ["POLLUX_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["POLLUX_CACHE"]
    else:
        os.environ["POLLUX_CACHE"] = before


@pytest.fixture(scope="session")
def pollux_data() -> Path:
    """The folder of measured data: `POLLUX_DATA`, else `../shared/data` beside the checkout.

    Without it a test is skipped on a developer's machine and fails where CI is set.
    """
    folder = Path(os.environ.get("POLLUX_DATA") or ROOT.parent / "shared" / "data").resolve()
    if not folder.is_dir():
        _do_without(f"no measured data at {folder}: set POLLUX_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def browser() -> str:
    """A browser that runs without a screen. `make test` installs one where it may; else as for `pollux_data`."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        _do_without("chromium is not installed: apt-get install chromium")
    return found


def _do_without(reason: str) -> NoReturn:
    """Skip the test; where CI is set nothing is skipped, so it fails."""
    if IS_CI:
        pytest.fail(reason)
    pytest.skip(reason)
