"""Emulated clusters at the command line: what `pollux up` makes of its options, how tables say it, and their jobs."""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.live_cluster import LiveFake, serving, short_folder
from typer.testing import CliRunner

from pollux.cli import emulated, up
from pollux.cli.cluster_options import options_of, with_emulation
from pollux.cli.main import app
from pollux.core import FrozenMap, Node, NodeId, NodeJoined
from pollux.errors import InvalidInput, InvalidSpec, UnknownName
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterConfig, ClusterFolder
from pollux.wire.jobspec import parse

runner = CliRunner()
PLAIN = ClusterConfig(nodes=2)
EMULATED = replace(PLAIN, acts_as="t4")


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.delenv("POLLUX_URL", raising=False)
    with short_folder() as path:
        monkeypatch.setenv("POLLUX_HOME", str(path))
        yield path


def run(*arguments, code=0):
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


@pytest.fixture
def service():
    """Its nodes are emulated."""
    made = LiveFake()
    for name in ("n0", "n1"):
        made.hear(NodeJoined(Node(NodeId(name), 2, "emulated-t4", FrozenMap({"compress": "20"}))))
    with serving(made, ClusterFolder()):
        yield made


class TestOptions:
    def told(self, before=PLAIN, emulate=None, compress=None, gpu_type=None, realloc_delay=None):
        return with_emulation(before, emulate, compress, gpu_type, realloc_delay)

    def test_nothing_given_is_as_before(self):
        assert self.told() == PLAIN
        assert self.told(EMULATED) == EMULATED

    def test_it_is_a_t4_twenty_times_as_fast(self):
        now = self.told(emulate=True)
        assert (now.acts_as, now.compress, now.realloc_delay_s) == ("t4", 20.0, 30.0)

    def test_what_is_given_wins_and_what_was_given_stays(self):
        now = self.told(replace(EMULATED, compress=5.0), emulate=True, realloc_delay=0.0)
        assert (now.acts_as, now.compress, now.realloc_delay_s) == ("t4", 5.0, 0.0)
        assert self.told(now, emulate=False).acts_as is None
        assert self.told(now, compress=9.0).compress == 9.0, "it is remembered that it is emulated"

    @pytest.mark.parametrize(
        ("flag", "given"), [("--compress", {"compress": 2.0}), ("--gpu-type", {"gpu_type": "t4"}),
                            ("--realloc-delay", {"realloc_delay": 1.0})],
    )  # fmt: skip
    def test_without_emulation_they_mean_nothing(self, flag, given):
        for emulate in (None, False):
            with pytest.raises(InvalidInput, match=f"{flag} .* Give --emulate, too"):
                self.told(emulate=emulate, **given)

    def options(self, **fields):
        return options_of(ClusterFolder(Path("/nowhere")), replace(EMULATED, **fields))

    def test_a_service_sees_compressed_seconds_and_real_timeouts(self):
        usual, options = ServiceOptions(Path("/nowhere")), self.options(compress=10.0, realloc_delay_s=40.0)
        assert (options.interval_s, options.usual_delay_s) == (6.0, 4.0)
        assert (options.early_gap_s, options.retry_pause_s) == (usual.early_gap_s / 10, usual.retry_pause_s / 10)
        for name in ("gather_s", "node_grace_s", "recovery_s", "stop_timeout_s", "plan_timeout_s"):
            assert getattr(options, name) == getattr(usual, name)
        assert options.policy_options["unmeasured_delay_s"] == 4.0

    def test_so_do_policies_whether_they_were_told_or_not(self):
        assert self.options(policy="tiresias").policy_options == {"service_threshold_gpu_s": 57_600 / 20}
        told = self.options(policy_options=FrozenMap({"realloc_delay_s": 10.0, "p": -2, "solver": "genetic"}))
        assert told.policy_options == {"realloc_delay_s": 0.5, "unmeasured_delay_s": 1.5, "p": -2, "solver": "genetic"}
        assert self.options(policy="fifo").policy_options == {}

    def test_nodes_and_replicas_are_told_what_they_are(self):
        options = self.options(slots=3, compress=2.5)
        assert options.gpu_type == "emulated-t4"
        assert options.node_labels == {"compress": "2.5"}
        told = {"POLLUX_COMPRESS": "2.5", "POLLUX_REALLOC_DELAY_S": "30", "POLLUX_MACHINE_SLOTS": "6"}
        assert options.replica_env == told
        assert self.options().slots == 4, "cores say nothing about GPUs that are not there"

    def test_a_real_cluster_is_told_nothing(self):
        options = options_of(ClusterFolder(Path("/nowhere")), PLAIN)
        assert (options.gpu_type, options.node_labels, options.replica_env) == (None, {}, {})
        assert options.interval_s == 60.0

    @pytest.mark.parametrize("compress", [0.0, -1.0, float("inf"), float("nan")])
    def test_time_cannot_stand_still_or_be_over(self, compress):
        with pytest.raises(InvalidInput, match="--compress"):
            self.options(compress=compress)

    def test_a_delay_is_no_longer_than_those_who_wait_for_a_job_are_patient(self):
        assert self.options(compress=2.0, realloc_delay_s=120.0).usual_delay_s == 60.0
        told = r"--realloc-delay = 121\.0: is 60\.5 real seconds with --compress 2, .* Lower it to 120, or raise --comp"
        with pytest.raises(InvalidInput, match=told):
            self.options(compress=2.0, realloc_delay_s=121.0)

    def test_variables_of_a_shell_do_not_make_a_pace(self):
        from pollux.cli.trial.cluster import NOT_OURS
        from pollux.node.inherited import inherited

        pace = self.options().replica_env
        assert len(pace) == 3
        assert inherited(pace) == {}
        assert pace.keys() < set(NOT_OURS)

    def test_agents_call_and_judge_it_alike(self):
        pytest.importorskip("torch")
        from pollux.agent import emulation, pacing
        from pollux.cli.fidelity.result import MAX_SLIP

        assert emulated.PREFIX == emulation.PREFIX
        assert pacing.MOST_SLIP == MAX_SLIP

    def test_what_else_cannot_be_is_told(self):
        with pytest.raises(InvalidInput, match="--realloc-delay"):
            self.options(realloc_delay_s=-1.0)
        with pytest.raises(UnknownName, match=r"--gpu-type = 'v9': no such name\. Known: t4"):
            self.options(acts_as="v9")
        with pytest.raises(InvalidSpec, match="node_labels"):
            ServiceOptions(Path("/nowhere"), node_labels={"a": "b"})


class TestUp:
    @pytest.fixture(autouse=True)
    def served(self, monkeypatch):
        from pollux.service import serving as service_process

        calls = []
        monkeypatch.setattr(service_process, "main", lambda options: calls.append(options) or 0)
        return calls

    def up(self, *arguments, code=0):
        return run("up", "--foreground", "--port", "0", *arguments, code=code).stderr

    def test_it_is_remembered_until_it_is_told_otherwise(self, served):
        self.up("--emulate", "--compress", "10", "--slots", "2")
        self.up("--compress", "30")
        self.up()
        self.up("--no-emulate")
        assert [options.gpu_type for options in served] == ["emulated-t4"] * 3 + [None]
        assert [options.interval_s for options in served] == [6.0, 2.0, 2.0, 60.0]

    def test_what_is_wrong_is_told_before_anything_starts(self, served):
        assert "Give --emulate, too" in self.up("--compress", "20", code=2)
        assert "must be finite" in self.up("--emulate", "--compress", "inf", code=2)
        assert not served
        assert ClusterFolder().config() is None

    def test_a_crowd_and_great_haste_are_noted_politely(self):
        assert "share" not in self.up("--emulate", "--slots", "9")
        assert "1000 emulated GPUs share" in self.up("--emulate", "--slots", "1000")

    def test_a_start_must_not_take_longer_than_what_it_emulates(self):
        hasty = "with --realloc-delay 30 the figures mean something up to --compress 30."
        assert "a second to start" not in self.up("--emulate", "--slots", "1", "--compress", "30")
        assert hasty in self.up("--compress", "31")
        assert "a second to start" not in self.up("--realloc-delay", "31")
        assert "with --realloc-delay 0 no figures mean much" in self.up("--realloc-delay", "0")

    def test_help_says_which_seconds_are_meant(self):
        told = " ".join(run("up", "--help").stdout.replace("│", " ").split())
        assert "emulated seconds with --emulate" in told
        assert "stops a job, in emulated seconds" in told

    def test_what_goes_on_is_not_given_another_pace(self, served):
        self.up("--emulate")
        lock = ClusterFolder().nodes / "n0" / "lock"
        lock.parent.mkdir(parents=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as if its daemon ran on
            for arguments in (
                *(["--compress", "40"], ["--no-emulate"], ["--realloc-delay", "1"]),
                *(["--slots", "8"], ["--nodes", "3"]),
            ):
                told = self.up(*arguments, code=1)
                assert "Daemons and jobs go on" in told
                assert "Save and end them first with pollux down" in told
            assert len(served) == 1
            assert "is emulated (1 × 4 t4, --compress 20, --realloc-delay 30)" in told
            assert "asked for is emulated (3 × 4 t4," in told
            self.up()
            self.up("--slots", "4")  # what it has
        self.up("--compress", "40")
        assert [options.node_labels["compress"] for options in served] == ["20", "20", "20", "40"]

    def test_what_is_ready_is_called_emulated(self, service, capsys):
        from pollux.cli.finding import find

        with find() as client:
            up._tell(ClusterFolder(), client.cluster(), "http://here")
        told = capsys.readouterr().out
        assert (
            "Ready: 4 emulated T4 GPUs on 2 nodes (n0: 2, n1: 2), policy fifo, a round every 1200 s (60 s here)" in told
        )
        assert "20 × faster than real: one second here is 20 s there." in told
        assert "pollux run --emulate cifar10:0.1" in told


class TestTables:
    REMARK = "mulated T4 GPUs, 20 × faster than real"
    SECONDS = "Times and rates are in real seconds here; one of them is 20 emulated ones."

    def test_all_say_that_it_is_emulated(self, service):
        service.add()
        service.place(**{"j-1": {"n0": 1}})
        for command in ("nodes", "ps"):
            assert f"E{self.REMARK}. {self.SECONDS}" in run(command).stderr
        assert "emulated-t4" in run("nodes").stdout
        described = run("describe", "j-1").stdout
        assert f"runs on        e{self.REMARK}" in described
        assert f"seconds        {self.SECONDS}" in described
        top = run("top", "--once").stdout
        assert "1 of 4 emulated T4 GPUs used on 2 nodes · 20 × faster than real" in top
        assert self.SECONDS in top

    def test_and_so_does_json(self, service):
        assert '"gpu_type": "emulated-t4"' in run("nodes", "--json").stdout
        assert '"compress": "20"' in run("nodes", "--json").stdout

    def test_of_a_real_cluster_nobody_says_so(self):
        real = LiveFake()
        real.add()
        with serving(real, ClusterFolder()):
            for command in (["nodes"], ["ps"], ["top", "--once"], ["describe", "j-1"]):
                result = run(*command)
                assert "mulated" not in result.stdout + result.stderr

    def test_slow_and_real_speed_read_well(self):
        assert emulated.pace(1.0) == "as fast as real"
        assert emulated.seconds([Node(NodeId("n0"), 1, "emulated-t4")]) == "", "all seconds are the same"
        assert emulated.pace(0.5) == "2 × slower than real: one second here is 0.5 s there"

    @pytest.mark.parametrize(("kind", "advice"), [("emulated-t4", "--emulate APP"), ("t4", "-- python train.py")])
    def test_top_without_jobs_advises_one_that_can_run(self, kind, advice):
        from rich.console import Console

        from pollux.cli.finding import find
        from pollux.cli.top import RecentJobs, screen

        made = LiveFake()
        for name in ("n0", "n1"):
            made.hear(NodeJoined(Node(NodeId(name), 2, kind)))
        with serving(made, ClusterFolder()), find() as client:
            look = RecentJobs().look(client)
        console = Console(width=200)
        with console.capture() as told:
            console.print(screen(look, 200))
        assert f"Submit one: pollux submit {advice}" in told.get()


class TestJobs:
    def test_the_document_says_all_that_is_needed(self):
        document = emulated.emulated_document("cifar10:0.2", requested_gpus=2)
        request = parse(document)
        assert request.command == ("python", "emulated.py", "cifar10:0.2")
        assert (request.application, request.name, request.retries) == ("cifar10:0.2", "cifar10", 0)
        assert Path(request.script or "").is_file()
        fixed = emulated.emulated_document("ncf", name="mine", batch_size=512, fixed_batch=True)
        assert (fixed["name"], fixed["batch_size"], fixed["fixed_batch"]) == ("mine", 512, True)
        assert "requested_gpus" not in fixed

    def test_it_waits_for_emulated_gpus(self, service):
        assert emulated.emulated_document("ncf")["gpu_type"] == "emulated-t4"
        run("submit", "--emulate", "ncf")
        assert service.job("j-1").spec.gpu_type == "emulated-t4"
        for name in ("n0", "n1"):
            service.hear(NodeJoined(Node(NodeId(name), 2, "emulated-v9", FrozenMap({"compress": "20"}))))
        run("submit", "--emulate", "ncf")
        assert service.job("j-2").spec.gpu_type == "emulated-v9", "that of the cluster"

    def test_it_is_submitted_with_the_options_of_other_jobs(self, service):
        run("submit", "--emulate", "ncf:20", "--requested-gpus", "2", "--team", "vision", "--name", "mine")
        spec = service.job("j-1").spec
        assert (spec.application, spec.requested_gpus, spec.team, spec.name) == ("ncf:20", 2, "vision", "mine")
        assert not spec.rigid

    @pytest.mark.parametrize("command", ["run", "submit"])
    def test_an_unknown_application_is_answered_with_the_known(self, service, command):
        told = run(command, "--emulate", "resnet", code=2).stderr
        assert "--emulate = 'resnet': no such name" in told
        assert "bert, cifar10, deepspeech2, imagenet, ncf, yolov3" in told
        assert not service.scheduler.state.jobs

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (["--gpus", "2"], "--requested-gpus"),
            (["--working-dir", "/tmp"], "does not go with --emulate"),
            (["--application", "bert"], "does not go with --emulate"),
            (["--gpu-type", "t4"], "does not go with --emulate"),
            (["--batch-size", "7"], "--batch-size = 7: ncf trains with 256 to 32768"),
            (["--batch-size", "65536"], "--batch-size = 65536: ncf trains with 256 to 32768"),
            (["--", "python", "train.py"], "python is given, too"),
        ],
    )
    def test_what_cannot_be_meant_is_told(self, service, arguments, word):
        for command in ("run", "submit"):
            assert word in run(command, "--emulate", "ncf", *arguments, code=2).stderr
        assert not service.scheduler.state.jobs

    @pytest.mark.parametrize("command", ["run", "submit"])
    def test_a_real_cluster_does_not_take_it(self, command):
        real = LiveFake()
        with serving(real, ClusterFolder()):
            told = run(command, "--emulate", "ncf", code=1).stderr
        assert "not emulated" in told
        assert "pollux up --emulate" in told
        assert not real.scheduler.state.jobs

    def test_nothing_to_run_is_told(self, service):
        assert "pollux run -- python train.py" in run("run", code=2).stderr

    @pytest.mark.parametrize(
        ("application", "word"),
        [
            ("ncf:1e9", "--emulate = 'ncf:1e9': is longer than 1000 training runs of ncf. Give ncf:1000 or less"),
            ("ncf:inf", "--emulate = 'ncf:inf': says no length"),
            ("--dir", "--emulate = '--dir': APP is missing"),
        ],
    )
    def test_a_slip_of_the_hand_is_told(self, service, application, word):
        for command in ("run", "submit"):
            rest = ["/tmp/x"] if application == "--dir" else []
            assert word in run(command, "--emulate", application, *rest, code=2).stderr
        assert not service.scheduler.state.jobs

    def test_without_a_cluster_the_advice_is_an_emulated_one(self, home):
        assert "Start one with pollux up --emulate." in run("run", "--emulate", "ncf", code=1).stderr
        told = run("submit", "--emulate", "ncf", "--dir", f"{home}/x", code=1).stderr
        assert f"Start one with pollux up --dir {home}/x --emulate." in told


class TestOwnScripts:
    """On an emulated cluster."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.py").write_text("from pollux.torch import Job\njob = Job()\n")
        (tmp_path / "acts.py").write_text("from pollux.torch import Job\njob = Job(emulate='ncf')\n")
        (tmp_path / "other.py").write_text("print(1)\n")

    @pytest.mark.parametrize(
        "arguments", [["run"], ["submit"], ["submit", "--dry-run"], ["submit", "--gpus", "1"]], ids=" ".join
    )
    def test_one_without_a_pace_is_refused_at_once(self, service, arguments):
        told = run(*arguments, "--", "python", "own.py", code=2).stderr
        assert "command = 'python own.py': the GPUs of this cluster are emulated" in told
        assert "--emulate APP" in told
        assert "pollux up --no-emulate" in told
        assert not service.scheduler.state.jobs

    def test_so_is_one_of_several_in_files(self, service, tmp_path):
        (tmp_path / "jobs.yaml").write_text("command: echo hi\ngpus: 1\n---\ncommand: python own.py\n")
        assert "command = 'python own.py'" in run("submit", "jobs.yaml", code=2).stderr
        assert not service.scheduler.state.jobs

    def test_one_that_emulates_is_taken(self, service):
        assert "paced" not in run("submit", "--", "python", "acts.py").stderr
        assert "paced" not in run("submit", "--gpu-type", "emulated-t4", "--", "python", "own.py").stderr, "it may"

    @pytest.mark.parametrize(
        ("command", "name"), [(["--gpus", "1", "--", "echo", "hi"], "echo"), (["--", "python", "other.py"], "other.py")]
    )
    def test_what_has_no_pace_is_noted(self, service, command, name):
        note = f"{name} is not paced: it runs as it is on this machine's CPU."
        assert note in run("submit", *command).stderr
        assert len(service.scheduler.state.jobs) == 1

    def test_of_several_all_in_one_note(self, service, tmp_path):
        (tmp_path / "jobs.yaml").write_text("command: echo hi\ngpus: 1\n---\ncommand: echo ho\ngpus: 1\n")
        told = run("submit", "jobs.yaml").stderr
        assert told.count("2 plain commands are not paced: they run as they are on this machine's CPU.") == 1

    def test_elsewhere_nobody_is_told(self):
        real = LiveFake()
        with serving(real, ClusterFolder()):
            for arguments in (["--", "python", "own.py"], ["--gpus", "1", "--", "echo", "hi"]):
                assert "paced" not in run("submit", *arguments).stderr
