"""Best-of-n distillation with a session: train the model on the best of its own answers.

Each step samples several answers to a few prompts, keeps the best one of each if it is good enough, and trains on these
as on any other rows (rejection sampling; Yuan et al., 2023, arXiv:2308.01825). Whatever can score an answer can be the
judge; here it is the share of the reference's words at their place.

    finetune init quickstart --into quickstart
    finetune train --config quickstart/job.yaml --set train.stop_after_steps=140
    python docs/examples/best_of_n.py quickstart/job.yaml quickstart/runs/quickstart/checkpoints/step-000140
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from finetune import Session

LEARNING_RATE = 1e-3
PROMPTS_PER_STEP, NUM_SAMPLES = 32, 8
MAX_NEW_TOKENS = 8
MIN_SCORE = 1.0


def main() -> None:
    """Sample, choose and train, a step after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path, help="the job file of a model that is somewhat trained")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to start from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="runs/best_of_n", help="of the run, relative to the folder of the job file")
    given = parser.parse_args()
    prompts = read_rows(given.job.parent / "train.jsonl")
    held_out = read_rows(given.job.parent / "held_out.jsonl")[:64]
    chance = random.Random(given.seed)
    overrides = {"run.folder": given.folder, "checkpoint.resume": str(given.checkpoint.absolute())}
    with Session(given.job, overrides=overrides) as session:
        log(session, f"mean score before: {mean_score(session, held_out):.3f}")
        for _ in range(given.steps):
            chosen = chance.sample(prompts, PROMPTS_PER_STEP)
            answers = session.sample(
                [question for question, _ in chosen],
                num_samples=NUM_SAMPLES,
                max_new_tokens=MAX_NEW_TOKENS,
                seed=chance.getrandbits(32),
                batch_size=PROMPTS_PER_STEP * NUM_SAMPLES,
            )
            rows, scores = [], []
            for (question, reference), samples in zip(chosen, answers, strict=True):
                best = max(samples, key=lambda sample: score(sample.text, reference))
                scores.append(score(best.text, reference))
                if scores[-1] >= MIN_SCORE:
                    rows.append(conversation(question, best.text))
            if not rows:
                continue
            result = session.forward_backward(rows)
            step = session.optim_step(learning_rate=LEARNING_RATE)
            log(session, f"step {step.step}: mean best score {statistics.mean(scores):.3f}, loss {result.loss:.3f}")
        session.save()
        log(session, f"mean score after: {mean_score(session, held_out):.3f}")


def conversation(question: str, answer: str) -> dict[str, object]:
    """Return a row as those of the job are."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def score(answer: str, reference: str) -> float:
    """Return the share of words that are those of the reference at the same place."""
    words, expected = answer.split(), reference.split()
    return sum(map(str.__eq__, words, expected)) / max(len(words), len(expected))


def mean_score(session: Session, rows: list[tuple[str, str]]) -> float:
    """Return the mean score of the most probable answers."""
    samples = session.sample(
        [question for question, _ in rows], temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, batch_size=len(rows)
    )
    answers = [answer.text for (answer,) in samples]
    return statistics.mean(score(answer, expected) for answer, (_, expected) in zip(answers, rows, strict=True))


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Return question and answer of every row."""
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(messages[0]["content"], messages[-1]["content"]) for messages in rows]


def log(session: Session, text: str) -> None:
    """Print the text once, not on every rank."""
    if session.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
