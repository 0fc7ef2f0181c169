"""Castor, Pollux's twin: the same measurements and the same solver, but jobs that are nearly done go first."""
