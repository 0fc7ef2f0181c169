"""Reading measured traces: the layout, and every damaged row named at once."""

from __future__ import annotations

import pytest

from pollux.applications.measured import EpochStats, StepTime
from pollux.errors import InvalidDocument, UnknownName
from pollux.simulator.traces import application_names, read_application

PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,16,0.1,0.001\n124,32,0.4,0.2\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n3,8,16,0.5,0.3\n"
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var\n100,99,0.5,2.0,1.0\n200,199,0.7,1.0,3.0\n"


@pytest.fixture
def traces(tmp_path):
    task = tmp_path / "traces" / "task"
    task.mkdir(parents=True)
    (task / "placements.csv").write_text(PLACEMENTS)
    (task / "scalability.csv").write_text(SCALABILITY)
    (task / "validation-64.csv").write_text(VALIDATION)
    return task.parent


def test_a_folder_is_read_into_rows(traces):
    measured = read_application(traces, "task")
    assert measured.steps == [
        StepTime((1,), 16, 0.1, 0.001),
        StepTime((1, 2, 4), 32, 0.4, 0.2),
        StepTime((3, 3, 2), 16, 0.5, 0.3, is_placement_known=False),
    ]
    assert measured.epochs == {64: [EpochStats(100.0, 99.0, 0.5, 2.0, 1.0), EpochStats(200.0, 199.0, 0.7, 1.0, 3.0)]}
    seen = measured.observations()
    assert seen.K.tolist() == [1, 7, 8]
    assert seen.N.tolist() == [1, 3, 3]
    assert seen.t_grad.tolist() == pytest.approx([0.099, 0.2, 0.2])


def test_every_damaged_row_is_named_with_file_line_and_column(traces):
    task = traces / "task"
    (task / "placements.csv").write_text(
        PLACEMENTS + "104,16,0.1,0.0\n2,16,nan,0.0\n2,16,0.1,0.2\n2,zero,0.1,0.0\n2,8.5,0.1,0.0\n"
    )
    (task / "scalability.csv").write_text(SCALABILITY + "4,2,16,0.5,0.3\n")
    (task / "validation-64.csv").write_text("progress,iteration,metric,grad_sqr\n100,99,0.5,2.0\n")
    with pytest.raises(InvalidDocument) as caught:
        read_application(traces, "task")
    message = str(caught.value)
    for expected in (
        "placements.csv line 4: placement = '104'",
        "placements.csv line 5: step_time = 'nan'",
        "placements.csv line 6: sync_time = 0.2 must be below step_time = 0.1",
        "placements.csv line 7: local_bsz = 'zero' is not a number",
        "placements.csv line 8: local_bsz = '8.5' must be a whole number",
        "scalability.csv line 3: num_replicas = 2 is fewer than num_nodes = 4",
        "validation-64.csv line 2: column 'grad_var' is missing",
        "Mend these files",
    ):
        assert expected in message


def test_a_long_list_of_damage_is_cut_and_counted(traces):
    (traces / "task" / "placements.csv").write_text(PLACEMENTS + "x,1,1,0\n" * 30)
    with pytest.raises(InvalidDocument, match="and 20 more"):
        read_application(traces, "task")


def test_missing_or_empty_files_are_named(traces):
    (traces / "task" / "validation-64.csv").unlink()
    with pytest.raises(InvalidDocument, match="no file validation"):
        read_application(traces, "task")
    (traces / "task" / "validation-64.csv").write_text("progress,iteration,metric,grad_sqr,grad_var\n")
    with pytest.raises(InvalidDocument, match=r"validation-64\.csv: no rows"):
        read_application(traces, "task")
    (traces / "task" / "validation-big.csv").write_text(VALIDATION)
    with pytest.raises(InvalidDocument, match="must end in a batch size"):
        read_application(traces, "task")


def test_a_wrong_folder_says_what_was_expected(tmp_path, traces):
    with pytest.raises(InvalidDocument, match="no such folder"):
        application_names(tmp_path / "nowhere")
    with pytest.raises(InvalidDocument, match="folder above the applications"):
        application_names(traces / "task")
    with pytest.raises(UnknownName, match="task"):
        read_application(traces, "tsk")
