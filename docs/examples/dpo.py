"""Direct preference optimization (DPO; Rafailov et al., 2023, arXiv:2305.18290) with a session.

The loss of a pair is `-log sigmoid(m)` with the margin `m = beta * (log-ratio of the chosen answer - log-ratio of the
rejected one)`. Its derivative by the log-probability of each token of the chosen answer is `-beta * sigmoid(-m)`, and
the negative of that for the rejected answer. So one pass computes the log-probabilities, the margins give the weights
of the tokens, positive and negative ones, and the cross-entropy with these weights has exactly DPO's gradient. Any loss
of whole answers can be written so.

Rejected answers are the model's own wrong ones. (`task.name: preference` trains files of pairs, without a loop.)

    finetune init quickstart --into quickstart
    finetune train --config quickstart/job.yaml --set train.stop_after_steps=140
    python docs/examples/dpo.py quickstart/job.yaml quickstart/runs/quickstart/checkpoints/step-000140
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from finetune import Session

LEARNING_RATE, BETA = 5e-4, 0.3
PAIRS_PER_STEP, NUM_PROMPTS = 32, 200
MAX_NEW_TOKENS = 8

Tokens = dict[str, list[int]]
Pair = tuple[Tokens, Tokens]  # the right answer and the wrong one


def main() -> None:
    """Make pairs with the model as it is, then train on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path, help="the job file of a model that is somewhat trained")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to start from, which is the reference model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="runs/dpo", help="of the run, relative to the folder of the job file")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    overrides = {"run.folder": given.folder, "checkpoint.resume": str(given.checkpoint.absolute())}
    with Session(given.job, overrides=overrides) as session:
        pairs = make_pairs(session, read_rows(given.job.parent / "train.jsonl"), seed=given.seed)
        held_out = make_pairs(session, read_rows(given.job.parent / "held_out.jsonl"), seed=given.seed)
        reference, held_out_reference = scores(session, pairs), scores(session, held_out)
        log(session, f"margin before: {mean_margin(session, held_out, held_out_reference):.3f}")
        log(session, f"preference accuracy before: {accuracy(session, held_out):.3f}")
        for _ in range(given.steps):
            numbers = chance.sample(range(len(pairs)), min(PAIRS_PER_STEP, len(pairs)))
            chosen = [pairs[number] for number in numbers]
            margins = margins_of(scores(session, chosen), [reference[number] for number in numbers])
            rows = [
                {**answer, "weights": [sign * each for each in answer["weights"]]}
                for pair, weight in zip(chosen, weights_of(chosen, margins), strict=True)
                for answer, sign in zip(pair, (weight, -weight), strict=True)
            ]
            session.forward_backward(rows)
            step = session.optim_step(learning_rate=LEARNING_RATE)
            loss = statistics.mean(math.log1p(math.exp(-margin)) for margin in margins)
            log(session, f"step {step.step}: DPO's loss {loss:.4f}, norm {step.gradient_norm:.2f}")
        session.save()
        log(session, f"margin after: {mean_margin(session, held_out, held_out_reference):.3f}")
        log(session, f"preference accuracy after: {accuracy(session, held_out):.3f}")


def make_pairs(session: Session, rows: Sequence[tuple[str, str]], *, seed: int) -> list[Pair]:
    """Return the right answer and a wrong one of the model for each question that it may answer wrongly."""
    asked = random.Random(seed).sample(list(rows), NUM_PROMPTS)
    questions = [question for question, _ in asked]
    samples = session.sample(questions, max_new_tokens=MAX_NEW_TOKENS, seed=seed, batch_size=len(questions))
    pairs = []
    for (_, answer), (sample,) in zip(asked, samples, strict=True):
        if sample.text != answer:
            right = session.tokenizer(answer, add_special_tokens=False)["input_ids"]
            end = list(sample.token_ids[-1:]) if len(sample.token_ids) < MAX_NEW_TOKENS else []
            pairs.append(tuple(tokens_of(sample.prompt_ids, ids) for ids in ([*right, *end], sample.token_ids)))
    return pairs


def tokens_of(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tokens:
    """Return a row in which the tokens of the answer are the targets."""
    return {"input_ids": [*prompt_ids, *answer_ids], "weights": [0] * len(prompt_ids) + [1] * len(answer_ids)}


def scores(session: Session, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    """Return the log-probabilities of both answers of every pair."""
    sums = [sum(row) for row in session.log_probabilities([answer for pair in pairs for answer in pair])]
    return list(zip(sums[::2], sums[1::2], strict=True))


def margins_of(now: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]]) -> list[float]:
    """Return how much more the right answers have gained than the wrong ones, times beta."""
    return [BETA * ((a - a0) - (b - b0)) for (a, b), (a0, b0) in zip(now, before, strict=True)]


def weights_of(pairs: Sequence[Pair], margins: Sequence[float]) -> list[float]:
    """Return the weight of each pair's tokens: the session divides by the targets, and DPO by the pairs."""
    num_targets = sum(sum(answer["weights"]) for pair in pairs for answer in pair)
    return [BETA / (1.0 + math.exp(margin)) * num_targets / len(pairs) for margin in margins]


def mean_margin(session: Session, pairs: Sequence[Pair], before: Sequence[tuple[float, float]]) -> float:
    """Return the mean margin of the pairs."""
    return statistics.mean(margins_of(scores(session, pairs), before))


def accuracy(session: Session, pairs: Sequence[Pair]) -> float:
    """Return the share of pairs whose right answer is more probable than the wrong one."""
    return statistics.mean(float(right > wrong) for right, wrong in scores(session, pairs))


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
