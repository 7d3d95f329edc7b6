"""`run.on_end`: a small process that outlives the run, determines how it ended, and runs the user's command.

No process of the run could do this, since it might be killed. The first rank of each host starts the sentinel, which is
not part of the run's launcher, session or process group, and does not import torch.
"""
