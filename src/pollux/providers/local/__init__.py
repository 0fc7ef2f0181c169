"""This machine as a cluster: some daemons that act as nodes and share its GPUs, or its cores."""

from pollux.providers.local.devices import DeviceReport, describe_devices
from pollux.providers.local.provider import LocalProvider

__all__ = ["DeviceReport", "LocalProvider", "describe_devices"]
