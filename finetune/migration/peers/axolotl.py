"""axolotl: its tasks, its sources of rows and their prompts, and what its builders do where nothing is written."""

from typing import Any

from finetune.migration.complete import put_source, source_of, source_with_files
from finetune.migration.draft import ALPACA_ROWS, Draft, KeyOutcome, PeerTrainer, read_defaults, version_of
from finetune.migration.rules import read_file

_TEMPLATES = {"mistral_v1": "mistral", **{name: name for name in ("chatml", "llama3", "gemma", "zephyr", "mistral")}}
_LOSSES = {"dpo": "sigmoid", **{name: name for name in ("ipo", "orpo", "simpo", "kto")}}
_JEOPARDY = {
    "prompt": "Category: {{ category }}\nClue: {{ question }}\nResponse: ",
    "completion": "what is {{ answer }}",
}
_CHATS = ("chat_template", "sharegpt", "sharegpt_simple", "chat", "messages")
_SYSTEM = "{% if system is defined and system %}### System:\n{{ system }}\n\n{% endif %}"
_ROW_REASONS = {
    **dict.fromkeys(("roles_assistant", "roles_user", "roles_system"), "rows of this type have no speakers"),
    "field_thinking": "a turn's `thinking` or `reasoning_content` is its reasoning",
    "roles_to_train": "the assistant's turns are the targets: `data.train_on`",
    "drop_system": "system turns stay in axolotl, too",
    "train_on_eos": "the end of each target turn is a target, as here",
    "split_thinking": "reasoning stays in the content in axolotl, too",
}
_CHOICES = ("roles_assistant", "roles_user", "roles_system", "roles_to_train")
_NOT_OF_ROWS = ("train_on_eot", "type_keys", "row_system", "roles", "row_template", "training_detail", "token")
_KNOWN_TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<bos>", "<eos>")
_WARMUP = "axolotl _configure_warmup_and_logging"


def _prepare(draft: Draft) -> None:
    """Write the task, the sources, the chat template, and what only axolotl has."""
    draft.loads_bf16 = True
    _unwritten(draft)
    for key, tracker in read_file("axolotl")["projects"].items():
        leaf = draft.file.leaves.get(key)
        if leaf is not None and leaf.value:
            if f"uses_{tracker}" in draft.facts:
                draft.drop(f"`{key}` turns the tracker on", f"uses_{tracker}")
            draft.facts[f"uses_{tracker}"] = (True, leaf)
    if draft.get("serves_metrics"):
        draft.put("report.prometheus", draft.get("metrics_port"), "metrics_port", "serves_metrics")
        draft.put("report.prometheus_address", draft.get("metrics_host"), "metrics_host")
    draft.drop("no metrics are served in axolotl", "serves_metrics", "metrics_port", "metrics_host")
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
    if draft.get("packing") and draft.value("task.name") in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        draft.note("packed samples do not attend to each other here; in axolotl, only flash attention isolates them.")
    is_chosen = draft.has("data.train_on")
    if draft.get("train_on_inputs") and not is_chosen and draft.value("task.name") in ("sft", "vision_language_sft"):
        draft.put("data.train_on", "all", "train_on_inputs")
        if any(str(draft.get(f"type.{position}", "chat_template")).startswith(_CHATS) for position in positions):
            draft.note(
                "`train_on_inputs` makes the contents of all turns targets in axolotl; here every token of the "
                "conversation is one, with the headers that the chat template writes before each turn."
            )
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", draft.get("window_rows", 10_000), "window_rows", "streaming")
    draft.drop("rows are not streamed", *(() if draft.has("data.train.stream") else ("streaming", "window_rows")))
    _adapters(draft)
    _tokens(draft)
    names = [name.rpartition(".")[2] for name in draft.get("plugins", [])]
    if unknown := [name for name in names if name not in read_file("axolotl")["plugins"]]:
        draft.refuse(
            f"`{unknown[0]}` has no counterpart: a plugin of ours may do it (docs/how-to/plugins.md).", "plugins"
        )
    elif "CutCrossEntropyPlugin" in names and draft.value("task.name") in ("sft", "pretrain", "vision_language_sft"):
        draft.put("train.loss_kernel", "cce", "plugins")
    draft.drop("their settings are converted or listed at their own keys", "plugins")


def _unwritten(draft: Draft) -> None:
    """Take back the defaults that do not hold next to the keys of the file, as axolotl's builders do."""
    if "warmup_steps" in draft.facts:
        draft.assumed.pop("warmup_ratio", None)
    elif "warmup_ratio" in draft.assumed:
        share, origin = draft.assumed["warmup_ratio"]
        limit, steps = read_defaults()["defaults"][_WARMUP]["warmup_steps_limit"], draft.get("max_steps", 0)
        if steps > 0:
            num_steps = min(int(share * steps), limit)
            draft.assumed["warmup_steps"] = (2 if num_steps == 1 else num_steps, f"{origin}, at most {limit} steps")
            del draft.assumed["warmup_ratio"]
        else:
            draft.assumed["warmup_ratio"] = (share, f"{origin}, at most {limit} steps")
            draft.note(
                f"the warmup is at most {limit} steps in axolotl, where none is written; here it is {share:.0%} of all."
            )
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
        draft.out_of_scope = f"rl: {rl}"
        draft.refuse("reinforcement learning is not a task here: use the Session API (docs/how-to/session.md).", "rl")
    if rl == "simpo" and "sft_weight" not in draft.facts:
        weight = read_defaults()["defaults"]["trl CPOConfig"]["cpo_alpha"]
        draft.assumed["sft_weight"] = (weight, f"trl {version_of('trl')}, CPOConfig: cpo_alpha: {weight}")
        draft.put("task.preference.sft_weight", weight, "sft_weight")
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
        draft.drop("it is off in axolotl, too", *own_loss)
    for key in (key for key in draft.file.leaves if key.startswith("diffusion.")):
        draft.out_of_scope = "a diffusion language model"
        draft.outcomes[key] = KeyOutcome(
            "not_possible", "diffusion is not a task here; `task.name: masked_lm` is nearest."
        )


def _source(draft: Draft, position: int, key: str) -> None:
    """Write the source of this position, with the format that its `type` stands for."""

    def get(name: str, default: Any = None) -> Any:
        return draft.get(f"{name}.{position}", default)

    task = draft.value("task.name")
    values = source_with_files(get("path"), get("data_files"), draft.file.path.parent)
    values |= {"config": get("config"), "revision": get("revision"), "split": get("split")}
    kind, _, style = str(get("type", "chat_template")).partition(".")
    if task == "pretrain":
        values |= {"format": "text", "columns": _renamed({"text": get("field", "text")})}
    elif task in ("preference", "reward"):
        values |= _answers(draft, position, kind, style)
    elif _is_prompt(draft, position):
        values |= {
            "format": "prompt_completion",
            "template": _prompt(draft, position, _INSTRUCTIONS.get((kind, style))),
        }
    elif kind == "jeopardy":
        values |= {"format": "prompt_completion", "template": dict(_JEOPARDY)}
    elif kind in _CHATS:
        values |= _chat(draft, position, is_sharegpt=kind.startswith("sharegpt"))
    else:
        advice = "write `format`, and `columns` or a `template` (`finetune preview` proposes them)."
        draft.refuse(advice, f"type.{position}")
    named = {name for name in (*_ROW_REASONS, *_NOT_OF_ROWS) if name not in _CHOICES or kind not in _CHATS}
    named -= {"drop_system"} if get("drop_system") else set()
    own = [name for name in draft.facts if name.endswith(f".{position}") and not name.startswith("test_")]
    facts = [name for name in own if name.partition(".")[0] not in named]
    put_source(draft, key, values, *(name for name in facts if not draft.is_named(name)))
    for name in ("train_on_eos", "train_on_eot"):
        if get(name, "turn") != "turn":
            draft.refuse("the end of each target turn is a target, and of no other.", f"{name}.{position}")
    draft.drop(_ROW_REASONS["train_on_eos"], f"train_on_eot.{position}")
    if get("split_thinking"):
        advice = "move it to `reasoning_content` of the turn, in the rows or with the source's `template`."
        draft.refuse(f"reasoning stays in the content: {advice}", f"split_thinking.{position}")
    draft.refuse(
        "write it in the source's `template`.", *(f"{name}.{position}" for name in ("type_keys", "row_system", "roles"))
    )
    draft.refuse("one template holds for all sources: write `data.chat_template`.", f"row_template.{position}")
    for name, reason in _ROW_REASONS.items():
        if not draft.is_named(f"{name}.{position}"):
            draft.drop(reason, f"{name}.{position}")


def _answers(draft: Draft, position: int, kind: str, style: str) -> dict[str, Any]:
    """Return format and columns of pairs, or of answers that are judged one by one."""

    def get(name: str) -> Any:
        return draft.get(f"{name}.{position}")

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
    return {"format": "judged" if is_judged else "preference", "columns": _renamed(columns)}


def _renamed(columns: dict[str, str | None]) -> dict[str, str]:
    return {name: yours for name, yours in columns.items() if yours not in (None, name)}


def _chat(draft: Draft, position: int, *, is_sharegpt: bool) -> dict[str, Any]:
    """Return format and columns of turns; a template where their keys, speakers or targets are not the usual ones."""

    def get(name: str, default: Any = None) -> Any:
        return draft.get(f"{name}.{position}", default)

    role, content = (
        get("role_key", "from" if is_sharegpt else "role"),
        get("content_key", "value" if is_sharegpt else "content"),
    )
    form = "conversations" if (role, content) == ("from", "value") else "messages"
    field = draft.facts.get(f"field_messages.{position}", ("conversations" if is_sharegpt else "messages",))[0]
    speakers = {name: target for target in ("assistant", "user", "system") for name in get(f"roles_{target}", ())}
    speakers = {**_USUAL, **{name: target for name, target in speakers.items() if name != target}}
    flag, trained = get("field_training"), {speakers.get(name, name) for name in get("roles_to_train")}
    draft.refuse("a turn is a target whole, or not at all.", f"training_detail.{position}")
    is_usual = (role, content) in (("role", "content"), ("from", "value")) and speakers == _USUAL
    has_choice = flag is not None or trained != {"assistant"}
    if is_usual and not has_choice and not get("drop_system"):
        return {"format": form, "columns": _renamed({form: field, "tools": get("field_tools")})}
    turns, speaker = f"row['{field}']", f"{speakers}.get(turn['{role}'], turn['{role}'])"
    turns += f" | rejectattr('{role}', 'equalto', 'system')" if get("drop_system") else ""
    parts = [f"role={speaker}", f"content=turn['{content}']"]
    if has_choice:
        weight = "true" if draft.get("train_on_inputs") else f"{speaker} in {sorted(trained)}"
        if flag is not None:
            weight = f"(turn['{flag}'] if turn['{flag}'] is defined and turn['{flag}'] is not none else {weight})"
        parts.append(f"weight=1 if {weight} else 0")
        used = () if not draft.get("train_on_inputs") else ("train_on_inputs",)
        draft.put("data.train_on", "per_message", *used, comment="turns that are targets in axolotl have `weight: 1`")
    others = f"turn.items() | rejectattr(0, 'in', {[role, content, *([flag] if flag else [])]})"
    turn = f"{{{{ ', ' if not loop.first }}}}{{{{ dict({others}, {', '.join(parts)}) | tojson }}}}"
    return {"format": "messages", "template": {"messages": f"[{{% for turn in {turns} %}}{turn}{{% endfor %}}]"}}


_USUAL = {"human": "user", "gpt": "assistant"}
_INPUT = "{% if input is defined and input %}"
_CHAT_TEXT = (
    f"SYSTEM: {ALPACA_ROWS['prompt'].partition('###')[0].rstrip()}\nUSER: {{{{ instruction }}}}\n"
    f"{_INPUT}{{{{ input }}}}\n{{% endif %}}ASSISTANT:"
)
_INSTRUCTIONS: dict[tuple[str, str], str] = {
    **dict.fromkeys((("alpaca", ""), ("alpaca_instruct", ""), ("alpaca", "load")), ALPACA_ROWS["prompt"]),
    ("alpaca_chat", ""): _CHAT_TEXT,
    (
        "alpaca_w_system",
        "",
    ): f"{_SYSTEM.replace('### System:', 'SYSTEM:').replace(':{{ ', ': {{ ')}{_CHAT_TEXT.partition(chr(10))[2]}",
    ("alpaca_w_system", "load_instruct"): f"{_SYSTEM}### {ALPACA_ROWS['prompt'].partition('### ')[2]}",
}
"""The prompts of types of one instruction with its answer."""


def _is_prompt(draft: Draft, position: int) -> bool:
    kind, _, style = str(draft.get(f"type.{position}", "chat_template")).partition(".")
    has_format = any(f"{name}.{position}" in draft.facts for name in ("prompt_format", "field_instruction"))
    return has_format or (kind, style) in _INSTRUCTIONS or kind == "jeopardy"


def _prompt(draft: Draft, position: int, prompt: str | None) -> dict[str, str]:
    """Return the prompt of the type, or of the file's own format, with the file's columns."""
    if prompt is None:
        written = _braces(draft.get(f"prompt_format.{position}", "{instruction} {input} "))
        short = _braces(draft.get(f"prompt_no_input.{position}", "{instruction} "))
        prompt = f"{_INPUT}{written}{{% else %}}{short}{{% endif %}}"
    completion = ALPACA_ROWS["completion"]
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
    prompts = [_is_prompt(draft, position) for position in positions] if task == "sft" else []
    if any(prompts) and all(prompts):
        draft.put("data.chat_template", "plain", comment="prompts are text in axolotl")
        draft.drop(
            "prompts of this type are text, which no chat template renders", "chat_template", "chat_template_jinja"
        )
        draft.note(
            "prompts of `type: alpaca` and the like are plain text in axolotl, and with `plain`. For a chat "
            "template, remove `data.chat_template`, and write `format: instruction` without `template`."
        )
        return
    if any(prompts):
        draft.note("the prompts of one source are plain text in axolotl; here the chat template renders all sources.")
    if jinja is not None and task != "pretrain":
        draft.files["chat_template.jinja"] = jinja
        draft.put("data.chat_template", "./chat_template.jinja", comment="written next to this file")
        draft.mapped("file chat_template.jinja", "chat_template", "chat_template_jinja")
    elif name in _TEMPLATES and task != "pretrain":
        draft.put("data.chat_template", _TEMPLATES[name], "chat_template")
    elif name and not name.startswith("tokenizer_default") and task != "pretrain":
        draft.note(f"`chat_template: {name}` is axolotl's own; here it is the tokenizer's: see `finetune preview`.")
    draft.drop("the tokenizer's own chat template is used: look with `finetune preview`", "chat_template")
    draft.drop("texts have no turns", "chat_template_jinja")


def _adapters(draft: Draft) -> None:
    if draft.get("all_linear"):
        draft.withdraw("model.lora.target_modules", KeyOutcome("not_needed", "`lora_target_linear` covers them"))
        draft.put("model.lora.target_modules", "all-linear", "all_linear")
    else:
        draft.drop("it is off in axolotl, too", "all_linear")
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
            draft.outcomes[key] = KeyOutcome("not_needed", "the tokenizer's own token is used")


def _finish(draft: Draft) -> None:
    """Write what happens to long rows."""
    is_text = draft.value("task.name") == "pretrain"
    draft.default("data.over_length", "split" if is_text else "drop", "as in axolotl")
    what = {"drop": "left out", "truncate": "truncated"}.get(str(draft.value("data.over_length")))
    if what is not None:
        draft.note(f"rows longer than `max_length` are {what} in axolotl, which logs a line; here they are counted.")


AXOLOTL = PeerTrainer(
    name="axolotl",
    prepare=_prepare,
    finish=_finish,
)
