"""After a first session, one that rank 0 leads, the others following, until rank 0 leaves it by an error of its own.

python tests/api/following_program.py JOB.yaml RESULTS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from finetune.api.session import Session
from finetune.errors import FinetuneError
from tests.api.session_program import message_of, take_job_steps

ROWS = [{"input_ids": [5, 6, 7], "weights": [0, 1, 1]}, {"input_ids": [8, 9]}]


def main(job: Path, results: Path) -> None:
    found: dict[str, Any] = {}
    with Session(job, overrides={"run.folder": "runs/earlier"}) as session:
        found["earlier"] = take_job_steps(session, num_steps=1)
    try:
        with Session(job) as session:
            rank = session.rank
            found["together"] = take_job_steps(session, num_steps=1)
            if rank == 0:
                lead(session, found)
            else:
                session.follow()
    except KeyError:
        found["left"] = True
    except FinetuneError as error:
        found["lost"] = f"{type(error).__name__}: {error}"
    results.with_suffix(f".{rank}.json").write_text(json.dumps(found))


def lead(session: Session, found: dict[str, Any]) -> None:
    found["led"] = take_job_steps(session, num_steps=1)
    found["empty"] = message_of(lambda: session.forward_backward([]))
    found["lambda"] = message_of(lambda: session.forward_backward(ROWS, loss=lambda *_: None))
    found["led"] += take_job_steps(session, num_steps=1)
    found["samples"] = [len(samples) for samples in session.sample(["reverse: red"], num_samples=3, max_new_tokens=4)]
    raise KeyError("in the loop of rank 0")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
