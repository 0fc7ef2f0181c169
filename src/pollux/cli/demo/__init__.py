"""`pollux demo`: training jobs on a cluster of this machine, first under Pollux and then under static FIFO.

command    what is typed, and how it looks      workload          which jobs come when, and what they must reach
running    one run after the other              report            tables and a page
story      what became of each job
emulated   the same on emulated GPUs            emulated_report   tables and a page of that
"""
