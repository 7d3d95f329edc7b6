"""Events as events.jsonl has them, for runs that nobody has to wait for."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path


def started(step: int = 0, *, num_steps: int = 100, processes: int = 1, **fields) -> dict:
    arithmetic = [f"batch: 64 = {processes} process{'es' * (processes > 1)} x 16 per microbatch x 4 accumulated"]
    first = {"event": "RunStarted", "time": 1000.0, "step": step, "num_steps": num_steps, "strategy": "ddp"}
    return {**first, "arithmetic": arithmetic, "config": {}, **fields}


def taken(step: int, loss: float, **fields) -> dict:
    return {
        **{"event": "StepTaken", "time": 1000.0 + step, "step": step, "loss": loss, "gradient_norm": 1.0},
        **{"learning_rate": 1e-3, "num_targets": 100, "num_tokens": 400, "samples_sha256": f"{step:016x}" * 4},
        **{"epoch": step / 50, "seconds": 0.5, "data_seconds": 0.05, "data_share": 0.1, "memory_bytes": 2**30},
        **{"metrics": {}, **fields},
    }


def evaluated(step: int, **metrics: float) -> dict:
    return {
        "event": "Evaluated",
        "time": 1000.0 + step,
        "step": step,
        "metrics": metrics,
        "num_rows": 10,
        "seconds": 2.0,
    }


def answered(step: int, answer: str, *, prompt: str = "2 + 2", reference: str = "4") -> dict:
    return {"event": "Answered", "time": 0, "step": step, "prompt": prompt, "answer": answer, "reference": reference}


def ended(step: int, reason: str = "finished", final_folder: str | None = "final") -> dict:
    shared = {"metrics": {}, "final_folder": final_folder, "talks": True}
    return {"event": "RunEnded", "time": 2000.0, "step": step, "reason": reason, "seconds": 60.0, **shared}


def falling_losses(count: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [1 + 4 * math.exp(-step / 40) + generator.gauss(0, noise) for step in range(1, count + 1)]


def whole_run(count: int = 100, *, seed: int = 0, processes: int = 1) -> Iterator[dict]:
    yield started(num_steps=count, processes=processes)
    for step, loss in enumerate(falling_losses(count, seed=seed), start=1):
        yield taken(step, loss)
        if step % 20 == 0:
            yield evaluated(step, loss=loss, exact_match=step / count)
    yield ended(count)


def write_run(folder: Path, events: Sequence[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder
