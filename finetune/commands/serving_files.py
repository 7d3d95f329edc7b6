"""`finetune export --for ENGINE`: the files that an engine needs next to the weights."""

import json
import shlex
from collections.abc import Collection, Iterator
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
    files = list(_complete_generation_config(saved.folder, stops))
    name = saved.folder.parent.name if saved.folder.name == FINAL_FOLDER else saved.folder.name
    weights = saved.folder / f"{name}-{gguf_type}.gguf"
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
        lines = [f"FROM ./{weights.name}", f"PARAMETER num_ctx {min(_OLLAMA_CONTEXT, _max_tokens(saved))}"]
        lines += [f"PARAMETER stop {json.dumps(tokenizer.convert_ids_to_tokens(token))}" for token in sorted(stops)]
        files.append(saved.folder / "Modelfile")
        atomic.write_text(files[-1], "\n".join(lines) + "\n")
    commands = list(_commands(saved, engine, name=name, weights=weights))
    if arguments := arguments_of(tokenizer):
        commands.append(f"# Send with every conversation: {json.dumps({'chat_template_kwargs': dict(arguments)})}")
    if engine.verifies:
        commands.append("# Compare what it serves with this folder:")
        commands.append(f"finetune verify serving {_quoted(saved.folder)} --engine {engine.name}")
    files.append(saved.folder / f"serve-{engine.name}.txt")
    atomic.write_text(files[-1], "\n".join(commands) + "\n")
    return files


def _complete_generation_config(folder: Path, stops: Collection[int]) -> Iterator[Path]:
    """Write the tokens that end an answer to the generation config, if it lacks one; yield its path then."""
    path = folder / GENERATION_CONFIG_NAME
    try:
        settings = parse_as(_SETTINGS, read_regular(path)) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path}: {error}. Export the model again.") from error
    config = GenerationConfig.from_dict(settings)
    own = config.eos_token_id
    known = set(own if isinstance(own, list) else [] if own is None else [own])
    if not known.issuperset(stops):
        config.eos_token_id = sorted(known | set(stops))
        write_generation_config(config, folder)
        yield path


def _commands(saved: SavedModel, engine: Engine, *, name: str, weights: Path) -> Iterator[str]:
    folder, dtype = _quoted(saved.folder), str(saved.config.dtype or "auto").removeprefix("torch.")
    template = saved.folder / "chat_template.jinja"
    chat = f" --chat-template {_quoted(template)}" if template.is_file() else ""
    if engine.name == "vllm" and saved.adapter is None:
        yield f"vllm serve {folder} --served-model-name {name} --dtype {dtype}"
    elif engine.name == "vllm":
        yield "# Tokenizer, template and generation config are the adapter's: the base's end answers elsewhere."
        yield (
            f"vllm serve {_quoted(saved.base)} --tokenizer {folder}{chat} --generation-config {folder} --dtype {dtype} "
            f"--enable-lora --max-lora-rank {_rank_limit(saved, engine)} --lora-modules {name}={folder}"
        )
    elif engine.name == "sglang" and saved.adapter is None:
        yield f"python -m sglang.launch_server --model-path {folder} --served-model-name {name} --dtype {dtype}"
    elif engine.name == "sglang":
        stops = json.loads((saved.folder / GENERATION_CONFIG_NAME).read_text(encoding="utf-8"))["eos_token_id"]
        yield "# Tokenizer, template and the tokens that end answers are the adapter's, not the base's."
        yield (
            f"python -m sglang.launch_server --model-path {_quoted(saved.base)} --tokenizer-path {folder}{chat} "
            f"--json-model-override-args {shlex.quote(json.dumps({'eos_token_id': stops}))} --dtype {dtype} "
            f"--enable-lora --max-lora-rank {_rank_limit(saved, engine)} --lora-paths {name}={folder}"
        )
    elif engine.name == "llama.cpp":
        yield f"llama-server -m {_quoted(weights)} --jinja -c {min(_OLLAMA_CONTEXT, _max_tokens(saved))}"
        yield "# Smaller, and less exact:"
        yield f"llama-quantize {_quoted(weights)} {_quoted(weights.with_name(f'{name}-Q4_K_M.gguf'))} Q4_K_M"
    elif engine.name == "ollama":
        yield f"cd {folder} && ollama create {name} -f Modelfile && ollama run {name}"
        yield "# Ollama guesses the template from that in the file: the command below finds a wrong guess."
    else:
        yield f"trl sft --model_name_or_path {folder} --dtype {dtype} --dataset_name YOUR_DATA"
        if saved.adapter is None:
            yield f"trl vllm-serve --model {folder} --dtype {dtype}"


def _rank_limit(saved: SavedModel, engine: Engine) -> int:
    """Return the smallest limit of the engine that is not below the adapter's rank."""
    assert saved.adapter is not None
    rank: int = saved.adapter["r"]
    return next(limit for limit in engine.max_lora_ranks if limit >= rank)


def _max_tokens(saved: SavedModel) -> int:
    return int(getattr(saved.config, "max_position_embeddings", 0) or _OLLAMA_CONTEXT)


def _quoted(value: Any) -> str:
    return shlex.quote(str(value))
