"""What the launcher tells a replica."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.agent.training import adamw, delivered, expected, loader_of, network, sgd, train

from pollux.agent import environment
from pollux.agent.environment import BatchVariables, Environment, take_credentials
from pollux.errors import InvalidSpec
from pollux.torch import Job

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
}


def test_without_a_launcher_there_is_one_replica_and_nobody_to_report_to():
    assert Environment.read({}) == Environment(0, 1, 0, 1, "local", 1, None, None, None)


def test_variables_of_torchrun_and_of_pollux_are_read(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    pollux = {
        "POLLUX_JOB": "ncf-3",
        "POLLUX_GENERATION": "4",
        "POLLUX_CHECKPOINT_DIR": "/checkpoints",
        "POLLUX_REPORT_URL": "http://127.0.0.1:1",
        "POLLUX_TOKEN_FILE": str(token),
    }
    read = Environment.read({**TORCHRUN, **pollux})
    assert (read.rank, read.size, read.local_rank, read.num_nodes) == (5, 8, 1, 2)
    assert (read.job, read.generation) == ("ncf-3", 4)
    assert read.checkpoint_dir == Path("/checkpoints")
    assert (read.report_url, read.token) == ("http://127.0.0.1:1", "secret")


def test_credentials_are_read_and_not_shown():
    read = Environment.read({"POLLUX_CREDENTIAL": "5ecret", "POLLUX_JOB_SECRET": "hu5h"})
    assert (read.credential, read.job_secret) == ("5ecret", "hu5h")
    assert "5ecret" not in repr(read)
    assert "hu5h" not in repr(read)


def test_a_replica_takes_its_credentials_out_of_what_the_programs_it_starts_inherit(monkeypatch):
    monkeypatch.setattr(environment, "_taken", {})
    monkeypatch.setenv("POLLUX_CREDENTIAL", "5ecret")
    monkeypatch.setenv("POLLUX_JOB_SECRET", "hu5h")
    take_credentials()
    assert "5ecret" not in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert (Environment.read().credential, Environment.read().job_secret) == ("5ecret", "hu5h")
    take_credentials()  # of which there are none
    assert Environment.read().credential == "5ecret"


def test_the_number_of_nodes_follows_from_the_replicas_on_this_one():
    without = {name: value for name, value in TORCHRUN.items() if name != "GROUP_WORLD_SIZE"}
    assert Environment.read(without).num_nodes == 2
    assert Environment.read({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}).num_nodes == 3


def test_empty_variables_are_as_good_as_none():
    assert Environment.read(dict.fromkeys((*TORCHRUN, "POLLUX_JOB", "POLLUX_GENERATION"), "")) == Environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "-1"),
        ("RANK", "8"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("LOCAL_RANK", "1.5"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("GROUP_WORLD_SIZE", "x"),
        ("POLLUX_GENERATION", "0"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(InvalidSpec) as caught:
        Environment.read({**TORCHRUN, name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidSpec, match="POLLUX_TOKEN_FILE"):
        Environment.read({"POLLUX_TOKEN_FILE": str(tmp_path / "none")})


SIZES = {
    "POLLUX_INITIAL_BATCH_SIZE": "8",
    "POLLUX_MAX_BATCH_SIZE": "64",
    "POLLUX_MIN_PER_GPU_BATCH_SIZE": "2",
    "POLLUX_MAX_PER_GPU_BATCH_SIZE": "32",
    "POLLUX_BATCH_SIZE": "16",
}


def test_batch_sizes_of_the_specification_are_read():
    assert Environment.read({**SIZES, "POLLUX_FIXED_BATCH": "1"}).batch == BatchVariables(8, 64, 2, 32, 16, True)
    assert Environment.read({"POLLUX_FIXED_BATCH": "0", "POLLUX_BATCH_SIZE": ""}).batch == BatchVariables()


@pytest.mark.parametrize("name", [*SIZES, "POLLUX_FIXED_BATCH"])
@pytest.mark.parametrize("value", ["-1", "many", "2.5"])
def test_a_bad_batch_size_is_named(name, value):
    with pytest.raises(InvalidSpec) as caught:
        Environment.read({name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("POLLUX_INITIAL_BATCH_SIZE", "POLLUX_MAX_BATCH_SIZE"),
        ("POLLUX_INITIAL_BATCH_SIZE", "POLLUX_BATCH_SIZE"),
        ("POLLUX_BATCH_SIZE", "POLLUX_MAX_BATCH_SIZE"),
        ("POLLUX_MIN_PER_GPU_BATCH_SIZE", "POLLUX_MAX_PER_GPU_BATCH_SIZE"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_named(lower, upper):
    assert Environment.read({lower: "8", upper: "8"}).batch != BatchVariables()
    with pytest.raises(InvalidSpec, match=f"{lower} .*{upper} = 8") as caught:
        Environment.read({lower: "9", upper: "8"})
    assert caught.value.field == lower


@pytest.fixture
def make_job(monkeypatch):
    jobs = []

    def make(variables, **options):
        for name, value in variables.items():
            monkeypatch.setenv(f"POLLUX_{name}", str(value))
        jobs.append(Job(**options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def prepared(job, batch_size=16, optimizer=sgd, count=640):
    model = network()
    return job.prepare(model, optimizer(model), loader_of(count, batch_size))


def test_the_owner_chooses_the_limits_and_wins_over_the_script(make_job):
    variables = {"MAX_BATCH_SIZE": 256, "MIN_PER_GPU_BATCH_SIZE": 4, "MAX_PER_GPU_BATCH_SIZE": 32}
    job = make_job(variables, max_batch_size=32, min_per_gpu_batch_size=2, max_per_gpu_batch_size=8)
    prepared(job)
    limits = job._made.adapter.limits
    assert (limits.initial_batch_size, limits.max_batch_size) == (16, 256)
    assert (limits.min_per_gpu_batch_size, limits.max_per_gpu_batch_size) == (4, 32)
    assert job.options.max_batch_size == 32


def test_what_the_owner_leaves_open_is_as_the_script_says(make_job):
    job = make_job({"MAX_BATCH_SIZE": 256}, max_per_gpu_batch_size=8)
    prepared(job)
    assert job._made.adapter.limits.max_per_gpu_batch_size == 8


@pytest.mark.parametrize("initial", [8, 40])
def test_the_owners_m0_takes_the_place_of_the_loaders(make_job, initial):
    job = make_job({"INITIAL_BATCH_SIZE": initial}, measure_noise=False, adapt=False)
    loader = loader_of(80, 16)
    run = train(job, loader, turns=2, passes=False)
    assert job._made.loader.batch_size == job.batch_size == initial
    assert len(job._made.loader) == 80 // initial
    assert job.steps == job.progress == 2 * 80 // initial
    assert delivered([run]) == expected(80, 2)
    assert job.learning_rate_factors == (1.0,)


def test_a_job_begins_with_the_batch_size_that_the_owner_chose_and_scales_the_learning_rate(make_job):
    job = make_job({"BATCH_SIZE": 64}, measure_noise=False)
    train(job, loader_of(128, 16), make_optimizer=adamw)
    assert job.batch_size == 64
    assert job.steps == 2
    assert job.learning_rate_factors == (2.0,)


def test_a_batch_size_to_begin_with_may_be_left(make_job):
    job = make_job({"BATCH_SIZE": 64})
    prepared(job)
    adapter = job._made.adapter
    assert job._made.tuner._options.adapt
    assert adapter.guard is not None
    assert adapter.limits.max_batch_size == 64  # a tenth of the data, and what the owner chose


def test_a_fixed_batch_is_the_loaders(make_job):
    job = make_job({"FIXED_BATCH": 1, "MIN_PER_GPU_BATCH_SIZE": 64}, max_batch_size=256)
    prepared(job)
    assert job.batch_size == 16
    assert not job._made.tuner._options.adapt


def test_a_fixed_batch_that_the_owner_chose_is_kept_whatever_the_loss_does(make_job):
    job = make_job({"FIXED_BATCH": 1, "BATCH_SIZE": 48})
    prepared(job)
    assert job.batch_size == 48
    assert not job._made.tuner._options.adapt
    assert job._made.adapter.guard is None


def test_a_fixed_batch_is_kept_over_a_resume_from_another_one(make_job, tmp_path):
    first = make_job({"FIXED_BATCH": 1, "BATCH_SIZE": 32}, checkpoint_dir=tmp_path)
    train(first, loader_of(64, 16))
    first.close()
    second = make_job({"BATCH_SIZE": 48}, checkpoint_dir=tmp_path)
    prepared(second, count=64)
    assert (second.steps, second.batch_size) == (2, 48)


@pytest.mark.parametrize(
    ("variables", "options", "field"),
    [
        ({"MAX_BATCH_SIZE": 8}, {"max_batch_size": 64}, "POLLUX_MAX_BATCH_SIZE"),
        ({"INITIAL_BATCH_SIZE": 128}, {"max_batch_size": 64}, "POLLUX_INITIAL_BATCH_SIZE"),
        ({"BATCH_SIZE": 128}, {"max_batch_size": 64}, "POLLUX_BATCH_SIZE"),
        ({"BATCH_SIZE": 8}, {}, "POLLUX_BATCH_SIZE"),
        ({}, {"max_batch_size": 8}, "max_batch_size"),
    ],
)
def test_what_contradicts_the_script_is_named(make_job, variables, options, field):
    job = make_job(variables, **options)
    with pytest.raises(InvalidSpec) as caught:
        prepared(job)
    assert caught.value.field == field
