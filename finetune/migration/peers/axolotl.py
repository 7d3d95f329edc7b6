"""axolotl: its tasks, its sources of rows and their prompts, and what its builders do where nothing is written."""

from typing import Any

from finetune.migration.complete import put_source, renamed, source_of, source_with_files
from finetune.migration.draft import ALPACA_ROWS, Draft, KeyOutcome, PeerTrainer, renamed_turns, version_of
from finetune.migration.rules import ONLINE, read_defaults, read_file

_TEMPLATES = {"mistral_v1": "mistral", **{name: name for name in ("chatml", "llama3", "gemma", "zephyr", "mistral")}}
_LOSSES = {"dpo": "sigmoid", **{name: name for name in ("ipo", "orpo", "simpo", "kto")}}
_CHATS = ("chat_template", "sharegpt", "sharegpt_simple", "chat", "messages")
_OF_CHATS = ("roles_assistant", "roles_user", "roles_system", "roles_to_train", "field_training", "drop_system")
_PROMPTS = ("alpaca", "alpaca_instruct", "alpaca.load")
_KNOWN_TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<bos>", "<eos>")


def _prepare(draft: Draft) -> None:
    """Write the task, the sources, the chat template, and what only axolotl has."""
    draft.loads_bf16 = True
    _unwritten(draft)
    for key, tracker in read_file("axolotl")["projects"].items():
        leaf = draft.file.leaves.get(key)
        if leaf is not None and leaf.value:
            draft.drop(f"`{key}` turns the tracker on", f"uses_{tracker}")
            draft.facts[f"uses_{tracker}"] = (True, leaf)
    _task(draft)
    positions = sorted({int(name.rpartition(".")[2]) for name in draft.facts if name.startswith("path.")})
    for index, position in enumerate(positions):
        key = "data.train" if len(positions) == 1 else f"data.train.mix.{index}"
        _source(draft, position, key)
        if len(positions) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source, as in axolotl")
    if "test_path.0" in draft.facts:
        values = source_of(draft.get("test_path.0"), draft.file.path.parent) | {"split": draft.get("test_split.0")}
        put_source(draft, "data.validation", values, "test_path.0", "test_split.0", "test_type.0")
    _template(draft, positions)
    task = draft.value("task.name")
    if draft.get("packing") and task in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        draft.note("packed samples do not attend to each other here; in axolotl, only flash attention isolates them.")
    if draft.get("train_on_inputs") and not draft.has("data.train_on") and task in ("sft", "vision_language_sft"):
        draft.put("data.train_on", "all", "train_on_inputs")
        if any(str(draft.get(f"type.{position}", "chat_template")).startswith(_CHATS) for position in positions):
            draft.note(
                "`train_on_inputs` makes the contents of all turns targets in axolotl; here every token of the "
                "conversation is one, with the headers that the chat template writes before each turn."
            )
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", draft.get("window_rows", 10_000), "window_rows", "streaming")
    _adapters(draft)
    _tokens(draft)
    names = [name.rpartition(".")[2] for name in draft.get("plugins", [])]
    if unknown := [name for name in names if name not in read_file("axolotl")["plugins"]]:
        draft.refuse(
            f"`{unknown[0]}` has no counterpart: a plugin of ours may do it (docs/how-to/plugins.md).", "plugins"
        )
    elif "CutCrossEntropyPlugin" in names and task in ("sft", "pretrain", "vision_language_sft"):
        draft.put("train.loss_kernel", "cce", "plugins")


def _unwritten(draft: Draft) -> None:
    """Take back the defaults that do not hold next to the keys of the file, as axolotl's builders do."""
    if "warmup_steps" in draft.facts:
        draft.assumed.pop("warmup_ratio", None)
    elif "warmup_ratio" in draft.assumed:
        draft.note("the warmup is at most 100 steps in axolotl, where none is written; here it is 3% of all.")
    if {"save_steps", "saves_per_epoch"} & draft.facts.keys():
        draft.assumed.pop("save_strategy", None)
        draft.drop("`save_steps` decides", "save_strategy")
        draft.facts.pop("save_strategy", None)
    if draft.get("fp16"):
        draft.assumed.pop("bf16", None)
    if {"eval_steps", "eval_strategy", "evals_per_epoch"} & draft.facts.keys():
        is_off = draft.get("eval_strategy") == "no" and "eval_steps" not in draft.facts
        draft.unwritten["evaluate.at_start"] = (not is_off, "axolotl, which evaluates before the first step")


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
        draft.put("task.name", "sft", comment="the default in axolotl")
    if rl not in _LOSSES and rl != "none":
        draft.refuse(ONLINE, "rl")
    if rl == "simpo" and "sft_weight" not in draft.facts:
        weight = read_defaults()["defaults"]["trl CPOConfig"]["cpo_alpha"]
        draft.assumed["sft_weight"] = (weight, f"trl {version_of('trl')}, CPOConfig: cpo_alpha: {weight}")
        draft.put("task.preference.sft_weight", weight, "sft_weight")
    for name in ("beta", "sft_weight"):
        if draft.value("task.name") == "preference" and name in draft.facts:
            draft.put(f"task.preference.{name}", draft.get(name), name)


def _source(draft: Draft, position: int, key: str) -> None:
    """Write the source of this position, with the format that its `type` stands for."""

    def get(name: str, default: Any = None) -> Any:
        return draft.get(f"{name}.{position}", default)

    task, kind = draft.value("task.name"), str(get("type", "chat_template"))
    values = source_with_files(get("path"), get("data_files"), draft.file.path.parent)
    values |= {"config": get("config"), "revision": get("revision"), "split": get("split")}
    if task == "pretrain":
        values |= {"format": "text", "columns": renamed({"text": get("field", "text")})}
    elif task in ("preference", "reward"):
        values |= _answers(draft, position, kind)
    elif _is_prompt(draft, position):
        values |= {"format": "prompt_completion", "template": _prompt(draft, position, kind)}
    elif kind.partition(".")[0] in _CHATS:
        values |= _chat(draft, position, is_sharegpt=kind.startswith("sharegpt"))
    else:
        advice = "write `format`, and `columns` or a `template` (`finetune preview` proposes them)."
        draft.refuse(advice, f"type.{position}")
    unread = {"turn_ends", "turn_ends_too"}
    unread |= set(_OF_CHATS) - ({"drop_system"} if get("drop_system") else set())
    unread -= set(_OF_CHATS[:5]) if kind.partition(".")[0] in _CHATS else set()
    own = [name for name in draft.facts if name.endswith(f".{position}") and not name.startswith("test_")]
    facts = [name for name in own if name.partition(".")[0] not in unread and not draft.is_named(name)]
    put_source(draft, key, values, *facts)


def _answers(draft: Draft, position: int, written: str) -> dict[str, Any]:
    """Return format and columns of pairs, or of answers that are judged one by one."""

    def get(name: str) -> Any:
        return draft.get(f"{name}.{position}")

    kind, _, style = written.partition(".")
    is_judged = draft.value("task.preference.loss") == "kto"
    known = read_file("axolotl")["judged_columns" if is_judged else "pair_columns"]
    columns: dict[str, Any] = dict(known.get(style, {}))
    if kind == "bradley_terry":
        columns = {"prompt": "input"}
    elif (kind, style, is_judged) == ("chat_template", "default", False) or f"field_messages.{position}" in draft.facts:
        columns = {"prompt": get("field_messages")}
    elif style not in ("", "default", *known):
        draft.note(f"`{kind}.{style}` stands for columns of its own: check them with `finetune preview`.")
    if kind in ("chatml", "llama3", "zephyr") and "chat_template" not in draft.facts:
        draft.put("data.chat_template", kind, comment=f"`type: {kind}.{style}` writes these marks")
    names = ("prompt", "completion", "label") if is_judged else ("prompt", "chosen", "rejected")
    columns |= {name: get(f"field_{name}") for name in names if get(f"field_{name}")}
    return {"format": "judged" if is_judged else "preference", "columns": renamed(columns)}


_USUAL = {"human": "user", "gpt": "assistant"}


def _chat(draft: Draft, position: int, *, is_sharegpt: bool) -> dict[str, Any]:
    """Return format and columns of turns; a template where their keys or speakers are not the usual ones."""

    def get(name: str, default: Any = None) -> Any:
        return draft.get(f"{name}.{position}", default)

    role = get("role_key", "from" if is_sharegpt else "role")
    content = get("content_key", "value" if is_sharegpt else "content")
    form = "conversations" if (role, content) == ("from", "value") else "messages"
    field = draft.facts.get(f"field_messages.{position}", ("conversations" if is_sharegpt else "messages",))[0]
    speakers = {name: target for target in ("assistant", "user", "system") for name in get(f"roles_{target}", ())}
    speakers = {**_USUAL, **{name: target for name, target in speakers.items() if name != target}}
    flag, trained = get("field_training"), {speakers.get(name, name) for name in get("roles_to_train")}
    has_choice = flag is not None or trained != {"assistant"}
    is_usual = (role, content) in (("role", "content"), ("from", "value")) and speakers == _USUAL
    if is_usual and not has_choice and not get("drop_system"):
        return {"format": form, "columns": renamed({form: field, "tools": get("field_tools")})}
    turns = f"row['{field}']" + (f" | rejectattr('{role}', 'equalto', 'system')" if get("drop_system") else "")
    weights = []
    if has_choice:
        speaker = f"{speakers}.get(turn['{role}'], turn['{role}'])"
        choice = "true" if draft.get("train_on_inputs") else f"{speaker} in {sorted(trained)}"
        if flag is not None:
            choice = f"(turn['{flag}'] if turn['{flag}'] is defined and turn['{flag}'] is not none else {choice})"
        weights.append(f"weight=1 if {choice} else 0")
        comment = "turns that are targets in axolotl have `weight: 1`"
        draft.put("data.train_on", "per_message", "train_on_inputs", comment=comment)
    template = {"messages": renamed_turns(turns, role, content, speakers, *weights)}
    return {"format": "messages", "columns": renamed({"tools": get("field_tools")}), "template": template}


def _is_prompt(draft: Draft, position: int) -> bool:
    has_format = any(f"{name}.{position}" in draft.facts for name in ("prompt_format", "field_instruction"))
    return has_format or draft.get(f"type.{position}", "chat_template") in _PROMPTS


def _prompt(draft: Draft, position: int, kind: str) -> dict[str, str]:
    """Return the prompt of Alpaca, or of the file's own format, with the file's columns."""
    template = dict(ALPACA_ROWS)
    if kind not in _PROMPTS:
        written = _braces(draft.get(f"prompt_format.{position}", "{instruction} {input} "))
        short = _braces(draft.get(f"prompt_no_input.{position}", "{instruction} "))
        template["prompt"] = f"{{% if input is defined and input %}}{written}{{% else %}}{short}{{% endif %}}"
    for part in ("instruction", "input", "output"):
        name = draft.get(f"field_{part}.{position}", part)
        for key, text in template.items():
            text = text.replace(f"{{{{ {part} }}}}", f"{{{{ {name} }}}}")
            template[key] = text.replace(f"if {part} is defined and {part} %", f"if {name} is defined and {name} %")
    return template


def _braces(written: str) -> str:
    for part in ("instruction", "input", "output"):
        written = written.replace(f"{{{part}}}", f"{{{{ {part} }}}}")
    return written


def _template(draft: Draft, positions: list[int]) -> None:
    name, task = str(draft.get("chat_template", "")), draft.value("task.name")
    prompts = [_is_prompt(draft, position) for position in positions] if task == "sft" else []
    if any(prompts) and all(prompts):
        draft.put("data.chat_template", "plain", comment="prompts are text in axolotl")
        draft.drop("prompts of this type are text, which no chat template renders", "chat_template")
        draft.note(
            "prompts of `type: alpaca` and the like are plain text in axolotl, and with `plain`. For a chat "
            "template, remove `data.chat_template`, and write `format: instruction` without `template`."
        )
    elif any(prompts):
        draft.note("the prompts of one source are plain text in axolotl; here the chat template renders all sources.")
    elif name in _TEMPLATES and task != "pretrain":
        draft.put("data.chat_template", _TEMPLATES[name], "chat_template")
    elif name and not name.startswith("tokenizer_default") and task != "pretrain":
        draft.note(f"`chat_template: {name}` is axolotl's own; here it is the tokenizer's: see `finetune preview`.")


def _adapters(draft: Draft) -> None:
    if draft.get("all_linear"):
        draft.withdraw("model.lora.target_modules", KeyOutcome("not_needed", "`lora_target_linear` covers them"))
        draft.put("model.lora.target_modules", "all-linear", "all_linear")
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


def _finish(draft: Draft) -> None:
    """Write what happens to long rows."""
    is_text = draft.value("task.name") == "pretrain"
    draft.default("data.over_length", "split" if is_text else "drop", "as in axolotl")
    what = {"drop": "left out", "truncate": "truncated"}.get(str(draft.value("data.over_length")))
    if what is not None:
        draft.note(f"rows longer than `max_length` are {what} in axolotl, which logs a line; here they are counted.")


AXOLOTL = PeerTrainer(name="axolotl", prepare=_prepare, finish=_finish)
