"""What the keys of other tools are called here, for whoever writes them from memory."""

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "base_model": "model.name",
    "batch_size": "train.global_batch_size",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "datasets": "data.train",
    "device_batch_size": "train.microbatch_size",
    "eval_steps": "evaluate.every_steps",
    "grad_clip": "train.max_gradient_norm",
    "gradient_clipping": "train.max_gradient_norm",
    "learning_rate_scheduler": "train.schedule",
    "logging_steps": "report.log_every_steps",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule.name",
    "max_grad_norm": "train.max_gradient_norm",
    "max_seq_length": "data.max_length",
    "max_steps": "train.steps",
    "micro_batch_size": "train.microbatch_size",
    "mixed_precision": "train.precision",
    "model_name_or_path": "model.name",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "optim": "train.optimizer.name",
    "output_dir": "run.folder",
    "per_device_eval_batch_size": "evaluate.microbatch_size",
    "per_device_train_batch_size": "train.microbatch_size",
    "r": "model.lora.rank",
    "report_to": "report.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "sequence_len": "data.max_length",
    "torch_dtype": "model.dtype",
    "use_dora": "model.lora.dora",
    "use_rslora": "model.lora.rslora",
    "warmup_ratio": "train.schedule.warmup_fraction",
}
"""From the last part of a key elsewhere to the key here."""

REASONS: Mapping[str, str] = {
    "accumulate_grad_batches": "accumulation is derived: set `train.global_batch_size` and `train.microbatch_size`",
    "bf16": "write `train.precision: bf16`",
    "deepspeed": "the strategy is chosen by the accelerate config with which the run is launched",
    "fp16": "write `train.precision: fp16`",
    "fsdp": "the strategy is chosen by the accelerate config with which the run is launched",
    "gradient_accumulation_steps": "accumulation is derived: set `train.global_batch_size` and `train.microbatch_size`",
    "hf_token": "secrets do not belong in a job file: log in with `hf auth login` or set HF_TOKEN in the environment",
    "token": "secrets do not belong in a job file: log in with `hf auth login` or set HF_TOKEN in the environment",
    "wandb_api_key": "secrets do not belong in a job file: set WANDB_API_KEY in the environment",
}
"""Keys that have no counterpart, and what to do instead."""
