"""The job files of the product."""

from pathlib import Path

from comparison.workloads import Workload

LEARNING_RATE = 1e-3
JOB = """\
run: {{folder: {folder}, seed: 1}}
model:
  name: ./model
data:
  train: {{path: rows.jsonl{form}}}
  max_length: {max_length}
  over_length: truncate
  shuffle: {shuffle}  # unless the same samples are to be taken in the same order{data}
  cache_folder: cache
task: {{name: {task}}}
train:
  global_batch_size: {batch}
  microbatch_size: {batch}
  steps: {steps}
  learning_rate: {learning_rate}
  schedule: {{name: constant}}
export: {{verify: false}}  # after the steps, in a process of its own
report: {{console: plain, log_every_steps: {logs_every}}}
"""


def write_job(folder: Path, workload: Workload, *, variant: str = "ours") -> Path:
    """Write the job of a variant into the workload's folder and return its path."""
    is_sft, template = workload.is_sft, "chatml" if workload.kind == "gsm8k" else "./turns.jinja"
    packs = "tuned" in variant
    text = JOB.format(
        folder=f"runs/{variant.replace(' ', '-')}",
        form=", format: prompt_completion" if is_sft else "",
        max_length=workload.max_length,
        shuffle=str(packs).lower(),
        data=(f"\n  chat_template: {template}" if is_sft else "") + BATCHING[variant].format(pack=workload.max_length),
        task="sft" if is_sft else "pretrain",
        batch=packs_a_step(folder, workload) if packs else workload.batch,
        steps=workload.steps,
        learning_rate=LEARNING_RATE,
        logs_every=workload.logs_every,
    )
    path = folder / f"{variant.replace(' ', '-')}.yaml"
    path.write_text(text)
    return path


BATCHING = {
    "ours": "",
    "ours equal": "\n  batching: {{padding_free: false}}",
    "ours tuned": "\n  batching: {{by: packs, tokens: {pack}}}",
}


def packs_a_step(folder: Path, workload: Workload) -> int:
    """Return how many packs hold about as many tokens as a batch of the others."""
    mean = float((folder / "mean_length").read_text())
    return max(1, round(workload.batch * mean / workload.max_length))
