"""A run on several hosts that continues when one is lost and grows when one returns, without manual intervention.

One supervisor runs on each host. They communicate through a shared folder, so no single host is a point of failure.
torchelastic's own agent also restarts workers, but its store lives on one host, and restarting gloo groups inside the
agent fails about every second time; here each attempt is a fresh launch.
"""
