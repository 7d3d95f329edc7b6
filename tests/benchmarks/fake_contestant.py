"""A contestant that learns nothing: each step costs what it is told to, in the way that it is told to."""

import sys

from contest.seat import taken_seat


def main(cost: float, way: str) -> None:
    with taken_seat() as seat:
        now = [0.0]
        seat._clock = lambda: now[0]
        print("what a library prints goes to the log")
        seat.say({"at": "ready"})
        while True:
            steps = int(seat.hear()["play"])
            seat.begin()
            for step in range(steps):
                seat.wait()
                if way == "dies" and step == 2:
                    sys.exit("no more of this")
                now[0] += cost * (step + 1)
                seat.note(tokens=10, targets=4)
                seat.losses.append(1.0 / (step + 1))
            seat.end()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
