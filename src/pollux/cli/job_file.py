"""Files of jobs: YAML (and so JSON), one job a document, with the line of every value.

YAML is read here from its syntax tree, not by its constructors: nothing is built but texts, numbers, lists and
mappings, and what was written stays known where YAML makes something else of it (`yes`, `1_000`, `010`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.errors import InvalidJob, MissingDependency
from pollux.wire.api import Fault
from pollux.wire.jobspec import JobRequest, check_files, parse, resolve_env
from pollux.wire.jobspec.reading import shortened

MAX_FILE_BYTES = 1 << 20
MAX_VALUES = 20_000
"""Of one document; anchors let a short one stand for billions."""
MAX_DEPTH = 20
STDIN = Path("-")

_TAG = "tag:yaml.org,2002:"
_TAGGED = ("has a tag, which is not read", "Leave out the word that begins with '!', or put all of it in quotes")


@dataclass
class JobDocument:
    """One document of a file, not yet looked at as a job."""

    content: Any
    lines: dict[str, int] = field(default_factory=dict)
    """By place: `min_gpus`, `env.HOME`, `command[2]`; `` is the whole."""
    texts: dict[str, str] = field(default_factory=dict)
    """What was written, where it is read as something else than text."""
    faults: list[Fault] = field(default_factory=list)


@dataclass
class JobFile:
    """What a file holds: a request or None for each document, and all that is wrong."""

    path: Path
    requests: list[JobRequest | None] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def load_jobs(path: Path, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> list[JobRequest]:
    """The jobs of a file, ready to submit; `-` is standard input. Raises `InvalidJob` with all faults of all of them.

    `overrides` are fields that win over those of the file. Variables of null are taken from `environ`.
    """
    found = check_file(path, environ, overrides)
    if found.faults:
        raise InvalidJob(found.faults, str(path))
    return [request for request in found.requests if request is not None]


def check_file(
    path: Path,
    environ: Mapping[str, str] | None,
    overrides: Mapping[str, Any] | None = None,
) -> JobFile:
    """Read a file and find all its faults.

    Without `environ`, neither variables nor files of this machine are asked for.
    """
    found = JobFile(path)
    base_dir = os.getcwd() if path == STDIN else os.path.dirname(os.path.abspath(path))
    try:
        documents = read_documents(path)
    except InvalidJob as invalid:
        found.faults = _faults_of(invalid)
        return found
    for document in documents:
        found.requests.append(_request(document, base_dir, environ, overrides or {}, found.faults))
    found.faults.sort(key=lambda fault: fault.line or 0)
    return found


def _request(
    document: JobDocument,
    base_dir: str,
    environ: Mapping[str, str] | None,
    overrides: Mapping[str, Any],
    faults: list[Fault],
) -> JobRequest | None:
    content, lines, texts = document.content, document.lines, document.texts
    faults += document.faults
    if content is None:
        return None
    if isinstance(content, Mapping):
        content = resolve_env(_overridden(content, overrides), _Anything() if environ is None else environ)
        lines = {place: line for place, line in lines.items() if place.split("[")[0] not in overrides}
        texts = {place: text for place, text in texts.items() if place.split("[")[0] not in overrides}
    try:
        request = parse(content, lines=lines, texts=texts, base_dir=base_dir)
    except InvalidJob as invalid:
        known = {fault.field for fault in document.faults}
        faults += [fault for fault in _faults_of(invalid) if fault.field not in known]
        return None
    if environ is not None:
        faults += check_files(request, lines)
    return request


def _faults_of(invalid: InvalidJob) -> list[Fault]:
    return [Fault(fault.field, fault.value, fault.problem, fault.fix, fault.line) for fault in invalid.faults]


def _overridden(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields are replaced; variables of the environment one by one. A folder is meant from where the command runs."""
    merged = {**content, **overrides}
    if isinstance(folder := overrides.get("working_dir"), str) and folder:
        merged["working_dir"] = os.path.abspath(os.path.expanduser(folder))
    before, after = content.get("env"), overrides.get("env")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        merged["env"] = {**before, **after}
    return merged


class _Anything(dict[str, str]):
    """An environment in which every variable is set."""

    def get(self, key: str, default: Any = None) -> Any:
        return ""


def read_documents(path: Path) -> list[JobDocument]:
    """Raises `InvalidJob` if the file cannot be read, or holds none."""
    text = _read_text(path)
    documents = list(_documents(text))
    if not documents:
        raise InvalidJob([Fault("", "", "the file holds no job", "Begin with a line like command: python train.py")])
    return documents


def _read_text(path: Path) -> str:
    problem, fix = "", "Name a YAML or JSON file"
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with path.open("rb") as stream:
                raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) <= MAX_FILE_BYTES:
            return raw.decode("utf-8-sig")
        problem, fix = f"the file is longer than {MAX_FILE_BYTES >> 20} MiB", "Split it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem, fix = "the file is no UTF-8 text", "Save it as UTF-8"
    raise InvalidJob([Fault("", "", problem, fix)])


def _documents(text: str) -> Iterator[JobDocument]:
    try:
        import yaml
    except ImportError:
        raise MissingDependency("pyyaml", "Reading files of jobs", "service") from None

    # Not the C loader: it has no limit on depth but the stack's.
    try:
        for node in yaml.compose_all(text, yaml.SafeLoader):
            document = _Composer(node).document
            if document.content is not None or document.faults:
                yield document
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        yield _broken(_without_secrets(str(getattr(error, "problem", "") or "")), mark.line + 1 if mark else None)
    except RecursionError:
        yield _broken("values are too deep inside each other", None)


def _broken(why: str, line: int | None) -> JobDocument:
    """What is left of a document that is no YAML; it has a fault, so nobody looks at the content."""
    fix = 'See that it is "field: value" on each line, with spaces for indents, and quotes around odd characters'
    return JobDocument(None, faults=[Fault("", "", f"not YAML{f' ({why})' if why else ''}", fix, line)])


def _without_secrets(message: str) -> str:
    """A parser's message without the longer things that it quotes: a password that begins with * is an alias to it."""
    return re.sub(r"'[^']*'", _short_quote, " ".join(message.split()))


def _short_quote(found: re.Match[str]) -> str:
    quoted = found[0]
    return quoted if len(quoted) <= 6 or quoted.startswith("'<") else "'…'"


class _Composer:
    """Makes plain data of a syntax tree."""

    def __init__(self, root: Any) -> None:
        from yaml.constructor import SafeConstructor

        self.document = JobDocument(None)
        self._constructor = SafeConstructor()
        self._left = MAX_VALUES
        self._is_cut = False
        self.document.content = self._value(root, "", 0)

    def _fault(self, node: Any, place: str, problem: str, fix: str) -> None:
        self.document.faults.append(Fault(place, "", problem, fix, node.start_mark.line + 1))

    def _may_go_on(self, node: Any, place: str, depth: int) -> bool:
        self._left -= 1
        if self._left >= 0 and depth <= MAX_DEPTH:
            return True
        if not self._is_cut:
            self._fault(node, place, "too many values, or too deep inside each other", "Make it simpler")
        self._is_cut = True
        return False

    def _value(self, node: Any, place: str, depth: int) -> Any:
        if not self._may_go_on(node, place, depth):
            return None
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        found: dict[str, Any] = {}
        match node.id:
            case "mapping" if node.tag == f"{_TAG}map":
                self._take(node, found, place, depth)
                return found
            case "sequence" if node.tag == f"{_TAG}seq":
                return [self._value(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(node.value)]
            case "scalar":
                return self._scalar(node, place)
        self._fault(node, place, *_TAGGED)
        return None

    def _take(self, node: Any, found: dict[str, Any], place: str, depth: int) -> None:
        """What `found` does not hold yet: in YAML, what a mapping says itself wins over what it merges by `<<`."""
        own: dict[str, int] = {}
        merged: list[Any] = []
        for key, value in node.value:
            if not self._may_go_on(key, place, depth):
                return
            if key.id != "scalar":
                self._fault(key, place, "a key that is not text", "Write field: value")
                continue
            if key.tag == f"{_TAG}merge":
                merged += value.value if value.id == "sequence" else [value]
                continue
            name, line = key.value, key.start_mark.line + 1
            inner = f"{place}.{name}" if place else name
            if name in own:
                # What stands behind a "=" may be a secret.
                problem = f"given twice, first on line {own[name]}"
                self._fault(key, shortened(inner.split("=")[0]), problem, "Leave one of them out")
                continue
            own[name] = line
            if name not in found:
                self.document.lines[inner] = line
                found[name] = self._value(value, inner, depth + 1)
        for other in merged:
            if other.id == "mapping":
                self._take(other, found, place, depth + 1)
            else:
                self._fault(other, place, "<< takes a mapping", "Write <<: *name, where a mapping has &name")

    def _scalar(self, node: Any, place: str) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind in ("str", "timestamp", "value", "merge"):
            return node.value
        self.document.texts[place] = node.value
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return self._constructor.construct_yaml_bool(node)
                case "int":
                    return self._constructor.construct_yaml_int(node)
                case "float":
                    return self._constructor.construct_yaml_float(node)
        except (ValueError, KeyError, IndexError):
            self._fault(node, place, "cannot be read as a number or flag", "Put it in quotes, or write it otherwise")
            return None
        self._fault(node, place, *_TAGGED)
        return None
