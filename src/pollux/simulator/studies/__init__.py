"""Studies: many runs that answer one question, each run done once.

`sweep` varies one thing and looks at what happens; `paper` is the evaluation of the OSDI'21 paper as far as it was
simulated. Both are lists of cases (`cases`); what is published stands in `published`. Pages need matplotlib.
"""
