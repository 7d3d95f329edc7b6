"""What the trained model says: exact matches, losses of held-out rows, and the same answers from every export."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from comparison.controller import ROOT, environment
from comparison.results import Log
from pretrained_runs.cases import Row, read_rows

MAX_NEW_TOKENS = 14
BATCH = 10
GGUF = ("f16", "q8_0")
ASKED = "Reverse these words: moon river tiger"


def measure(folder: Path, *, log: Log, num_prompts: int = 50) -> dict[str, Any]:
    """Return exact matches and losses before and after under both programs, and which exports answer alike."""
    quickstart, gsm8k = folder / "quickstart", folder / "gsm8k"
    rows = read_rows(quickstart / "held_out.jsonl")[:num_prompts]
    place = (quickstart / "model.path").read_text()
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = _model(place)
    found: dict[str, Any] = {"prompts": len(rows), "answers": {"before": answers(model, tokenizer, rows)}}
    found["loss_with_newline"] = {
        "without": loss_of_answers(model, tokenizer, rows[:BATCH]),
        "with": loss_of_answers(model, tokenizer, rows[:BATCH], end="\n"),
    }
    held_out = read_rows(gsm8k / "held_out.jsonl") if (gsm8k / "runs" / "theirs").exists() else []
    found["gsm8k"] = {"rows": len(held_out)}
    if held_out:
        found["gsm8k"]["before"] = loss_of_answers(model, tokenizer, held_out)
    for name, run in (("ours", "ours/final"), ("theirs", "theirs")):
        tuned = PeftModel.from_pretrained(model, quickstart / "runs" / run, adapter_name=name).eval()
        found["answers"][name] = answers(tuned, tokenizer, rows)
        if held_out:
            tuned.load_adapter(gsm8k / "runs" / run, adapter_name=f"gsm8k_{name}")
            tuned.set_adapter(f"gsm8k_{name}")
            found["gsm8k"][name] = loss_of_answers(tuned, tokenizer, held_out)
        model = tuned.unload()
    del model, tuned
    found["exports"] = _exports(
        quickstart, tokenizer, rows, adapter_answers=found["answers"]["ours"], base=place, log=log
    )
    found["exact_match"] = {name: exact_match(given, rows) for name, given in found["answers"].items()}
    log(f"answers: exact match {found['exact_match']}, exports {found['exports']}, gsm8k {found['gsm8k']}")
    return found


def answers(model: Any, tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    """Return the greedy answers to the rows' questions."""
    tokenizer.padding_side, given = "left", []
    for first in range(0, len(rows), BATCH):
        turns = [row["messages"][:-1] for row in rows[first : first + BATCH]]
        batch = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            written = model.generate(**batch, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        given += tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return given


def exact_match(given: Sequence[str], rows: Sequence[Row]) -> float:
    """Return the share of answers that are the row's, but for blanks around them."""
    return sum(a.strip() == row["messages"][-1]["content"] for a, row in zip(given, rows, strict=True)) / len(rows)


def loss_of_answers(model: Any, tokenizer: Any, rows: Sequence[Row], *, end: str = "") -> float:
    """Return the mean loss of the answers' tokens, the end of turn and `end`, computed by transformers alone."""
    loss_sum, num_targets = 0.0, 0
    for row in rows:
        asked = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        whole = asked + row["messages"][-1]["content"] + tokenizer.eos_token + end
        ids = tokenizer(whole, return_tensors="pt")["input_ids"]
        length = len(tokenizer(asked)["input_ids"])
        with torch.inference_mode():
            logits = model(ids).logits[0, length - 1 : -1]
        loss_sum += float(cross_entropy(logits.float(), ids[0, length:], reduction="sum"))
        num_targets += ids.shape[1] - length
    return loss_sum / num_targets


def _exports(
    folder: Path, tokenizer: Any, rows: Sequence[Row], *, adapter_answers: list[str], base: str, log: Log
) -> dict[str, int]:
    """Return to how many prompts each export answers as the adapter does in plain peft."""
    final, merged, alike = folder / "runs" / "ours" / "final", folder / "merged", {}
    if not merged.exists():
        run("export", final, "--merge", "--to", merged)
    served = {"merged, transformers": {}}
    files = {}
    for dtype in GGUF:
        place = folder / f"gguf-{dtype}"
        if not place.exists():
            run("export", merged, "--to", place, "--for", "llama.cpp", "--gguf", dtype, "--no-verify")
        [file] = place.glob("*.gguf")
        files[f"GGUF {dtype}, llama.cpp"] = file
        served[f"GGUF {dtype}, read by transformers"] = {"gguf_file": file.name, "place": place}
    for name, how in served.items():
        model = _model(str(how.pop("place", merged)), **how)
        alike[name] = num_equal(answers(model, tokenizer, rows), adapter_answers)
    if find_spec("llama_cpp") is None:
        log("exports: llama-cpp-python is not installed: nothing is answered by llama.cpp")
        return alike
    for name, file in files.items():
        alike[name] = num_equal(_llama_cpp_answers(file, rows), adapter_answers)
        words = ("--engine", "llama.cpp", "--base", base, "--rows", folder / "held_out.jsonl")
        log(run("verify", "serving", file.parent, *words))
    return alike


def num_equal(given: Sequence[str], others: Sequence[str]) -> int:
    """Return how many answers are the same, but for blanks around them."""
    return sum(one.strip() == other.strip() for one, other in zip(given, others, strict=True))


def _llama_cpp_answers(file: Path, rows: Sequence[Row]) -> list[str]:
    """Return the greedy answers of llama.cpp, by the template in the file."""
    model = import_module("llama_cpp").Llama(str(file), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    settings = {"temperature": 0.0, "max_tokens": MAX_NEW_TOKENS}
    given = [model.create_chat_completion(row["messages"][:-1], **settings) for row in rows]
    return [answer["choices"][0]["message"]["content"] for answer in given]


def _model(place: str, **named: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **named).eval()


def run(*words: object) -> str:
    """Return what a command of the product prints; ends the program where it fails."""
    command = [sys.executable, "-m", "finetune", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
