"""The competitors: each module has `train(name, folder, worker)`, which trains a workload step by step."""
