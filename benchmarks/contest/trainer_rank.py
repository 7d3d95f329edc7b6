"""transformers' Trainer as one rank of several, driving what the launcher says."""

from pathlib import Path

from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from contest.launched import on_cpu
from contest.loading import load_model, load_workload
from contest.peers import ALIKE, SETTINGS, Waiting, _dataset, watch_steps
from contest.seat import Seat


def play(strategy: str, folder: Path, seat: Seat) -> None:
    """Train the workload under the strategy."""
    workload = load_workload(folder)
    with on_cpu(strategy):
        settings = TrainingArguments(
            output_dir=str(folder / "runs" / f"trainer-{strategy}"),
            max_steps=workload.steps,
            per_device_train_batch_size=workload.batch // 2,
            logging_steps=workload.logs_every,
            **{**ALIKE, "use_cpu": strategy == "ddp"},
            **SETTINGS["trainer"],
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
        trainer = Trainer(
            load_model(folder, workload),
            settings,
            train_dataset=_dataset(folder),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            processing_class=tokenizer,
        )
    trainer.add_callback(Waiting(seat))
    watch_steps(trainer, seat)
    trainer.train()
    unset_hf_deepspeed_config()
