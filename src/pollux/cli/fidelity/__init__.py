"""`pollux fidelity`: one workload live on an emulated cluster and in the simulator, side by side.

command    what is typed                       running    the live side, and the simulated one
course     what a job did, from its events     delays     where live and simulated lose time, and what that explains
result     all of it compared                  report     tables and a page
Times are emulated seconds after the beginning of the workload wherever nothing else is said.
"""
