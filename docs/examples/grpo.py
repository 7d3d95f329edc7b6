"""Group-relative policy optimization (GRPO; Shao et al., 2024, arXiv:2402.03300) with a session.

Each step samples a group of answers to a few prompts and scores them. An answer that is better than the mean of its
group becomes more probable, a worse one less. The reward here is the share of the reference's words at their place.

    finetune init quickstart --into quickstart
    finetune train --config quickstart/job.yaml --set train.stop_after_steps=140
    python docs/examples/grpo.py quickstart/job.yaml quickstart/runs/quickstart/checkpoints/step-000140

Under `accelerate launch --config_file accelerate_configs/fsdp2.yaml`, or any other file there, it runs on several
processes; the numbers are the same.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from finetune import Session
from finetune.api.session import Sample

LEARNING_RATE = 5e-4
PROMPTS_PER_STEP, GROUP_SIZE = 16, 8
MAX_NEW_TOKENS = 8


def main() -> None:
    """Sample, score and train, a step after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path, help="the job file of a model that is somewhat trained")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to start from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="runs/grpo", help="of the run, relative to the folder of the job file")
    given = parser.parse_args()
    prompts = read_rows(given.job.parent / "train.jsonl")
    held_out = read_rows(given.job.parent / "held_out.jsonl")[:64]
    chance = random.Random(given.seed)
    overrides = {"run.folder": given.folder, "checkpoint.resume": str(given.checkpoint.absolute())}
    with Session(given.job, overrides=overrides) as session:
        log(session, f"mean reward before: {mean_reward(session, held_out):.3f}")
        for _ in range(given.steps):
            chosen = chance.sample(prompts, PROMPTS_PER_STEP)
            groups = session.sample(
                [question for question, _ in chosen],
                num_samples=GROUP_SIZE,
                max_new_tokens=MAX_NEW_TOKENS,
                seed=chance.getrandbits(32),
                batch_size=PROMPTS_PER_STEP * GROUP_SIZE,
            )
            rows, rewards = [], []
            for (_, answer), samples in zip(chosen, groups, strict=True):
                group = [reward(sample.text, answer) for sample in samples]
                rewards += group
                mean, spread = statistics.mean(group), statistics.pstdev(group)
                if spread > 0:  # else no answer of the group is better than another
                    advantages = [(each - mean) / spread for each in group]
                    rows += [row_of(sample, each) for sample, each in zip(samples, advantages, strict=True)]
            if not rows:
                continue
            session.forward_backward(rows, loss="clipped_importance_sampling")
            step = session.optim_step(learning_rate=LEARNING_RATE)
            log(session, f"step {step.step}: mean reward {statistics.mean(rewards):.3f}, norm {step.gradient_norm:.2f}")
        session.save()
        log(session, f"mean reward after: {mean_reward(session, held_out):.3f}")


def row_of(sample: Sample, advantage: float) -> dict[str, object]:
    """Return the tokens of prompt and answer; only those of the answer are targets."""
    num_before = len(sample.prompt_ids)
    return {
        "input_ids": [*sample.prompt_ids, *sample.token_ids],
        "weights": [0] * num_before + [1] * len(sample.token_ids),
        "advantages": advantage,
        "old_log_probabilities": [0.0] * num_before + list(sample.log_probabilities),
    }


def reward(answer: str, reference: str) -> float:
    """Return the share of words that are those of the reference at the same place."""
    words, expected = answer.split(), reference.split()
    return sum(map(str.__eq__, words, expected)) / max(len(words), len(expected))


def mean_reward(session: Session, rows: list[tuple[str, str]]) -> float:
    """Return the mean reward of the most probable answers."""
    samples = session.sample(
        [question for question, _ in rows], temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, batch_size=len(rows)
    )
    answers = [answer.text for (answer,) in samples]
    return statistics.mean(reward(answer, expected) for answer, (_, expected) in zip(answers, rows, strict=True))


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
