import pytest

from pollux.errors import InvalidSpec
from pollux.node.accounts import Account
from pollux.node.inherited import check_names, inherited, whole

SHELL = {
    **{
        "PATH": "/bin",
        "HOME": "/home/a",
        "USER": "a",
        "LANG": "C",
        "LC_ALL": "C",
        "TZ": "UTC",
        "TMPDIR": "/home/a/tmp",
    },
    **{"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "HF_HOME": "/home/a/hf"},
}
SECRETS = {
    **{"HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "NVIDIA_API_KEY": "s", "CUDA_LICENSE_TOKEN": "s"},
    **{"POLLUX_TOKEN_FILE": "s", "POLLUX_URL": "s", "POLLUX_CREDENTIAL": "s", "POLLUX_HOME": "s"},
    **{"POLLUX_COMPRESS": "20", "POLLUX_MACHINE_SLOTS": "9", "POLLUX_REALLOC_DELAY_S": "1"},
    **{"SSH_AUTH_SOCK": "s", "GIT_ASKPASS": "s", "WANDB_API_KEY": "s", "LD_PRELOAD": "s", "ANYTHING": "s"},
}
OTHER = Account("b", 1000, 1000, (1000,), "/home/b", "/bin/sh")


def test_jobs_find_what_programs_need_and_nothing_else():
    assert inherited({**SHELL, **SECRETS}) == SHELL


def test_they_find_what_the_operator_names():
    found = inherited({**SHELL, **SECRETS}, ["WANDB_API_KEY", "NOT_SET"])
    assert found == {**SHELL, "WANDB_API_KEY": "s"}


def test_a_proxy_is_passed_on_unless_a_password_is_in_it():
    open_ = {"http_proxy": "http://proxy:3128", "NO_PROXY": "localhost"}
    given = {**open_, "https_proxy": "http://me:secret@proxy:3128"}
    assert inherited(given) == open_
    assert inherited(given, ["https_proxy"]) == given


def test_another_user_has_its_own_home_and_none_of_our_folders():
    found = inherited(SHELL, account=OTHER)
    assert {name: found[name] for name in ("HOME", "USER", "LOGNAME", "SHELL")} == {
        **{"HOME": "/home/b", "USER": "b", "LOGNAME": "b", "SHELL": "/bin/sh"}
    }
    assert "/home/a" not in " ".join(found.values())
    assert inherited(SHELL, ["HF_HOME", "HOME"], OTHER)["HF_HOME"] == "/home/a/hf"
    assert inherited(SHELL, ["HF_HOME", "HOME"], OTHER)["HOME"] == "/home/a"


def test_a_launch_passes_the_shell_on_but_for_what_belongs_to_other_clusters_and_replicas():
    given = {**SHELL, **SECRETS, "POLLUX_GROUP_TIMEOUT_S": "5", "POLLUX_NEWCOMER": "1"}
    found = whole(given)
    assert {name for name in given if name not in found} == {
        *("POLLUX_TOKEN_FILE", "POLLUX_URL", "POLLUX_CREDENTIAL", "POLLUX_HOME", "POLLUX_NEWCOMER")
    }


def test_names_are_kept_once_and_in_order():
    assert check_names("--job-env", ["B", "A_1", "B"]) == ("B", "A_1")


@pytest.mark.parametrize("name", ["", "A-B", "1A", "A B", "ä", "POLLUX_URL", "POLLUX_X", "KEY=secret"])
def test_what_is_no_name_or_pollux_own_is_refused(name):
    with pytest.raises(InvalidSpec, match="--job-env") as told:
        check_names("--job-env", [name])
    assert "secret" not in str(told.value)
