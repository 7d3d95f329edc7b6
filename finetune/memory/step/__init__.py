"""The symbolic step of a job: its peak memory and FLOPs under any strategy, on fake tensors."""
