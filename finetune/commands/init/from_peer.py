"""`finetune init --from FILE`: a job and its accelerate file, made of the config of another trainer."""

from pathlib import Path

from finetune.commands.init.init import JOB_FILE, Files, format_written, launch_files, launch_line, write_files
from finetune.config.load import load_config, require_divisible_batch
from finetune.errors import ConfigError
from finetune.migration.draft import Fate
from finetune.migration.migrate import Migration, migrate_file, source_of_key
from finetune.runtime.optional import lazily
from finetune.runtime.text.terminal import quiet_libraries

with lazily(freeze=True):  # torch
    from finetune.commands.init import samples

_TITLES: tuple[tuple[Fate, str], ...] = (("not_possible", "not possible here"), ("unknown", "unknown"))


def init_from(
    path: Path,
    into: Path | None,
    *,
    peer: str | None = None,
    gpus: int | None = None,
    is_strict: bool = False,
    proves: bool = False,
) -> int:
    """Write the job and its files, and print how each key was converted and the report of the job's check.

    Return 2 where the job does not check, or keys are unknown and `is_strict`, else 0. Raises UserError or ConfigError
    for a file that cannot be read, and for a folder that holds other files of these names.
    """
    migration = migrate_file(path, peer=peer, gpus=gpus)
    draft, folder = migration.draft, into or Path(path.stem)
    _print_summary(migration)
    for written in format_written(write_files(folder, _files(migration, folder))):
        print(f"wrote {written}")
    num_processes = max(1, draft.gpus)
    try:
        loaded = load_config(folder / JOB_FILE, [])
        require_divisible_batch(loaded, num_processes=num_processes)
        print(
            f"{JOB_FILE} is ready. The model and datasets of the hub were not looked up: `finetune check --model` does."
        )
    except ConfigError as error:
        print(f"{error}\nCorrect the job, then: finetune check {folder / JOB_FILE}")
        return 2
    if proves:
        for line in samples.format_rates(draft, loaded.config, title=migration.title):
            print(line)
        if migration.title == "TRL":
            quiet_libraries(is_main=True)
            for line in samples.format_samples(draft, loaded.config):
                print(line)
        else:
            print("Token ids and labels are compared for TRL alone. Look at them with `finetune preview --config`.")
    print(f"start with: {launch_line(folder, draft.strategy, num_processes=num_processes)}")
    return 2 if is_strict and draft.keys_of("unknown") else 0


def _files(migration: Migration, folder: Path) -> Files:
    draft = migration.draft
    launch = launch_files(
        draft.strategy, folder, num_processes=max(1, draft.gpus), offload=bool(draft.get("fsdp_offload", False))
    )
    return {JOB_FILE: migration.job, **draft.files, **launch}


def _print_summary(migration: Migration) -> None:
    draft = migration.draft
    counts = {fate: len(draft.keys_of(fate)) for fate in ("mapped", "not_needed", "not_possible", "unknown")}
    print(
        f"{draft.file.path.name} is a config of {migration.title} with {len(draft.file.leaves)} keys: "
        f"{counts['mapped']} mapped, {counts['not_needed']} not needed, {counts['not_possible']} not possible, "
        f"{counts['unknown']} unknown."
    )
    for fate, title in _TITLES:
        for key in draft.keys_of(fate):
            print(f"  {source_of_key(draft, key)}: {title}: {draft.outcomes[key].text}")
    for note in draft.notes:
        print(f"  note: {note}")
