"""Built-in profiles of known training tasks: our own fitted parameters and curves, one small JSON file each."""

from pollux.applications.application import Application, MetricCurve, NoiseCurve, PassTime
from pollux.applications.catalogue import load, names

__all__ = ["Application", "MetricCurve", "NoiseCurve", "PassTime", "load", "names"]
