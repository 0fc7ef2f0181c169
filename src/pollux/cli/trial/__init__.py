"""Trials: jobs on a cluster that lives as long as they do. What `pollux demo` and `pollux fidelity` share.

cluster    up, down, kill                       running    submit, watch until all have ended, collect what they left
folder     where it lives, what is kept         screen     how it looks at a terminal
machine    how busy the cores were meanwhile        faults     what must not have happened to emulated jobs
checking   what is refused before it begins
"""
