"""`finetune evaluate --lm-eval`: tasks of EleutherAI's evaluation harness, on an exported model."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.commands.export import export_checkpoint, is_run
from finetune.commands.generate import local_device
from finetune.errors import UserError
from finetune.model.loading.pretrained import check_loadable
from finetune.model.loading.saved import inspect_model_folder
from finetune.model.upstream import data_only_loading
from finetune.runtime.files import atomic
from finetune.runtime.optional import require
from finetune.runtime.text.library_output import quiet_libraries
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import format_json


def evaluate_with_harness(
    source: Path, *, step: int | None, tasks: str, json: Path | None, trust_remote_code: bool = False
) -> None:
    """Measure the tasks (names, separated by commas), print their metrics and write all results to the file.

    A checkpoint of a run is exported for it, to a folder that is removed afterwards. In one process; raises UserError
    for several, and for a model that is no causal one, MissingPackage without lm-eval.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--lm-eval: run it in one process, without `accelerate launch`.")
    harness = require("lm_eval", extra="lm-eval", purpose="--lm-eval")
    quiet_libraries(is_main=True)
    if not is_run(source):
        results = _results(harness, source, tasks=tasks, trusts=trust_remote_code)
    else:
        with tempfile.TemporaryDirectory(prefix="finetune-lm-eval-") as scratch:
            to, trusts = Path(scratch) / "model", trust_remote_code
            folder = export_checkpoint(source, step=step, to=to, dtype=None, trust_remote_code=trusts, verify=False)
            results = _results(harness, folder, tasks=tasks, trusts=trusts)
    if json is not None:
        atomic.write_text(json, format_json(redacted_config(results), indent=2, default=str) + "\n")
    _print(results["results"])


def _results(harness: Any, folder: Path, *, tasks: str, trusts: bool) -> Mapping[str, Any]:
    saved = inspect_model_folder(folder, key="evaluate", trust_remote_code=trusts)
    if saved.head != "causal_lm":
        raise UserError(f"--lm-eval: {saved.folder} holds a model of `{saved.head}`; the harness asks causal ones.")
    check_loadable(Path(saved.base), trust_remote_code=trusts)
    arguments = {"pretrained": saved.base, "tokenizer": str(saved.folder), "trust_remote_code": trusts}
    if saved.adapter is not None:
        arguments["peft"] = str(saved.folder)
    with data_only_loading(trust_remote_code=trusts):
        found: Mapping[str, Any] | None = harness.simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=[task.strip() for task in tasks.split(",") if task.strip()],
            device=str(local_device()),
            log_samples=False,
        )
    assert found is not None, "it is None on other ranks only"
    return found


def _print(results: Mapping[str, Mapping[str, Any]]) -> None:
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, int | float):
                print(f"{task:<32}{name:<28}{value:.6g}")
