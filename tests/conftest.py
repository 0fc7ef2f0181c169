"""What every test may use, and surroundings that are the same for all of them: signals, machine code, no garbage.

Stands alone: `test_makefile.py` and `test_surroundings.py` run a copy of it elsewhere.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
IS_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")

# No deadline: a shared machine is slow at times, and no test here asserts wall-clock time.
settings.register_profile("default", deadline=None)
# The same examples on every run, so that a red build is red for its change alone.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if IS_CI else "default")


MACHINE_CODE = (
    ("simulate", "demo", "--policy", "castor"),
    ("simulate", "demo", "--policy", "pollux"),
    ("bench", "plan", "--gpus", "64", "--jobs", "40", "--rounds", "1", "--beside", "genetic"),
)
"""Commands that between them call all that is compiled, but for a second's worth."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden event logs anew")


# Signals: what this process ignores or blocks, all that it starts would ignore and block, too.


def pytest_configure(config: pytest.Config) -> None:
    """Be deaf to nothing, even under nohup or as a script's background job."""
    told = getattr(config, "workerinput", {})
    config.stash[_OUTLIVES_HANGUP] = told.get("outlives_hangup", signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # which python itself ignores
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if config.stash[_OUTLIVES_HANGUP]:
        signal.signal(signal.SIGHUP, lambda *_: None)  # unlike SIG_IGN, programs that we start do not inherit it


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist: what a worker is told."""
    node.workerinput["outlives_hangup"] = node.config.stash[_OUTLIVES_HANGUP]


_OUTLIVES_HANGUP = pytest.StashKey[bool]()


# Machine code: a fresh checkout has none, and it takes a minute to make. Else every process would make its own, in
# whichever test comes first, and that would run out of its time.


def pytest_sessionstart(session: pytest.Session) -> None:
    """Once for all processes, before the first test, and again when what is compiled has changed."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    found = importlib.util.find_spec("pollux")
    if found is None or not found.origin or importlib.util.find_spec("numba") is None:
        return
    package = Path(found.origin).parent
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or package / "__pycache__")
    with suppress(OSError):  # nowhere to keep it: then there is nothing to be made beforehand
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "machine-code.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of several sessions makes it, and the others wait
            stamp, made_of = folder / "machine-code.stamp", _compiled_sources(package)
            if not stamp.exists() or stamp.read_text() != made_of:
                problem = _make_machine_code(config)
                if problem:
                    _tell(config, f"Machine code could not be made, so tests make their own: {problem}")
                else:
                    stamp.write_text(made_of)


def _compiled_sources(package: Path) -> str:
    """A hash of the modules that have compiled functions, and of what compiles them."""
    made_of = hashlib.sha256(f"{version('numba')} {sys.version} {platform.node()}".encode())
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"goodput.compiled import" in source:
            made_of.update(source)
    return made_of.hexdigest()


def _make_machine_code(config: pytest.Config) -> str:
    """What went wrong, if anything did."""
    _tell(config, "Making machine code, once for this checkout: about a minute, no test is charged for it …")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
    for command in MACHINE_CODE:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pollux.cli.main", *command],
            env={**plain, "POLLUX_CACHE": ""},  # a simulation that was remembered would compile nothing
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return f"pollux {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    return ""


def _tell(config: pytest.Config, sentence: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(sentence)
        reporter.flush()


# Garbage: a process, a socket or a file that nobody closed is told of when it is collected. That is to be in the test
# that left it, not in whichever runs by then.


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported by now stays, and is not looked through after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torn down after all others of a test, for it is set up first.

    What outlives its test is not looked through after the next ones: that would take longer than most of them.
    """
    yield
    getattr(request.node, "funcargs", {}).clear()  # what its fixtures gave it, which pytest keeps for a little longer
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_garbage_of_the_file(pytestconfig: pytest.Config) -> Iterator[None]:
    """The same for what a file sets up once, which outlives its tests."""
    pytestconfig.stash[_SHARED_ENDED] = False
    yield
    if pytestconfig.stash[_SHARED_ENDED]:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope in ("class", "module", "package"):
        request.config.stash[_SHARED_ENDED] = True


_SHARED_ENDED = pytest.StashKey[bool]()
"""Something that several tests of this file shared has been torn down."""


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
