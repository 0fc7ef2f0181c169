from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from pollux.core import Plan, Snapshot
from pollux.errors import InvalidSpec, PolicyFailed, UnknownName
from pollux.policies import Policy, make, names, policy_class, registry
from pollux.policies.fifo import Fifo
from pollux.policies.srtf import Remaining, Srtf
from pollux.policies.tiresias import Tiresias


@dataclass
class Lazy(Policy):
    """Somebody's own."""

    patience_s: float
    label: str | None = None

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        return Plan()


class Plain(Policy):
    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        return Plan()


class Unfinished(Policy):
    """Has no plan."""


@dataclass
class Clumsy(Policy):
    share: float = 1.0

    def __post_init__(self) -> None:
        self.rest = 1.0 / (1.0 - self.share)

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        return Plan()


LAZY = f"{__name__}:Lazy"


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_name_can_be_made(name):
    assert isinstance(make(name), policy_class(name))


def test_a_name_may_stand_for_options_which_can_be_overridden():
    assert make("fifo-backfill") == Fifo(backfill=True)
    assert make("fifo-backfill", {"backfill": False}) == Fifo()


def test_options_are_checked_and_converted():
    assert make("tiresias", {"service_threshold_gpu_s": 3200}) == Tiresias(3200.0)
    assert make("srtf", {"by": "service"}) == Srtf(by=Remaining.SERVICE)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fifo", {"backfill": "yes"}, "fifo.backfill = 'yes': must be true or false"),
        ("srtf", {"by": "luck"}, "srtf.by = 'luck'.*Known: service, time"),
        ("tiresias", {"service_threshold_gpu_s": 0}, "greater than 0"),
        ("srtf", {"min_remaining_s": -1}, "at least 0"),
        (LAZY, {}, "patience_s.*has no default"),
    ],
)
def test_wrong_values_are_refused(name, options, message):
    with pytest.raises(InvalidSpec, match=message):
        make(name, options)


def test_unknown_options_are_answered_with_the_known_ones():
    with pytest.raises(UnknownName, match=r"option of policy fifo = 'backfil'.*Did you mean 'backfill'"):
        make("fifo", {"backfil": True})
    with pytest.raises(UnknownName, match="Known: service_threshold_gpu_s"):
        make("tiresias", {"_demoted": {}})
    with pytest.raises(UnknownName, match="Known: none"):
        make(f"{__name__}:Plain", {"a": 1})


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(UnknownName, match="Did you mean 'tiresias'"):
        make("tiresius")


def test_a_policy_of_your_own_is_named_by_its_path():
    assert make(LAZY, {"patience_s": 3}) == Lazy(3.0)
    assert isinstance(make(f"{__name__}:Plain"), Plain)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.mod:P", "cannot be imported"),
        (":P", "names no module"),
        (".mod:P", "names no module"),
        (f"{__name__}:Missing", "has no 'Missing'"),
        (f"{__name__}:", "has no ''"),
        (f"{__name__}:dataclass", "is not a policy"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(path, message):
    with pytest.raises(InvalidSpec, match=message):
        make(path)


def test_a_package_that_the_module_needs_and_is_not_there_is_reported_as_such(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyFailed, match=r"needs_more:P failed while being imported: .*'no_such_package'"):
        make("needs_more:P")


@pytest.mark.parametrize(
    ("name", "error"), [("Unfinished", "TypeError: .*abstract"), ("Clumsy", "ZeroDivisionError: float division")]
)
def test_a_policy_that_cannot_be_made_is_blamed_itself(name, error):
    with pytest.raises(
        PolicyFailed, match=f"{name} failed while being made: {error}.*--debug.*PolicyContract"
    ) as caught:
        make(f"{__name__}:{name}")
    assert isinstance(caught.value.__cause__, TypeError | ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_command_finds_a_policy_in_the_current_folder(tmp_path):
    (tmp_path / "own_policy.py").write_text("from own_parts import Base\nclass Own(Base): ...\n")
    (tmp_path / "own_parts.py").write_text("from pollux.policies.fifo import Fifo as Base\n")
    done = simulate_own(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("source", ["1 +", "from pollux.policies import Policy\nclass Own(Policy): ..."])
def test_the_command_does_not_call_the_mistakes_of_an_own_policy_bugs_of_pollux(tmp_path, source):
    (tmp_path / "own_policy.py").write_text(source)
    done = simulate_own(tmp_path)
    assert done.returncode == 1
    assert "policy own_policy:Own failed while being" in " ".join(done.stderr.split())


def simulate_own(folder: Path) -> subprocess.CompletedProcess[str]:
    """With the installed script: unlike `python -m`, it does not search the current folder."""
    command = [Path(sys.executable).with_name("pollux"), "simulate", "demo", "--policy", "own_policy:Own"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_current_folder_is_searched_for_own_policies_only_and_only_while_they_are_loaded(tmp_path, monkeypatch):
    (tmp_path / "in_this_folder.py").write_text(f"from {__name__} import Plain as P")
    (tmp_path / "announced.py").write_text(f"from {__name__} import Plain as P")
    points = EntryPoints([EntryPoint("elsewhere", "announced:P", "pollux.policies")])
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points.select(group=group))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    assert isinstance(make("in_this_folder:P"), Plain)
    assert sys.path == before
    with pytest.raises(InvalidSpec, match="cannot be imported"):
        make("elsewhere")


def test_packages_announce_policies_as_entry_points(monkeypatch):
    points = EntryPoints(
        [EntryPoint("lazy", LAZY, "pollux.policies"), EntryPoint("fifo", "elsewhere:Fifo", "pollux.policies")]
    )
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points.select(group=group))
    assert names() == tuple(sorted({*registry.BUILT_IN, "lazy"}))
    assert policy_class("lazy") is Lazy
    assert policy_class("fifo") is Fifo, "built-in names cannot be taken"


def test_entry_points_are_not_looked_up_for_built_in_names(monkeypatch):
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: pytest.fail("looked up"))
    make("fifo")


def test_each_name_has_its_own_summary():
    summaries = [registry.describe(name)["summary"] for name in registry.BUILT_IN]
    assert all(summaries)
    assert len(set(summaries)) == len(summaries)
