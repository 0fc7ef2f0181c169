"""`pollux demo`: real training jobs on a cluster of this machine, first under Pollux and then under static FIFO.

command    what is typed, and how it looks      cluster    up, down, kill
running    one run after the other              workload   which jobs come when, and what they must reach
story      what became of each job              report     tables and a page
"""
