"""`finetune init`: write a recipe into a folder: its job file, and the data of recipes that need no network."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from finetune.commands.printing import print_facts
from finetune.config.load import load_values, read_text_file, require_divisible_batch
from finetune.config.sections.model import ModelSection
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, ModelError, UserError
from finetune.migration.complete import locate
from finetune.migration.draft import Fate, yaml_value
from finetune.migration.migrate import Migration, migrate_file, source_of_key
from finetune.migration.peers.trainer import PLACEHOLDERS
from finetune.recipes import FOLDER
from finetune.recipes.digits import digit_files
from finetune.recipes.quickstart import quickstart_files
from finetune.registry.accelerate_files import SHIPPED, accelerate_file_names
from finetune.runtime.files.atomic import write_bytes
from finetune.runtime.optional import lazily, no_op
from finetune.runtime.text.terminal import quiet_libraries

with lazily(freeze=True):  # torch
    import torch

    from finetune.model import processing
    from finetune.model.loading import architecture

JOB_FILE = "job.yaml"

Files = Mapping[str, str | bytes]
"""Contents by path in the folder."""

PRETRAINED_QUICKSTART = "quickstart-pretrained"

_DATA: Mapping[str, Callable[[], Files]] = {
    "quickstart": quickstart_files,
    PRETRAINED_QUICKSTART: quickstart_files,
    "image-digits": digit_files,
}

_LISTED = 5
"""Maximum number of files of a folder that are listed by name."""


def init(name: str | None, into: Path | None, *, strategy: str | None = None, model: str | None = None) -> None:
    """Write the recipe, the accelerate file of the strategy, or both into the folder and print what was written.

    With neither, list the recipes. The quickstart is written for the model if one is given, a hub name or a folder.
    """
    if name is None and strategy is None:
        known = recipes()
        widest = max(map(len, known)) + 2
        for recipe, sentence in known.items():
            print(f"{recipe:<{widest}}{sentence}")
        return
    folder = into or Path(name or ".")
    for written in format_written(make_recipe(name, folder, strategy=strategy, model=model)):
        print(f"wrote {written}")
    if strategy is not None or name in _DATA:
        print(f"start with: {launch_line(folder, strategy)}")


def recipes() -> dict[str, str]:
    """Return each recipe's name and its first sentence, by name."""
    sentences = {}
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem):
        comment = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
        text = " ".join(line.removeprefix("# ") for line in comment)
        sentences[path.stem] = f"{text.split('. ')[0].rstrip('.')}."
    return sentences


def make_recipe(name: str | None, folder: Path, *, strategy: str | None = None, model: str | None = None) -> list[Path]:
    """Write the recipe's job file, its data if it has any, and the strategy's accelerate file; return their paths.

    Raises UserError, and writes nothing, if files with other content exist, the recipe or the strategy is unknown, or
    the model cannot be loaded.
    """
    contents = {**({} if name is None else _contents(name, model)), **launch_files(strategy, folder)}
    return write_checked(folder, contents, later=[folder.resolve()])  # rows that a recipe does not bring


def write_checked(folder: Path, contents: Files, *, num_processes: int = 1, later: Sequence[Path] = ()) -> list[Path]:
    """Write the files as `write_files` does, unless the check of the job among them fails; return their paths.

    Raises ConfigError with the problems that the job would have in the folder, and writes nothing. Files in the folders
    `later` need not exist yet.
    """
    job, place = contents.get(JOB_FILE), folder.resolve()
    if isinstance(job, str):
        document, elsewhere = read_yaml(job), [*later, *(place / file for file in contents)]
        if document.problems:
            raise ConfigError(document.problems, JOB_FILE)
        loaded = load_values(document.values, folder=place, elsewhere=elsewhere)
        require_divisible_batch(loaded, num_processes=num_processes)
    return write_files(folder, contents)


def write_files(folder: Path, contents: Files) -> list[Path]:
    """Write the files into the folder and return their paths; those with the same content are left alone.

    Raises UserError, and writes nothing, if files with other content exist.
    """
    data = {file: content.encode() if isinstance(content, str) else content for file, content in contents.items()}
    existing = {file: folder / file for file in data if (folder / file).exists()}
    different = [file for file, path in existing.items() if path.is_dir() or path.read_bytes() != data[file]]
    if different:
        more = f" and {len(different) - _LISTED:,} more" if len(different) > _LISTED else ""
        raise UserError(
            f"{folder} already holds {', '.join(different[:_LISTED])}{more} with different content. "
            "Choose another folder with --into, or move the old files away."
        )
    for file in [file for file in data if file not in existing]:
        is_text = isinstance(contents[file], str)
        write_bytes(folder / file, data[file], survives_power_cut=is_text)  # there may be many images
    return [folder / file for file in contents]


def format_written(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the paths of the files; for many files in subfolders of one folder, only their number."""
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.parent.parent, []).append(path)
    for folder, inside in by_folder.items():
        if len(inside) > _LISTED:
            yield f"{len(inside):,} files in {folder}"
        else:
            yield from map(str, inside)


def _contents(name: str, model: str | None) -> Files:
    known = recipes()
    if name not in known:
        raise UserError(f"Unknown recipe `{name}`. Available: {', '.join(known)}.")
    if model is not None:
        if name not in ("quickstart", PRETRAINED_QUICKSTART):
            raise UserError(f"--model: `{name}` names its own model; write another one in its {JOB_FILE}.")
        name = PRETRAINED_QUICKSTART
    job = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    if model is not None:
        job, choices = _pretrained_job(job, model)
        print_facts(choices)
    return {JOB_FILE: job, **_DATA.get(name, dict)()}


RECIPE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RECIPE_RATE, LARGE_MODEL_RATE = "1e-3", "2e-4"
_LARGE_HIDDEN_SIZE = 1024
"""Hidden size from which a model has about half a billion weights and trains better at the smaller rate."""


def _pretrained_job(recipe: str, written: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the recipe's text for this hub name or folder, and by name what was chosen for the model.

    Reads its config and tokenizer, no weights. Raises UserError if they cannot be loaded.
    """
    quiet_libraries(is_main=True)
    name = locate(written, Path.cwd())
    try:
        section = ModelSection(name=name)
        config = architecture.load_pretrained_config(section)
        has_template = processing.load_tokenizer(section, texts=list, cache_folder=Path(), log=no_op).chat_template
    except ModelError as error:
        raise UserError(f"--model {written}: {error}") from error
    job = recipe.replace(f"name: {RECIPE_MODEL}", f"name: {yaml_value(name)}")
    facts = [("chat template", "the model's own" if has_template else "chatml, because the model has none")]
    if not has_template:
        job = job.replace("# chat_template:", "chat_template:")
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        job = job.replace("# dtype:", "dtype:").replace("# precision:", "precision:")
        facts.append(("precision", "bf16, because this machine has a GPU"))
    else:
        facts.append(("precision", "float32, because this machine has no GPU that computes in bfloat16"))
    rate = RECIPE_RATE
    if (getattr(config.get_text_config(), "hidden_size", 0) or 0) >= _LARGE_HIDDEN_SIZE:
        rate = LARGE_MODEL_RATE
        job = job.replace(f"learning_rate: {RECIPE_RATE}", f"learning_rate: {rate}")
    return job, [*facts, ("learning rate", rate)]


def launch_files(
    strategy: str | None, folder: Path, *, num_processes: int | None = None, offload: bool = False
) -> Files:
    """Return the accelerate file of the strategy, and next to it the DeepSpeed config that it names.

    With a number of processes, it is that of the file; `offload` keeps the parameters of FSDP on the host.
    """
    if strategy is None:
        return {}
    if strategy not in accelerate_file_names():
        raise UserError(f"--strategy {strategy}: choose one of {', '.join(accelerate_file_names())}.")
    shipped = SHIPPED / f"{strategy}.yaml"
    text = read_text_file(shipped)
    text = text.replace(f"accelerate_configs/{strategy}.yaml", shlex.quote(str(folder / f"{strategy}.yaml")))
    if num_processes is not None:
        text = re.sub(r"(?m)^num_processes: .*$", f"num_processes: {num_processes}", text)
        text = re.sub(r" --num_processes \d+", f" --num_processes {num_processes}", text)
    if offload:
        text = text.replace("fsdp_offload_params: false", "fsdp_offload_params: true")
    named = re.search(r"^( *deepspeed_config_file: )(\S+).*$", text, re.MULTILINE)
    if named is None:
        return {f"{strategy}.yaml": text}
    path = Path(named[2])
    settings = read_text_file(shipped.parents[1] / path)
    text = text.replace(named[0], f"{named[1]}{path.name}  # next to this file")
    return {f"{strategy}.yaml": text, path.name: settings}


def launch_line(folder: Path, strategy: str | None, *, num_processes: int = 2) -> str:
    """Return the command that starts the job in the folder, under the accelerate file of the strategy next to it."""
    job, file = (shlex.quote(str(folder / name)) for name in (JOB_FILE, f"{strategy}.yaml"))
    if strategy is None:
        return f"finetune train --config {job}"
    count = 1 if strategy == "single" else num_processes
    return f"finetune train --config {job} --accelerate {file} --processes {count}"


_TITLES: tuple[tuple[Fate, str], ...] = (("not_possible", "not possible here"), ("unknown", "unknown"))


def init_from(
    path: Path, into: Path | None, *, peer: str | None = None, gpus: int | None = None, is_strict: bool = False
) -> int:
    """Write the job and its files, and print how each key was converted and the report of the job's check.

    Return 2 where the job does not check, and nothing is written, or keys are unknown and `is_strict`; else 0. Raises
    UserError or ConfigError for a file that cannot be read, and for a folder that holds other files of these names.
    """
    migration = migrate_file(path, peer=peer, gpus=gpus)
    draft, folder = migration.draft, into or Path(path.stem)
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
    num_processes = max(1, draft.gpus)
    try:
        if migration.problems:
            raise ConfigError(migration.problems, "the job")
        paths = write_checked(folder, _files(migration, folder), num_processes=num_processes)
    except ConfigError as error:
        origins = {key: source_of_key(draft, entry.leaves[0]) for key, entry in draft.entries.items() if entry.leaves}
        problems = [replace(problem, line=None, source=origins.get(problem.key)) for problem in error.problems]
        print(f"{ConfigError(problems, error.source)}\nNothing was written. Correct {path}, then run this again.")
        return 2
    for written in format_written(paths):
        print(f"wrote {written}")
    named = (draft.value("model.name"), draft.value("data.train.name"))
    if placeholders := [name for name in PLACEHOLDERS if name in named]:
        print(f"{JOB_FILE} is not complete: write names in place of {' and '.join(placeholders)}, then check it.")
    else:
        print(f"{JOB_FILE} is ready. `finetune check --model` looks up its model and datasets of the hub.")
    print(f"start with: {launch_line(folder, draft.strategy, num_processes=num_processes)}")
    return 2 if is_strict and draft.keys_of("unknown") else 0


def _files(migration: Migration, folder: Path) -> Files:
    draft = migration.draft
    launch = launch_files(
        draft.strategy, folder, num_processes=max(1, draft.gpus), offload=bool(draft.get("fsdp_offload", False))
    )
    return {JOB_FILE: migration.job, **launch}
