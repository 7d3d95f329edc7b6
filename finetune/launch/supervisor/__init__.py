"""A run on several hosts that continues when one is lost and grows when one returns, without a person.

One supervisor runs on each host. They meet in a folder that all of them share, so there is no host whose loss ends the
run. torchelastic's own agent could restart workers too, but its store lives on one host, and a restart of gloo groups
inside the agent fails about every second time; here each attempt is a fresh launch.
"""
