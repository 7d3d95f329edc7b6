"""A step of the job on tensors without values: its peak memory and FLOPs under any strategy."""
