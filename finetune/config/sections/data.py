"""`data:` - which rows are used, how they become tokens, and how they are loaded."""

from typing import Annotated, Any, Literal

from pydantic import Field

from finetune.config.section import (
    Count,
    Delimiter,
    Factor,
    Fraction,
    ImageArea,
    Length,
    MixRows,
    Name,
    NameOrPath,
    NumRows,
    OneOf,
    Path,
    Pixels,
    Position,
    PositiveRows,
    Prefetch,
    Ratio,
    Section,
    Workers,
    key,
)
from finetune.registry.formats import FORMATS, SOURCES

SourceName = Annotated[str, OneOf(SOURCES)]
Format = Annotated[str, OneOf(FORMATS)]
YourColumns = Annotated[tuple[str | Position, ...], Field(strict=False, min_length=1)]
MixedSources = Annotated[tuple["MixedSourceSection", ...], Field(strict=False)]
Auto = Literal["auto"]


class SourceSection(Section):
    """One source of rows: local files, files in object storage, or a hub dataset."""

    path: Path | None = key(
        "Rows in a file, a folder (all files in it, of one kind), a glob or a URL (`s3://`, `gs://`, `hf://`): "
        "`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`, `.conll` (or `.bio`, `.iob2`: a word and its tags on "
        "each line, a blank line after each sentence) or `.txt` (each non-blank line is a row with the "
        "column `text`); all but `.parquet` and `.arrow` also as `.gz` or `.zst`. One of `path` and `name`.",
        None,
    )
    name: Name | None = key("Hub dataset name.", None)
    source: SourceName | None = key(
        "A source of rows that a plugin adds, in place of `path` and `name`; see docs/how-to/plugins.md.", None
    )
    config: Name | None = key("Configuration of the hub dataset.", None)
    revision: Name | None = key("Branch, tag or commit of the hub dataset.", None)
    split: Name = key("Split of the hub dataset, or a slice of it: `train[:10%]`.", "train")
    format: Format | None = key(
        f"{FORMATS.describe()} Unset, the first row's columns decide, and the choice is printed.",
        None,
    )
    columns: dict[str, str | Position | YourColumns] = key(
        "From the format's column name to yours: `{prompt: question, output: answer}`; for `negatives` and `label` "
        "also several: `{negatives: [negative_1, negative_2]}`, and for `kind: multi_label` the classes, each a column "
        "of 0 or 1: `{label: [toxic, insult]}`. With positions (from 0) a CSV "
        "file has no header: `{label: 0, text: 1}`, or names for templates: `{0: label, 1: title, 2: body}`. Of a "
        "CoNLL file unset, the first and the last: `{tokens: 0, tags: 3}`.",
        {},
    )
    template: dict[str, Any] = key(
        "From the format's column name to a Jinja text over your columns: `{prompt: 'Q: {{ question }}'}`. A column "
        "of turns takes a list of `{role, content}` of such texts, or one text that renders to JSON. `row` holds all "
        "columns; the filters `tojson` and `fromjson` exist.",
        {},
    )
    delimiter: Delimiter | None = key(
        'Character between the columns of a CSV file: `";"`, `"|"`, `"\\t"`; unset, a comma, of `.tsv` a tab.', None
    )
    quotes: bool | None = key(
        'Whether a CSV field may be enclosed in `"`, as around a delimiter or line break. `false`: `"` is an ordinary '
        "character. Unset, it may; a `.tsv` row over several lines with tabs in it is then refused.",
        None,
    )
    encoding: Name | None = key(
        "Encoding of text files, such as `cp1252` or `utf-16-le`; unset, UTF-8, or what a byte order mark says.", None
    )
    records: Name | None = key(
        "Where the rows of a `.json` file are: `data`, `data.items`. Lists on the way are joined, and their objects' "
        "other values are added to each row (SQuAD: `data.paragraphs.qas`).",
        None,
    )
    image_root: Path | None = key(
        "Folder of the images that rows name; unset, the folder of the file or glob with the rows.", None
    )
    follow_links: bool = key(
        "Also read files of a folder or glob that are symbolic links to a place outside it.", False
    )
    skip: NumRows = key("Skip this many rows at the start, before a validation fraction is split off.", 0)
    take: PositiveRows | None = key("Use at most this many rows after `skip`, the validation fraction included.", None)

    @property
    def named_positions(self) -> dict[int, str]:
        """Return the names that `columns` gives to positions: `{0: label}`."""
        return {int(name): str(yours) for name, yours in self.columns.items() if name.isdecimal()}

    @property
    def positions(self) -> list[int]:
        """Return the positions to which `columns` maps columns of the format."""
        return [column for yours in self.columns.values() for column in _listed(yours) if isinstance(column, int)]

    @property
    def has_positions(self) -> bool:
        """Return whether `columns` holds positions: a CSV file then has no header."""
        return bool(self.named_positions or self.positions)

    @property
    def column_names(self) -> dict[str, str]:
        """Return the row's column of each of the format's columns that is a single one."""
        return {name: yours[0] for name, yours in self.mapped.items() if not isinstance(self.columns[name], tuple)}

    @property
    def mapped(self) -> dict[str, tuple[str, ...]]:
        """Return the row's columns of each of the format's columns; those without a name are called by position."""
        named = self.named_positions
        return {
            name: tuple(named.get(column, str(column)) if isinstance(column, int) else column for column in columns)
            for name, columns in ((name, _listed(yours)) for name, yours in self.columns.items())
            if not name.isdecimal()
        }

    @property
    def joined_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the row's columns of each of the format's columns that is made of several."""
        return {name: yours for name, yours in self.mapped.items() if isinstance(self.columns[name], tuple)}


def _listed(columns: str | int | tuple[str | int, ...]) -> tuple[str | int, ...]:
    return columns if isinstance(columns, tuple) else (columns,)


class StreamSection(Section):
    """Rows are prepared window by window during training, for data that does not fit on the disk."""

    window_rows: PositiveRows = key(
        "Rows that are prepared, shuffled and packed together; beyond that only the order of files is shuffled.",
        10_000,
    )
    num_ahead: Prefetch = key("Windows that are prepared in advance of the one in use.", 2)


class TrainedSourceSection(SourceSection):
    """A source of training rows, prepared as a whole or as a stream."""

    stream: StreamSection | None = key("Prepare the rows window by window instead of all before training.", None)


class MixedSourceSection(TrainedSourceSection):
    """One source of a mix. Exactly one of `weight`, `rows`, `epochs`, the same one in all sources of the mix."""

    weight: Ratio | None = key("Weight of this source in the mix, relative to the other weights.", None)
    rows: MixRows | None = key("Samples of this source in each pass over the mix.", None)
    epochs: Ratio | None = key("Passes over this source in each pass over the mix.", None)


class TrainingSourceSection(TrainedSourceSection):
    """The training rows: one source, or a mix of several."""

    mix: MixedSources = key("Several sources that are mixed, in place of `path` and `name`.", ())
    until: Literal["first", "all"] = key(
        "With weights, the length of a pass over the mix: until the first source is exhausted, or until all are.",
        "first",
    )


class ValidationSourceSection(SourceSection):
    """The validation rows: a source of their own, or a split of the training rows."""

    fraction: float | None = key(
        "Split off this fraction of the training rows (of every source of a mix), by `run.seed` and row index: the "
        "rounded number of rows, at least one and fewer than all.",
        None,
        gt=0.0,
        lt=1.0,
    )
    hash_fraction: float | None = key(
        "Split off about this fraction of the training rows by a hash of their content: equal rows are on the same "
        "side, and adding rows moves none of the others; of few rows at least one.",
        None,
        gt=0.0,
        lt=1.0,
    )
    exclude_from_train: bool = key(
        "Leave out training rows with the same content as a validation row, and count them.", False
    )


class BatchingSection(Section):
    """What one position of the data order holds, and how samples share a forward pass."""

    by: Literal["samples", "packs", "tokens"] = key(
        "`samples`: one sample is one position. `packs`: samples are packed to at most `tokens`, best fit first. "
        "`tokens`: samples of similar length whose padded batch has at most `tokens`. `train.global_batch_size` and "
        "`train.microbatch_size` count positions.",
        "samples",
    )
    tokens: Length | None = key("Budget of a pack or a batch by tokens; unset, `data.max_length`.", None)
    padding_free: bool | Auto = key(
        "Concatenate the samples of a forward pass instead of padding them; no sample attends to another. `auto`: "
        "where the task and the model are known to support it. Packs are never padded.",
        "auto",
    )
    length_window_steps: Count | Auto = key(
        "Sort by length within this many steps, for less padding. 1 changes no step's set of samples, more gives "
        "steps of similar lengths. `auto`: 1 where samples are padded.",
        "auto",
    )

    @property
    def num_sorted_steps(self) -> int:
        """Return the most steps that are sorted together."""
        return 1 if self.length_window_steps == "auto" else self.length_window_steps

    @property
    def unit(self) -> str:
        """Return the plural name of the unit of a position: samples, packs or batches."""
        return {"samples": "samples", "packs": "packs", "tokens": "batches"}[self.by]


class AuditSection(Section):
    """Limits above which a run stops before training."""

    max_truncated_rows: Fraction | None = key("Fraction of the rows that are truncated or split.", None)
    max_dropped_rows: Fraction | None = key("Fraction of the rows that are left out, for whatever reason.", None)
    max_lost_targets: Fraction | None = key("Fraction of the targets that are cut off or left out.", None)
    max_duplicate_samples: Fraction | None = key("Fraction of the samples that equal an earlier one.", None)
    max_unknown_tokens: Fraction | None = key("Fraction of the tokens that are unknown tokens.", None)
    max_unread_rows: Fraction | None = key(
        "Fraction of the rows with a value in a column that changes their meaning (a label, a rank, a context, a "
        "second answer, ...) and that the job does not read.",
        None,
    )


Padding = Annotated[int, Field(ge=0, le=1_024)]
Scale = Annotated[float, Field(gt=0.0, le=1.0)]
Scales = Annotated[tuple[Scale, ...], Field(strict=False)]


class ImagesSection(Section):
    """How images become tensors; augmentation is redrawn for every sample and step, the same on any machine."""

    size: Pixels | None = key("Height and width in pixels; unset, as in the model's image processor.", None)
    crop_scale: Scales | None = key(
        "Train on a random crop with this fraction of the image's area, from and to: `[0.08, 1.0]` (Szegedy et al., "
        "2014, arXiv:1409.4842). Unset, the whole image is resized and center-cropped.",
        None,
        min_length=2,
        max_length=2,
    )
    crop_padding: Padding = key("Pad by this many pixels and take a random crop, as is usual on CIFAR-10.", 0)
    flip: bool = key("Flip images horizontally with probability 0.5.", False)
    mixup: Factor = key("Alpha of mixup (Zhang et al., 2017, arXiv:1710.09412): blend two images and labels.", 0.0)
    cutmix: Factor = key("Alpha of CutMix (Yun et al., 2019, arXiv:1905.04899): paste a patch of another image.", 0.0)
    min_pixels: ImageArea | None = key(
        "Vision-language models: enlarge images of fewer pixels (an area); unset, as the model's processor does.",
        None,
    )
    max_pixels: ImageArea | None = key(
        "Vision-language models: shrink images of more pixels, which bounds their number of tokens; unset, as the "
        "model's processor does.",
        None,
    )


NO_LIMIT = 2**40
"""The longest sample of a task whose samples have no tokens."""


class DataSection(Section):
    """Which rows are used, how they become tokens, and how they are loaded."""

    train: TrainingSourceSection = key("The training rows.")
    validation: ValidationSourceSection | None = key("The validation rows.", None)
    max_length: Length | None = key(
        "Longest sample in tokens; what happens to longer rows is `over_length`. Required unless the task reads "
        "images only.",
        None,
        ge=2,
    )
    over_length: Literal["refuse", "drop", "truncate", "split"] = key(
        "What happens to a row longer than `max_length`: refuse the run, drop the row, truncate it, or split it into "
        "windows. Always counted and printed.",
        "refuse",
    )
    truncate_side: Literal["end", "start"] = key("The side that `over_length: truncate` cuts off.", "end")
    no_target: Literal["refuse", "drop"] = key("What happens to a row without a single target.", "refuse")
    train_on: Literal["assistant", "last_assistant", "each_assistant", "all", "per_message"] = key(
        "Which turns are targets: the assistant's, only its last, each of the assistant's in a sample of its own (for "
        "templates that change earlier turns), every turn, or turns whose `weight` in the row is 1.",
        "assistant",
    )
    train_on_reasoning: bool = key(
        "Whether the reasoning of target turns (`reasoning_content`, `<think>` in the content) is a target. If not, "
        "it is context, with the markers that the chat template writes around it.",
        True,
    )
    chat_template: NameOrPath | None = key(
        "`chatml`, `gemma`, `llama3`, `mistral`, `plain`, `qwen`, `zephyr`, or a Jinja file that begins with `.`, `/`, "
        "`~`. Unset, the tokenizer's own template.",
        None,
    )
    chat_template_arguments: dict[str, Any] | None = key(
        "Arguments of the chat template: `{enable_thinking: false}`, `{reasoning_effort: low}`. A row's own are in "
        "its column `chat_template_kwargs`. Unset, the arguments that `finetune` recorded with the tokenizer, if any.",
        None,
    )
    system_prompt: str | None = key("System message for rows without one.", None)
    allow_special_tokens: bool = key(
        "Encode special tokens that appear as text in rows (`<|im_end|>`) as special tokens. Off, they stay text, "
        "and are counted.",
        False,
    )
    shuffle: bool = key("Shuffle differently in every epoch, from `run.seed`.", True)
    batching: BatchingSection = key("How samples form steps: packing, batching by tokens, padding.", BatchingSection())
    images: ImagesSection = key("How images become tensors.", ImagesSection())
    audit: AuditSection = key("Limits above which a run stops before training.", AuditSection())
    cache_folder: Path | None = key("Cache of tokenized rows; unset, `~/.cache/finetune`.", None)
    prepare_workers: Workers | Auto = key(
        "Processes that tokenize; 0: the main process, `auto`: by the number of cores.", 0
    )
    num_workers: Workers | Auto = key(
        "Processes per rank that load batches; 0 loads in the training process. `auto` starts some where images are "
        "decoded, and for tokens next to a GPU, up to the number of cores.",
        "auto",
    )
    pin_memory: bool | Auto = key(
        "Page-locked host memory: faster copies to a GPU; `auto` uses it where there is one. `true` without one is "
        "an error.",
        "auto",
    )
    persistent_workers: bool | Auto = key("Keep worker processes between passes. Needs `num_workers`.", False)
    prefetch_factor: Prefetch | Auto | None = key("Batches each worker keeps ready. Needs `num_workers`.", None)

    @property
    def longest(self) -> int:
        """Return the longest sample in tokens; where none is set, more than any sample has."""
        return NO_LIMIT if self.max_length is None else self.max_length
