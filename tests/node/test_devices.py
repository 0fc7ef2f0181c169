"""GPUs of a machine, as its driver tells of them in files."""

import pytest

from pollux.node.devices import devices_of, gpu_type


def driver(folder, *models):
    for number, model in enumerate(models):
        path = folder / f"0000:{number:02}:00.0" / "information"
        path.parent.mkdir()
        path.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 35\nGPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n")
    return folder


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA GeForce RTX 3090", "geforce-rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
    ],
)
def test_the_model_becomes_a_word(tmp_path, model, word):
    assert gpu_type(["0"], driver(tmp_path, model)) == word


def test_the_most_frequent_type_counts(tmp_path):
    assert gpu_type(["0", "1", "2"], driver(tmp_path, "Tesla T4", "Tesla P100", "Tesla P100")) == "p100"


def test_without_gpus_slots_are_cpus(tmp_path):
    assert gpu_type([], driver(tmp_path, "Tesla T4")) == "cpu"


def test_gpus_without_a_talkative_driver_are_gpus(tmp_path):
    assert gpu_type(["0"], tmp_path / "none") == "gpu"
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "information").write_text("IRQ: 35\n")
    assert gpu_type(["0"], tmp_path) == "gpu"


def test_slots_stand_for_gpus_in_order():
    assert devices_of([1, 2], ["0", "GPU-7", "5"]) == "GPU-7,5"
    assert devices_of([1, 3, 4], ["0", "1"]) == "1,0"
