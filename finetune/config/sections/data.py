"""`data:` - which rows are learnt from, how they become tokens, and how they are loaded."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import Count, NameOrPath, Path, Positive, Section, key

Format = Literal["messages", "prompt_completion", "instruction", "text"]


class SourceSection(Section):
    """One source of rows: a local file or a hub dataset."""

    path: Path | None = key(
        "Local `.jsonl`, `.json`, `.csv` or `.parquet` file (or a glob of them). Exactly one of `path` and `name`.",
        None,
    )
    name: str | None = key("Hub dataset name.", None)
    config: str | None = key("Configuration of the hub dataset.", None)
    revision: str | None = key("Branch, tag or commit of the hub dataset.", None)
    split: str = key("Split of the hub dataset.", "train")
    format: Format | None = key(
        "`messages` (role/content turns), `prompt_completion`, `instruction` (instruction/input/output) or `text`. "
        "Unset, the columns decide, and the choice is printed.",
        None,
    )
    columns: dict[str, str] = key(
        "From the format's column name to yours: `{prompt: question, completion: answer}`.", {}
    )
    skip: Count = key("Leave out this many rows at the start.", 0)
    take: Positive | None = key("Use at most this many rows after `skip`.", None)


class DataSection(Section):
    """Which rows are learnt from, how they become tokens, and how they are loaded."""

    train: SourceSection = key("The rows to learn from.")
    validation: SourceSection | None = key("The rows to evaluate on.", None)
    max_length: int = key(
        "Longest sample in tokens. There is no default: what happens to longer rows is `over_length`.", ge=2
    )
    over_length: Literal["refuse", "drop", "truncate"] = key(
        "What happens to a row longer than `max_length`: stop before training, leave it out, or cut its end. "
        "Always counted and printed.",
        "refuse",
    )
    no_target: Literal["refuse", "drop"] = key("What happens to a row without a single target.", "refuse")
    chat_template: NameOrPath | None = key(
        "`chatml`, or a Jinja file when it begins with `.`, `/` or `~`. Unset, the tokenizer's own template.", None
    )
    system_prompt: str | None = key("System message for rows that have none.", None)
    shuffle: bool = key("Shuffle anew in every epoch, from `run.seed`.", True)
    cache_folder: Path | None = key("Where tokenised rows are kept; unset, `~/.cache/finetune`.", None)
    prepare_workers: Count = key("Processes that tokenise; 0 tokenises in the main process.", 0)
    num_workers: Count = key("Processes per rank that load batches; 0 loads in the training process.", 0)
    pin_memory: bool = key("Page-locked host memory: faster copies to a GPU. An error where there is none.", False)
    persistent_workers: bool = key("Keep loader processes between passes. Needs `num_workers`.", False)
    prefetch_factor: Annotated[int, Field(ge=1)] | None = key(
        "Batches each worker keeps ready. Needs `num_workers`.", None
    )
