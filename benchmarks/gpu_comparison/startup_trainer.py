"""What a user of Trainer writes for LoRA on a local model; says when its imports, its loading and its first step end.

startup_trainer.py MODEL ROWS LENGTH OUTPUT DEVICE
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Marks(TrainerCallback):  # type: ignore[misc]
    """Says where the first step begins and ends."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Say that everything is loaded."""
        mark("loaded")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the device and say that the step is over."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        mark("first_step")


def mark(name: str) -> None:
    """Say that a phase has ended."""
    print("mark", name, flush=True)


def main(name: str, rows: Path, length: int, output: str, *, is_on_cpu: bool) -> None:
    """Train two steps; the first is all that is looked at."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    samples = [{"input_ids": ids[:length]} for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = TrainingArguments(
        output,
        bf16=True,
        per_device_train_batch_size=1,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-5,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        use_cpu=is_on_cpu,
        disable_tqdm=True,
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(
        get_peft_model(model, lora), settings, data_collator=collate, train_dataset=samples, callbacks=[Marks()]
    ).train()


if __name__ == "__main__":
    mark("imports")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], is_on_cpu=sys.argv[5] == "cpu")
