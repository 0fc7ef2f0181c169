"""GPUs that are there, GPUs that are there and cannot be used, and machines without."""

from __future__ import annotations

import pytest

from pollux.errors import InvalidSpec
from pollux.providers.local import DeviceReport, describe_devices
from pollux.providers.local.devices import slots_of_each


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").touch()
    card(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    return tmp_path


def card(root, name, vendor, kind):
    folder = root / "sys/bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def gpus(root, *numbers, driver=True):
    for name in ("ctl", "-uvm", *numbers):
        (root / f"dev/nvidia{name}").touch()
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").touch()


def test_a_machine_with_cores_only_has_no_problem(machine):
    assert describe_devices({}, machine) == DeviceReport([])


def test_a_machine_that_tells_nothing_has_no_problem(tmp_path):
    assert describe_devices({}, tmp_path) == DeviceReport([])


def test_gpus_are_found_in_order_and_numbered_as_cuda_does(machine):
    gpus(machine, 2, 10, 7)
    assert describe_devices({}, machine) == DeviceReport(["0", "1", "2"])


@pytest.mark.parametrize(
    ("listed", "devices"),
    [("1,0", ["1", "0"]), (" 1 ", ["1"]), ("GPU-8f6d,1", ["GPU-8f6d", "1"]), ("0,-1,1", ["0"]), ("0,,1", ["0"])],
)
def test_only_those_are_used_that_may_be(machine, listed, devices):
    gpus(machine, 0, 1)
    assert describe_devices({"CUDA_VISIBLE_DEVICES": listed}, machine) == DeviceReport(devices)


@pytest.mark.parametrize("listed", ["", "-1"])
def test_who_wants_no_gpu_is_told_of_no_problem(machine, listed):
    gpus(machine, 0, driver=False)
    assert describe_devices({"CUDA_VISIBLE_DEVICES": listed}, machine) == DeviceReport([])


@pytest.mark.parametrize("numbers", [(0, 1), ()])
def test_files_without_a_driver_are_a_problem(machine, numbers):
    gpus(machine, *numbers, driver=False)
    report = describe_devices({}, machine)
    assert report.devices == []
    assert "the NVIDIA driver is not loaded" in report.problem
    assert "modprobe nvidia" in report.problem


def test_a_card_without_a_driver_is_a_problem(machine):
    card(machine, "0000:65:00.0", "0x10DE", "0x030200")
    card(machine, "0000:65:00.1", "0x10de", "0x040300")  # its sound
    report = describe_devices({}, machine)
    assert report.devices == []
    assert "0000:65:00.0" in report.problem
    assert "Install the NVIDIA driver" in report.problem


def test_a_card_of_another_maker_is_none(machine):
    card(machine, "0000:65:00.0", "0x1002", "0x030000")
    assert describe_devices({}, machine).problem == ""


@pytest.mark.parametrize(
    ("numbers", "listed", "usable", "said"),
    [
        ((), "0", [], "CUDA_VISIBLE_DEVICES=0 names device 0, but there is no GPU here. Unset it"),
        ((), "GPU-8f6d", [], "there is no GPU here"),
        ((0, 1), "2", [], "names device 2, but the devices here are 0, 1. Name only these"),
        ((0, 1), "1,5,0", ["1"], "names device 5, but the devices here are 0, 1, and CUDA ignores it with all that"),
    ],
)
def test_devices_that_are_named_and_not_there_are_a_problem(machine, numbers, listed, usable, said):
    if numbers:
        gpus(machine, *numbers)
    report = describe_devices({"CUDA_VISIBLE_DEVICES": listed}, machine)
    assert report.devices == usable
    assert said in report.problem


class TestSlots:
    def test_gpus_are_shared_evenly(self):
        assert slots_of_each(2, None, ["0", "1", "2", "3", "4"]) == 2
        assert slots_of_each(2, 1, ["0", "1", "2", "3"]) == 1

    def test_cores_are_shared_and_each_node_has_one_at_least(self):
        assert slots_of_each(1000, None, []) == 1
        assert slots_of_each(3, 7, []) == 7

    @pytest.mark.parametrize(("nodes", "slots", "field"), [(3, None, "nodes"), (2, 2, "slots"), (1, 3, "slots")])
    def test_more_than_there_are_gpus_is_refused(self, nodes, slots, field):
        with pytest.raises(InvalidSpec, match=field) as caught:
            slots_of_each(nodes, slots, ["0", "1"])
        assert "2 GPUs" in str(caught.value)
        assert "CUDA_VISIBLE_DEVICES=" in str(caught.value)
