"""All that is checked of a session in one launch: the results go to a JSON file, which the tests read.

python tests/api/session_program.py JOB.yaml RESULTS.json
"""

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from finetune.api.session import Session
from finetune.errors import UserError

PROMPTS = ["reverse: red green", "reverse: pink black white", "reverse: amber"]


def main(job: Path, results: Path) -> None:
    steps = json.loads((job.parent / "rows_of_steps.json").read_text())
    found: dict[str, Any] = {}
    with Session(job) as session:
        rank = session.rank
        found["start"] = session.step
        if session.step:
            found["rest"] = take_job_steps(session, num_steps=4)
        else:
            take_all(session, steps, found)
    found["closed"] = message_of(lambda: session.save())
    if rank == 0:
        results.write_text(json.dumps(found))


def take_all(session: Session, steps: list[list[dict[str, Any]]], found: dict[str, Any]) -> None:
    """Take steps with the caller's rows, then from the first checkpoint again with the job's, and end by an error."""
    first = session.save()
    random.seed(5)
    found["rows"] = [take_rows(session, rows) for rows in steps[:3]]
    found["caller's random number"] = random.random()
    found["weights"] = check_weights(session)
    found["samples"] = take_samples(session)
    found["refused"] = refusals(session, steps[0])
    found["back"] = session.load(first)
    found["loop"] = take_job_steps(session, num_steps=4)
    found["metrics"] = session.evaluate()
    found["checkpoint"] = session.save().name
    found["fifth"] = take_job_steps(session, num_steps=1)
    found["loaded"] = session.load()
    found["fifth again"] = take_job_steps(session, num_steps=1)
    found["mean"] = message_of(lambda: session.forward_backward(steps[0], loss=mean_loss))
    found["after error"] = message_of(lambda: session.save())


def take_job_steps(session: Session, *, num_steps: int) -> list[list[float]]:
    taken: list[list[float]] = []
    for batch in session.batches():
        result = session.forward_backward(batch)
        step = session.optim_step()
        taken.append([result.loss, step.gradient_norm, step.learning_rate])
        if len(taken) == num_steps:
            break
    return taken


def take_rows(session: Session, rows: list[dict[str, Any]]) -> list[float]:
    """Take a step with the rows in two calls of different sizes, the second with the loss by its name."""
    first = session.forward_backward(rows[:3])
    second = session.forward_backward(rows[3:], loss="cross_entropy")
    step = session.optim_step()
    assert step.num_targets == first.num_targets + second.num_targets
    assert abs(step.loss * step.num_targets - first.loss_sum - second.loss_sum) < 1e-4
    assert [len(row) > 0 for row in second.log_probabilities] == [True] * len(rows[3:])
    return [step.loss, step.gradient_norm, step.learning_rate]


def check_weights(session: Session) -> dict[str, Any]:
    """Return the loss by the weights, the same by hand, and the norm of the gradient that a rate of 0 leaves unused."""
    chance = random.Random(3)
    rows = [
        {
            "input_ids": [chance.randrange(200) for _ in range(length)],
            "weights": [chance.choice((0.0, 1.0, 0.25, -0.5)) for _ in range(length - 1)] + [0.75],
        }
        for length in (5, 9, 3, 12, 7)
    ]
    expected = sum(
        -weight * log_probability
        for row, log_probabilities in zip(rows, session.log_probabilities(rows), strict=True)
        for weight, log_probability in zip([w for w in row["weights"][1:] if w], log_probabilities, strict=True)
    )
    result = session.forward_backward(rows)
    step = session.optim_step(learning_rate=0.0)
    policy = [{**row, "advantages": -2.0, "old_log_probabilities": -1.5} for row in rows]
    own = [session.forward_backward(policy, loss=loss) for loss in ("importance_sampling", halved, from_logits)[:2]]
    logits = session.forward_backward(rows, loss=from_logits, scores="logits")
    session.optim_step(learning_rate=0.0)
    return {
        "loss": [result.loss_sum, expected, logits.loss_sum],
        "norm": step.gradient_norm,
        "losses": [each.loss_sum for each in own],
    }


def halved(log_probabilities: Any, labels: Any, batch: Any) -> Any:
    return -0.5 * log_probabilities * batch.extras["advantages"]


def from_logits(logits: Any, labels: Any, batch: Any) -> Any:
    return -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def mean_loss(log_probabilities: Any, labels: Any, batch: Any) -> Any:
    return -log_probabilities.mean()


def take_samples(session: Session) -> list[Any]:
    greedy = session.sample(PROMPTS, max_new_tokens=6, temperature=0.0)
    drawn = session.sample(PROMPTS, num_samples=2, max_new_tokens=6, seed=11, batch_size=2)
    rows = [
        {
            "input_ids": [*sample.prompt_ids, *sample.token_ids],
            "weights": [0] * len(sample.prompt_ids) + [1] * len(sample.token_ids),
        }
        for sample in drawn[1]
    ]
    scored = session.log_probabilities(rows)
    assert all(
        abs(one - other) < 1e-5
        for sample, row in zip(drawn[1], scored, strict=True)
        for one, other in zip(sample.log_probabilities, row, strict=True)
    )
    return [[[*sample.token_ids] for sample in samples] for samples in (*greedy, *drawn)]


def refusals(session: Session, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the messages of calls that are refused; after each the session can be used."""
    messages = {
        "empty": message_of(lambda: session.forward_backward([])),
        "no step": message_of(lambda: session.optim_step()),
        "columns": message_of(lambda: session.forward_backward([{"words": "red"}])),
        "unknown loss": message_of(lambda: session.forward_backward(rows, loss="importance_samplin")),
        "missing column": message_of(lambda: session.forward_backward(rows, loss="policy_gradient")),
        "long": message_of(lambda: session.forward_backward([{"input_ids": [1] * 200}])),
        "no weight": message_of(lambda: session.forward_backward([{"input_ids": [1, 2], "weights": [1, 0]}])),
        "number of weights": message_of(lambda: session.forward_backward([{"input_ids": [1, 2], "weights": [1]}])),
        "prompt": message_of(lambda: session.sample([3])),
        "other rows": message_of(lambda: session.forward_backward([*rows[:2], rows[2 + session.rank]])),
        "other call": message_of(lambda: session.save() if session.rank else session.export()),
        "other thread": in_thread(lambda: message_of(lambda: session.optim_step())),
    }
    session.forward_backward(rows[:1])
    messages["gradient"] = message_of(lambda: session.save())
    session.optim_step(learning_rate=0.0)
    return messages


def message_of(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def in_thread(call: Any) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
