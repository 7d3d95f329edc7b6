"""A competitor that learns nothing: each step costs what it is told to, in the way that it is told to."""

import sys

from comparison.worker import connected


def main(cost: float, way: str) -> None:
    with connected() as worker:
        now = [0.0]
        worker._clock = lambda: now[0]
        print("what a library prints goes to the log")
        worker.send({"at": "ready"})
        while True:
            steps = int(worker.receive()["workload"])
            worker.begin()
            for step in range(steps):
                worker.wait()
                if way == "dies" and step == 2:
                    sys.exit("no more of this")
                now[0] += cost * (step + 1)
                worker.count(tokens=10, targets=4)
                worker.losses.append(1.0 / (step + 1))
            worker.end()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
