"""The run folder: what the run is, written down before its first step."""

from dataclasses import asdict
from pathlib import Path

from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.data.workers import loader_settings, this_room, told
from finetune.report.announcer import Announcer
from finetune.report.build import build_reporter
from finetune.report.reporter import Reporter
from finetune.run.audit import keep_audit
from finetune.run.kept import keep
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.runtime import files, ranks
from finetune.runtime.environment import environment_facts
from finetune.runtime.redact import redacted_yaml

SECRETS_LEFT_OUT = "# As it was written, but for what looks like a secret: that reads '[redacted]' here.\n"


def open_run(loaded: LoadedConfig, machine: Machine, *, lessons: Lessons, say: Announcer) -> Reporter:
    """Write down what the run is, once everything has been checked, and return whoever is told about it."""
    folder, room = Path(loaded.config.run.folder), this_room()
    loading = loader_settings(loaded.config.data, room=room, cost=lessons.task.loading_cost)
    if sentence := told(loaded.config.data, loading, room=room):
        say(sentence)
    if ranks.is_main():
        files.write_text(folder / "config.yaml", config_copy(loaded.text))
        files.write_text(folder / "resolved.yaml", resolved_yaml(loaded))
        files.write_json(folder / "environment.json", environment_facts() | {"loading": asdict(loading)})
        keep(folder, lessons.processing, lessons.task.facts)
        keep_audit(folder, loaded.config, lessons, say=say)
    return build_reporter(
        loaded.config.report,
        run_folder=folder,
        accelerator=machine.accelerator,
        is_main=ranks.is_main(),
        notes=say.said,
    )


def config_copy(text: str) -> str:
    """Return the job file as it was written; where that holds secrets, without them, which a last line says."""
    cleaned = redacted_yaml(text)
    return text if cleaned == text else cleaned.rstrip("\n") + "\n" + SECRETS_LEFT_OUT
