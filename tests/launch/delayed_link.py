"""A switch in user space that joins hosts by links with a delay, for kernels without netem; needs root.

    python -m tests.launch.delayed_link --delay-ms 5 --drop 0.01 --seed 0 NAMESPACE/ADDRESS ...

Each namespace gets a TAP device `eth0`. A frame reaches its host `--delay-ms` later, so a round trip takes twice as
long; `--drop` of all frames never do. Prints `ready` once the links are up, and serves until it is killed.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("hosts", nargs="+")
    options = parser.parse_args()
    ports = [open_tap(*host.split("/")) for host in options.hosts]
    print("ready", flush=True)
    forward(ports, delay_seconds=options.delay_ms / 1000, drop=options.drop, chance=random.Random(options.seed))


def open_tap(namespace: str, address: str) -> int:
    """Return the other end of a new `eth0` of the namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _enter(there)
    try:
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    finally:
        _enter(home)
    for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "mtu", str(_MTU), "up")):
        subprocess.run(["ip", "-n", namespace, *words], check=True)
    os.close(home)
    os.close(there)
    return port


def forward(ports: list[int], *, delay_seconds: float, drop: float, chance: random.Random) -> None:
    """Hand each frame to the port behind which its destination was seen, else to all others, forever."""
    behind: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []  # when it is due, a number that keeps the order, port, frame
    count = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], patience)[0]:
            for frame in _frames(port):
                behind[frame[6:12]] = port
                targets = [behind[frame[:6]]] if frame[:6] in behind else [each for each in ports if each != port]
                if drop and chance.random() < drop:
                    continue
                for target in targets:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_seconds, count, target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(target, frame)
            except OSError:  # the device is down
                continue


def _frames(port: int) -> list[bytes]:
    frames = []
    while len(frames) < 64:
        try:
            frames.append(os.read(port, _MTU + 100))
        except OSError:  # nothing left, or the device is down
            break
    return frames


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main()
