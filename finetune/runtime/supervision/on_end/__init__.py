"""`run.on_end`: a small process outlives the run's own, reads how the run has ended, and runs the user's command.

No process of the run can do that: one that is killed runs nothing. The sentinel is started by the first rank of each
host, belongs to no launcher, session or group of the run, and imports no torch.
"""
