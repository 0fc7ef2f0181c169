import json
import logging
import os
import stat
import sys
from contextlib import suppress

import pytest

from pollux.service import structured_log
from pollux.service.structured_log import JsonLines, setup

log = logging.getLogger("pollux.service.test")


@pytest.fixture(autouse=True)
def _as_before():
    """Puts the loggers of the process back."""
    root = logging.getLogger()
    others = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")]
    level = root.level
    states = [(other, list(other.handlers), other.propagate) for other in others]
    yield
    for handler in [other for other in root.handlers if isinstance(other, structured_log._PrivateFile)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    for other, its_handlers, propagate in states:
        other.handlers[:] = its_handlers
        other.propagate = propagate


@pytest.fixture
def path(tmp_path):
    return tmp_path / "service.log"


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_record_is_a_line_of_json(path):
    setup(path, logging.INFO)
    log.info("job %s begins\nhere", "é", extra={"job": "j1", "gpus": 2})
    (line,) = lines(path)
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "pollux.service.test",
        "message": "job é begins\nhere",
        "job": "j1",
        "gpus": 2,
    }


def test_what_is_below_the_level_is_left_out(path):
    setup(path, "WARNING")
    log.info("no")
    log.warning("yes")
    assert [line["message"] for line in lines(path)] == ["yes"]


def test_an_exception_is_text(path):
    setup(path)
    try:
        raise ValueError("what went wrong")
    except ValueError:
        log.exception("a sentence")
    (line,) = lines(path)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: what went wrong")


def test_a_stack_is_text(path):
    setup(path)
    log.info("here", stack_info=True)
    assert "test_a_stack_is_text" in lines(path)[0]["stack"]


def test_no_secret_gets_into_the_file(path):
    setup(path, secrets=['s3cr"et', 's3cr"et-and-more', ""])
    log.info("token %s", 's3cr"et')
    log.info('https://host/?token=s3cr"et-and-more', extra={"header": {'s3cr"et': ['Bearer s3cr"et', 1.5, True, None]}})
    try:
        raise ValueError('s3cr"et')
    except ValueError:
        log.exception("failed")
    text = path.read_text("utf-8")
    assert "s3cr" not in text
    assert "and-more" not in text
    first, second, _ = lines(path)
    assert first["message"] == "token [secret]"
    assert second["header"] == {"[secret]": ["Bearer [secret]", 1.5, True, None]}


def test_any_extra_can_be_written(path):
    setup(path)
    log.info("odd", extra={"where": path, "loss": float("nan"), "half": "\udc80", "kinds": (int,), "level": "mine"})
    (line,) = lines(path)
    assert (line["where"], line["loss"], line["half"]) == (str(path), "nan", "\udc80")
    assert line["kinds"] == ["<class 'int'>"]
    assert line["level"] == "INFO"


def test_wrong_arguments_are_written_all_the_same():
    record = logging.makeLogRecord({"msg": "%d GPUs", "args": ("hidden",)})
    assert json.loads(JsonLines(["hidden"]).format(record))["message"] == "%d GPUs ('[secret]',)"


def test_only_the_owner_may_read_it(path):
    path.touch()
    path.chmod(0o644)
    setup(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_rotates_and_keeps_five_files(path, monkeypatch):
    monkeypatch.setattr(structured_log, "MAX_BYTES", 300)
    setup(path)
    for number in range(30):
        log.info("a line of some length, number %d", number)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["service.log", *(f"service.log.{number}" for number in range(1, 5))]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert lines(path)[-1]["message"].endswith("number 29")


def test_another_setup_goes_on_in_the_same_file_once(path):
    setup(path)
    log.info("first")
    setup(path)
    log.info("second")
    assert [line["message"] for line in lines(path)] == ["first", "second"]


def test_uvicorn_writes_there_too(path):
    uvicorn = pytest.importorskip("uvicorn")
    uvicorn.Config("nothing:app")  # configures its loggers for a terminal
    setup(path)
    uvicorn.Config("nothing:app", log_config=None)
    logging.getLogger("uvicorn.error").info("listens", extra={"color_message": "\x1b[1mlistens"})
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", "/v1/health", "1.1", 200)
    assert [(line["logger"], line["message"]) for line in lines(path)] == [
        ("uvicorn.error", "listens"),
        ("uvicorn.access", '127.0.0.1:1 - "GET /v1/health HTTP/1.1" 200'),
    ]
    assert "color_message" not in lines(path)[0]


def test_a_full_disk_does_not_end_the_service(path, capsys, monkeypatch):
    setup(path)
    (handler,) = [h for h in logging.getLogger().handlers if isinstance(h, structured_log._PrivateFile)]

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler.stream, "write", full)
    log.info("a private matter")
    err = capsys.readouterr().err
    assert "No space left" in err
    assert "private" not in err


def test_a_full_disk_raises_nothing_even_if_standard_error_is_on_it(path, monkeypatch):
    setup(path)
    (handler,) = (one for one in logging.getLogger().handlers if isinstance(one, structured_log._PrivateFile))
    full = [os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", 1) for _ in range(2)]
    whole, handler.stream = handler.stream, full[0]
    monkeypatch.setattr(sys, "stderr", full[1])
    log.error("nobody reads this")
    handler.stream = whole
    for file in full:
        with suppress(OSError):  # what it could not write
            file.close()
    log.error("there is room again")
    assert [line["message"] for line in lines(path)] == ["there is room again"]
