"""axolotl: its tasks, its sources of rows and their prompts, and its defaults."""

from typing import Any

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import ALPACA_ROWS, Draft, Outcome, Peer
from finetune.migration.tables.axolotl import AXOLOTL as TABLE

_TEMPLATES = {
    **{"chatml": "chatml", "llama3": "llama3", "gemma": "gemma", "zephyr": "zephyr"},
    **{"mistral": "mistral", "mistral_v1": "mistral"},
}
_LOSSES = {"dpo": "sigmoid", **{name: name for name in ("ipo", "orpo", "simpo", "kto", "cpo")}}
_JEOPARDY = {
    "prompt": "Category: {{ category }}\nClue: {{ question }}\nResponse: ",
    "completion": "what is {{ answer }}",
}
_CHATS = ("chat_template", "sharegpt", "sharegpt_simple", "chat", "messages")
_PROMPTS = ("alpaca", "alpaca_chat", "alpaca_w_system", "jeopardy")
_ROW_FACTS = (
    "path",
    "config",
    "revision",
    "split",
    "data_files",
    "type",
    "field",
    "field_messages",
    "field_chosen",
    "field_rejected",
    "field_tools",
    "role_key",
    "content_key",
    "field_instruction",
    "field_input",
    "field_output",
    "field_system",
    "prompt_format",
    "prompt_no_input",
    "drop_system",
)
_ROW_REASONS = {
    "roles_assistant": "speakers with the usual names are read: user, human, assistant, gpt, system, tool",
    "roles_user": "speakers with the usual names are read: user, human, assistant, gpt, system, tool",
    "roles_system": "speakers with the usual names are read: user, human, assistant, gpt, system, tool",
    "field_thinking": "a turn's `thinking` or `reasoning_content` is its reasoning",
    "roles_to_train": "the assistant's turns are the targets: `data.train_on`",
    "drop_system": "system turns stay there, too",
}
_KNOWN_TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<bos>", "<eos>")


def prepare(draft: Draft) -> None:
    """Write the task, the sources, the chat template, and what only axolotl has."""
    draft.loads_bf16 = True
    _task(draft)
    positions = sorted({int(name.rpartition(".")[2]) for name in draft.facts if name.startswith("path.")})
    for index, position in enumerate(positions):
        key = "data.train" if len(positions) == 1 else f"data.train.mix.{index}"
        _source(draft, position, key)
        if len(positions) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source, as there")
    if "test_path.0" in draft.facts:
        values = source_of(draft.get("test_path.0"), draft.file.path.parent) | {"split": draft.get("test_split.0")}
        put_source(draft, "data.validation", values, "test_path.0", "test_split.0", "test_type.0")
    _template(draft, positions)
    if draft.get("packing") and draft.value("task.name") in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        draft.note("packed samples do not attend to each other here; there, only flash attention keeps them isolated.")
    if draft.get("train_on_inputs") and draft.value("task.name") in ("sft", "vision_language_sft"):
        draft.put("data.train_on", "all", "train_on_inputs")
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", draft.get("window_rows", 10_000), "window_rows", "streaming")
    draft.drop("rows are not streamed", *(() if draft.has("data.train.stream") else ("streaming", "window_rows")))
    _adapters(draft)
    _tokens(draft)
    names = [name.rpartition(".")[2] for name in draft.get("plugins", [])]
    if "CutCrossEntropyPlugin" in names and draft.value("task.name") in ("sft", "pretrain", "vision_language_sft"):
        draft.put("train.loss_kernel", "cce", "plugins")
    else:
        draft.drop("their settings are converted or listed at their own keys", "plugins")


def _task(draft: Draft) -> None:
    rl = str(draft.get("rl", "none")).lower()
    is_text = any(key.startswith("pretraining_dataset") for key in draft.file.leaves)
    if rl in _LOSSES:
        draft.put("task.name", "preference", "rl")
        draft.put("task.preference.loss", _LOSSES[rl], "rl")
    elif draft.get("is_reward"):
        draft.put("task.name", "reward", "is_reward")
    elif is_text or draft.get("type.0") == "completion":
        draft.put("task.name", "pretrain", comment="every token of a text is a target")
    elif "processor" in draft.facts:
        draft.put("task.name", "vision_language_sft", "processor")
    else:
        draft.put("task.name", "sft", comment="the default there")
    if rl not in _LOSSES and rl != "none":
        draft.out_of_scope = f"rl: {rl}"
        draft.refuse("reinforcement learning is not a task here: use the Session API (docs/how-to/session.md).", "rl")
    for name in ("beta", "sft_weight"):
        if draft.value("task.name") == "preference" and name in draft.facts:
            draft.put(f"task.preference.{name}", draft.get(name), name)
    unused = [name for name in ("is_reward", "processor", "beta", "sft_weight") if not draft.is_named(name)]
    draft.drop("another task is trained", *unused)
    own_loss = ("own_loss", "own_loss_alpha", "own_loss_k")
    if draft.get("own_loss"):
        draft.out_of_scope = "a loss of its own (EAFT)"
        draft.refuse("a plugin adds a loss of tokens as `task.loss` (docs/how-to/plugins.md).", *own_loss)
    else:
        draft.drop("it is off there, too", *own_loss)
    for key in (key for key in draft.file.leaves if key.startswith("diffusion.")):
        draft.out_of_scope = "a diffusion language model"
        draft.outcomes[key] = Outcome(
            "not_possible", "diffusion is not a task here; `task.name: masked_lm` is nearest."
        )


def _source(draft: Draft, position: int, key: str) -> None:
    """Write the source of this position, with the format that its `type` stands for."""

    def get(name: str, default: Any = None) -> Any:
        return draft.get(f"{name}.{position}", default)

    task = draft.value("task.name")
    values = source_of(get("path"), draft.file.path.parent)
    values |= {"config": get("config"), "revision": get("revision"), "split": get("split")}
    files = get("data_files")
    if files and get("path") in ("json", "csv", "parquet", "arrow", "text"):
        values = source_of(files, draft.file.path.parent)
    elif files and "name" in values:
        values = {"path": f"hf://datasets/{values['name']}/{files}"}
    kind, _, style = str(get("type", "chat_template")).partition(".")
    if task == "pretrain":
        values |= {"format": "text", "columns": _renamed({"text": get("field", "text")})}
    elif task in ("preference", "reward"):
        fields = {"prompt": get("field_messages"), "chosen": get("field_chosen"), "rejected": get("field_rejected")}
        values |= {"format": "preference", "columns": _renamed(fields)}
        if style not in ("", "default"):
            draft.note(f"`{kind}.{style}` stands for columns of its own: check them with `finetune preview`.")
    elif kind in ("alpaca", "alpaca_chat", "alpaca_w_system") or get("field_instruction") is not None:
        values |= {"format": "prompt_completion", "template": _alpaca(draft, position)}
    elif kind == "jeopardy":
        values |= {"format": "prompt_completion", "template": dict(_JEOPARDY)}
    elif kind in _CHATS:
        values |= _chat(draft, position, is_sharegpt=kind.startswith("sharegpt"))
    else:
        draft.refuse(
            "write `format`, and `columns` or a `template` (`finetune preview` proposes them).", f"type.{position}"
        )
    facts = [f"{name}.{position}" for name in _ROW_FACTS if not (name == "drop_system" and not get(name))]
    put_source(draft, key, values, *(name for name in facts if not draft.is_named(name)))
    if not set(get("roles_to_train", ())) <= {"assistant", "gpt"}:
        draft.refuse("choose one of `data.train_on`.", f"roles_to_train.{position}")
    draft.refuse(
        "write it in the source's `template`.", *(f"{name}.{position}" for name in ("type_keys", "row_system", "roles"))
    )
    draft.refuse("one template holds for all sources: write `data.chat_template`.", f"row_template.{position}")
    for name, reason in _ROW_REASONS.items():
        if not draft.is_named(f"{name}.{position}"):
            draft.drop(reason, f"{name}.{position}")


def _renamed(columns: dict[str, str | None]) -> dict[str, str]:
    return {name: yours for name, yours in columns.items() if yours not in (None, name)}


def _chat(draft: Draft, position: int, *, is_sharegpt: bool) -> dict[str, Any]:
    """Return format and columns of turns; a template where system turns are left out."""
    speaker, content = draft.get(f"role_key.{position}"), draft.get(f"content_key.{position}")
    form = "conversations" if is_sharegpt or speaker == "from" or content == "value" else "messages"
    field = draft.get(f"field_messages.{position}", form)
    if draft.get(f"drop_system.{position}"):
        speaker = "from" if form == "conversations" else "role"
        turns = f"row['{field}'] | rejectattr('{speaker}', 'equalto', 'system') | list | tojson"
        return {"format": form, "template": {form: f"{{{{ {turns} }}}}"}}
    tools = draft.get(f"field_tools.{position}")
    return {"format": form, "columns": _renamed({form: field, "tools": tools})}


def _alpaca(draft: Draft, position: int) -> dict[str, str]:
    """Return the prompt as axolotl writes it: Alpaca's, or the file's own format, with the file's columns."""
    prompt, completion = ALPACA_ROWS["prompt"], ALPACA_ROWS["completion"]
    written = draft.get(f"prompt_format.{position}")
    if written is not None:
        short = draft.get(f"prompt_no_input.{position}", written.replace("{input}", ""))
        prompt = f"{{% if input is defined and input %}}{_braces(written)}{{% else %}}{_braces(short)}{{% endif %}}"
    for part in ("instruction", "input", "output"):
        name = draft.get(f"field_{part}.{position}", part)
        prompt = prompt.replace(f"{{{{ {part} }}}}", f"{{{{ {name} }}}}")
        prompt = prompt.replace(f"if {part} is defined and {part} %", f"if {name} is defined and {name} %")
        completion = completion.replace(f"{{{{ {part} }}}}", f"{{{{ {name} }}}}")
    return {"prompt": prompt, "completion": completion}


def _braces(written: str) -> str:
    for part in ("instruction", "input", "output"):
        written = written.replace(f"{{{part}}}", f"{{{{ {part} }}}}")
    return written


def _template(draft: Draft, positions: list[int]) -> None:
    name, jinja = str(draft.get("chat_template", "")), draft.get("chat_template_jinja")
    task = draft.value("task.name")
    is_prompt = any(str(draft.get(f"type.{position}", "")).startswith(_PROMPTS) for position in positions)
    if jinja is not None and task != "pretrain":
        draft.files["chat_template.jinja"] = jinja
        draft.put("data.chat_template", "./chat_template.jinja", comment="written next to this file")
        draft.mapped("file chat_template.jinja", "chat_template", "chat_template_jinja")
    elif name in _TEMPLATES and task != "pretrain":
        draft.put("data.chat_template", _TEMPLATES[name], "chat_template")
    elif is_prompt and not name and task == "sft":
        draft.put("data.chat_template", "plain")
        draft.note(
            "prompts of `type: alpaca` are plain text there, and so are they with `plain`. For the model's own "
            "chat template, remove `data.chat_template`, and write `format: instruction` without `template`."
        )
    if not draft.has("data.chat_template"):
        draft.drop("the tokenizer's own chat template is used: look with `finetune preview`", "chat_template")
        draft.drop("texts have no turns", "chat_template_jinja")


def _adapters(draft: Draft) -> None:
    if draft.get("all_linear"):
        draft.withdraw("model.lora.target_modules", Outcome("not_needed", "`lora_target_linear` covers them"))
        draft.put("model.lora.target_modules", "all-linear", "all_linear")
    else:
        draft.drop("it is off there, too", "all_linear")
    names = draft.get("target_parameters", [])
    if names and all("expert" in name for name in names):
        draft.put("model.lora.experts", True, "target_parameters")
    elif names:
        draft.refuse("name the modules in `model.lora.target_modules`.", "target_parameters")
    if "trained" in draft.facts:
        patterns = [f"*{name.strip('^$')}*" for name in draft.get("trained")]
        draft.put("model.train_only", patterns, "trained")
    if "beta1" in draft.facts or "beta2" in draft.facts:
        betas = [draft.get("beta1", 0.9), draft.get("beta2", 0.999)]
        draft.put("train.optimizer.betas", betas, "beta1", "beta2")


def _tokens(draft: Draft) -> None:
    """Write special tokens that only a chat template of another model brings."""
    names = [name for name in ("bos_token", "eos_token") if name in draft.facts]
    added = [draft.get(name) for name in names if draft.get(name) not in _KNOWN_TOKENS]
    if draft.get("chat_template") == "chatml" and any("im_" in token for token in added):
        draft.put("model.new_tokens.special", list(dict.fromkeys(added)), *names)
        draft.note("a token that the vocabulary has already must not be in `model.new_tokens`: remove it there.")
    else:
        draft.drop("the tokenizer's own token, or the one that the chat template writes, is used", *names)
    for key, leaf in draft.file.leaves.items():
        if leaf.pattern.startswith("tokens."):
            draft.outcomes[key] = Outcome("not_needed", "the tokenizer's own token is used")


def finish(draft: Draft) -> None:
    """Write axolotl's own defaults, and what happens to long rows."""
    if not draft.has("train.steps"):
        draft.default("train.epochs", 1.0, "the default there")
    draft.default("train.schedule.name", "cosine", "the default there")
    draft.default("data.max_length", 512, "the default there")
    if draft.value("task.name") == "pretrain":
        draft.default("data.over_length", "split", "as there")
    else:
        draft.default("data.over_length", "drop", "as there")
        draft.note("rows longer than `max_length` are left out, there with a line in the log; here they are counted.")


AXOLOTL = Peer(
    name="axolotl",
    title="axolotl",
    table=TABLE,
    signs=frozenset(
        {
            "base_model",
            "sequence_len",
            "micro_batch_size",
            "val_set_size",
            "adapter",
            "num_epochs",
            "rl",
            "dataset_prepared_path",
            "lora_target_linear",
            "evals_per_epoch",
            "saves_per_epoch",
            "datasets",
            "pretraining_dataset",
        }
    ),
    prepare=prepare,
    finish=finish,
)
