"""What identifies a kind of job: the same for equal ones in any process, another for any other."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Adam

from pollux.agent.fingerprint import fingerprint, main_script


def net(width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width, dtype=dtype), nn.ReLU(), nn.Linear(width, 2, dtype=dtype))


def mark(model: nn.Module, script: Path | None = None, optimizer: type = SGD) -> str:
    return fingerprint(model, optimizer(model.parameters(), lr=0.1), script)


def test_equal_models_have_equal_fingerprints_whatever_their_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    assert mark(net(), script) == mark(net(), script)
    assert mark(net()).startswith("sequential-")
    assert len(mark(net())) == len("sequential-") + 12


def test_another_script_model_or_optimizer_makes_another_one(tmp_path):
    one, other, gone = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"
    one.write_text("a = 1\n")
    other.write_text("a = 2\n")
    marks = {
        mark(net(), one),
        mark(net(), other),
        mark(net(16), one),
        mark(net(dtype=torch.float64), one),
        mark(net(), one, Adam),
        mark(nn.Sequential(net()), one),  # other names of parameters
        mark(net()),
    }
    assert len(marks) == 7
    assert mark(net(), gone) == mark(net())


def test_odd_models_have_one_too():
    class Übung(nn.LazyLinear):
        pass

    model = nn.Sequential(Übung(3))
    assert mark(model).startswith("sequential-")
    assert fingerprint(Übung(3), SGD(net().parameters()), None).startswith("bung-")


def mark_of_file(script: Path) -> str:
    return mark(net(), script)


def test_it_is_the_same_in_another_process(fork, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    assert set(fork(mark_of_file, (script,), (script,))) == {mark(net(), script)}


def test_an_interactive_session_has_no_script(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert main_script() is None
