"""`finetune export --for ENGINE`: the files that an engine needs next to the weights."""

import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from finetune.commands.export import export, processing_in
from finetune.data.templates.chat_template import stop_ids
from finetune.data.templates.rendering import arguments_of
from finetune.errors import ModelError, UserError
from finetune.export.engines import Engine, find_engine, serving_problems
from finetune.export.gguf import GGUFType, write_gguf
from finetune.export.save import push_folder
from finetune.export.upstream import write_generation_config
from finetune.model.loading.saved import SavedModel, find_model_folder, inspect_model_folder
from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.run_folder import FINAL_FOLDER

_SETTINGS = TypeAdapter(dict[str, Any])

_OLLAMA_CONTEXT = 8192
"""Ollama reads only 4,096 tokens by default, and silently drops the start of longer prompts."""


def export_for(
    source: Path,
    engine_name: str,
    *,
    gguf_type: GGUFType,
    step: int | None,
    to: Path | None,
    dtype: str | None,
    merge: bool,
    push_to_hub: str | None,
    public: bool,
    trust_remote_code: bool,
    verify: bool | None,
) -> Path:
    """Export as `export` does, unless source or its `final/` is already the model; write and print the engine's files.

    Raises what `export` and `write_serving_files` do.
    """
    engine = find_engine(engine_name, option="--for")
    is_exported = step is None and to is None and dtype is None and not merge
    folder = find_model_folder(source) if is_exported else None
    folder = folder or export(
        source,
        step=step,
        to=to,
        dtype=dtype,
        merge=merge,
        push_to_hub=None,
        trust_remote_code=trust_remote_code,
        verify=verify,
    )
    files = write_serving_files(folder, engine, gguf_type=gguf_type, trust_remote_code=trust_remote_code)
    print(f"written for {engine.title}: {', '.join(file.name for file in files)} in {folder}")
    print(files[-1].read_text(encoding="utf-8"), end="")
    if push_to_hub is not None:
        print(f"uploaded to {push_folder(folder, push_to_hub, private=not public)}")
    return folder


def write_serving_files(folder: Path, engine: Engine, *, gguf_type: GGUFType, trust_remote_code: bool) -> list[Path]:
    """Write the files that the engine needs into the model folder, and return the files; the last one has the commands.

    Raises UserError for an adapter that the engine would not serve as it was trained, ModelError for a model that
    cannot be written as GGUF.
    """
    saved = inspect_model_folder(folder, key="--for", trust_remote_code=trust_remote_code)
    option = f"--for {engine.name}"
    if saved.head != "causal_lm":
        raise UserError(f"{option}: {saved.folder} has a `{saved.head}` model, which does not continue text.")
    if saved.adapter is not None and (problems := serving_problems(saved.adapter, engine)):
        raise UserError(
            f"{option}: {saved.folder} has an adapter that must be merged: {'; '.join(problems)}. "
            f"Run: finetune export {saved.folder} --merge {option}"
        )
    tokenizer = processing_in(saved, trust_remote_code=trust_remote_code).tokenizer
    if tokenizer is None:
        raise UserError(f"{option}: {saved.folder} has no tokenizer. Copy tokenizer files into it.")
    stops = stop_ids(tokenizer)
    ends, files = _complete_generation_config(saved.folder, stops)
    name = saved.folder.parent.name if saved.folder.name == FINAL_FOLDER else saved.folder.name
    weights = saved.folder / f"{name}-{gguf_type}.gguf"
    context = min(_OLLAMA_CONTEXT, int(getattr(saved.config, "max_position_embeddings", 0) or _OLLAMA_CONTEXT))
    if engine.reads_gguf:
        write_gguf(
            saved.folder,
            weights,
            tokenizer=tokenizer,
            stop_ids=stops,
            dtype=gguf_type,
            trust_remote_code=trust_remote_code,
        )
        files.append(weights)
    if engine.name == "ollama":
        lines = [f"FROM ./{weights.name}", f"PARAMETER num_ctx {context}"]
        lines += [f"PARAMETER stop {json.dumps(tokenizer.convert_ids_to_tokens(token))}" for token in sorted(stops)]
        files.append(saved.folder / "Modelfile")
        atomic.write_text(files[-1], "\n".join(lines) + "\n")
    lines = [_commands(saved, engine, name=name, weights=weights, ends=ends, context=context)]
    if arguments := arguments_of(tokenizer):
        lines.append(f"# Send with every conversation: {json.dumps({'chat_template_kwargs': dict(arguments)})}")
    lines.append("# Compare what it serves with this folder:")
    lines.append(f"finetune verify serving {shlex.quote(str(saved.folder))} --engine {engine.name}")
    files.append(saved.folder / f"serve-{engine.name}.txt")
    atomic.write_text(files[-1], "\n".join(lines) + "\n")
    return files


def _commands(saved: SavedModel, engine: Engine, *, name: str, weights: Path, ends: Sequence[int], context: int) -> str:
    template = saved.folder / "chat_template.jinja"
    values = {
        "folder": saved.folder,
        "base": saved.base,
        "weights": weights,
        "quantized": weights.with_name(f"{name}-Q4_K_M.gguf"),
        "stops": json.dumps({"eos_token_id": ends}),
    }
    return (engine.commands if saved.adapter is None else engine.adapter_commands).format(
        **{key: shlex.quote(str(value)) for key, value in values.items()},
        name=name,
        dtype=str(saved.config.dtype or "auto").removeprefix("torch."),
        template=f" --chat-template {shlex.quote(str(template))}" if template.is_file() else "",
        rank=next((limit for limit in engine.max_lora_ranks if limit >= (saved.adapter or {}).get("r", 0)), 0),
        context=context,
    )


def _complete_generation_config(folder: Path, stops: Collection[int]) -> tuple[list[int], list[Path]]:
    """Return the tokens that end an answer, and the path of the generation config if it lacked one and was written."""
    path = folder / GENERATION_CONFIG_NAME
    try:
        settings = parse_as(_SETTINGS, read_regular(path)) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path}: {error}. Export the model again.") from error
    config = GenerationConfig.from_dict(settings)
    own = config.eos_token_id
    known = set(own if isinstance(own, list) else [] if own is None else [own])
    ends = sorted(known | set(stops))
    if known.issuperset(stops):
        return ends, []
    config.eos_token_id = ends
    write_generation_config(config, folder)
    return ends, [path]
