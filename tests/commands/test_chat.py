import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from finetune.commands.chat import chat, load_chat_model
from finetune.data.templates.chat_template import set_chat_template, tokenize
from finetune.data.templates.rendering import render_chat
from finetune.errors import UserError
from finetune.model.generation import SamplingParams
from finetune.model.loading.saved import inspect_model_folder
from finetune.model.processing import train_or_load_tokenizer
from tests.small_models import SMALL


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = ["say moon", "say star", "moon and star"] * 20
    folder = tmp_path_factory.mktemp("cache")
    tokenizer = train_or_load_tokenizer(lambda: texts, vocabulary_size=300, cache_folder=folder, log=lambda _: None)
    set_chat_template(tokenizer, "chatml")
    return tokenizer


def small_llama(tokenizer, *, max_position_embeddings=96):
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SMALL, "num_hidden_layers": 1, "num_attention_heads": 2},
        vocab_size=len(tokenizer),
        max_position_embeddings=max_position_embeddings,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def final(tmp_path_factory, tokenizer):
    """Return a run's `final/` whose model is trained to answer `moon` to `say moon`, and `star` to `say star`."""
    model = small_llama(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        for word in ("moon", "star"):
            turns = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
            prompt = tokenize(tokenizer, render_chat(tokenizer, turns[:1], add_generation_prompt=True).text)
            tokens = torch.tensor([tokenize(tokenizer, render_chat(tokenizer, turns).text)])
            labels = tokens.clone()
            labels[:, : len(prompt)] = -100
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("run") / "final"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_piped_lines_are_answered_each_on_its_own(final, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("say moon\n\nsay star\nsay moon\n"))
    chat(final)
    assert capsys.readouterr().out.split() == ["moon", "star", "moon"]


def speaker_of(folder):
    saved = inspect_model_folder(folder, key="chat")
    return load_chat_model(saved, SamplingParams(256), adapters={}, trust_remote_code=False)


def test_a_conversation_longer_than_the_model_forgets_its_oldest_turns(final, capsys):
    old = [{"role": "user", "content": "say moon"}, {"role": "assistant", "content": "moon"}] * 20
    assert speaker_of(final).answer([*old, {"role": "user", "content": "say star"}])


def adapter(final, folder, *, is_contrary):
    """Save an adapter on the model; it does nothing, or makes the unlikeliest token the likeliest."""
    base = LlamaForCausalLM.from_pretrained(final)
    base.name_or_path = str(final)
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    adapted = get_peft_model(base, config)
    if is_contrary:
        with torch.no_grad():
            adapted.get_base_model().lm_head.modules_to_save["default"].weight.neg_()
    adapted.save_pretrained(folder)


def test_an_adapter_is_loaded_on_its_base(final, tmp_path, tokenizer):
    adapter(final, tmp_path, is_contrary=False)
    tokenizer.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    speaker = speaker_of(tmp_path)  # a new adapter changes nothing
    assert any("lora" in name for name, _ in speaker.model.named_parameters())
    assert speaker.answer([{"role": "user", "content": "say star"}]) == "star"


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match="contains no model"):
        chat(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        chat(tmp_path / "nothing")


def test_a_broken_model_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        chat(tmp_path)


def test_a_terminal_conversation_continues_until_it_is_cleared(final, monkeypatch, capsys):
    terminal = io.StringIO("say moon\nsay star\n/clear\nsay star\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    asked = []
    monkeypatch.setattr(
        "finetune.commands.chat.ChatModel.answer", lambda _, turns: asked.append(list(turns)) or "an answer"
    )
    chat(final)
    assert [len(turns) for turns in asked] == [1, 3, 1]
    assert asked[1][1] == {"role": "assistant", "content": "an answer"}
    assert "`exit` exits, `/clear` starts a new conversation" in capsys.readouterr().out


@pytest.fixture
def said(final, tmp_path, monkeypatch, capsys):
    """Return a function that talks to the model with adapters `still`, which does nothing, and `loud`."""
    adapter(final, tmp_path / "still", is_contrary=False)
    adapter(final, tmp_path / "loud", is_contrary=True)
    folders = [f"{name}={tmp_path / name}" for name in ("still", "loud")]

    def talk(*lines, is_terminal=True, **keys):
        typed = io.StringIO("".join(f"{line}\n" for line in lines))
        typed.isatty = lambda: is_terminal
        monkeypatch.setattr("sys.stdin", typed)
        chat(final, adapters=folders, max_new_tokens=4, **keys)
        return capsys.readouterr().out.removeprefix("`exit` ends").replace("> ", "").splitlines()[int(is_terminal) :]

    return talk


def test_adapters_are_switched_while_the_base_stays(said):
    lines = ("say moon", "/adapter loud", "/clear", "say moon", "/adapter base", "/clear", "say moon")
    first, loud, none, missing, again = said(*lines, "/adapter shy", "/adapter still", "/clear", "say star")
    assert (first, none, again) == ("moon", "moon", "star")
    assert loud != "moon"
    assert missing == "/adapter shy: no such adapter is loaded. Loaded: base, still, loud."


def test_piped_lines_that_are_not_commands_are_questions(said, monkeypatch):
    asked = []
    monkeypatch.setattr("finetune.commands.chat.ChatModel.answer", lambda _, turns: asked.append(list(turns)) or "")
    said("/usr/bin is what?", "/adapter base", "say star", is_terminal=False, system="Be brief.")
    assert [[turn["content"] for turn in turns] for turns in asked] == [
        ["Be brief.", "/usr/bin is what?"],
        ["Be brief.", "say star"],
    ]
    with pytest.raises(UserError, match="no such adapter"):
        said("/adapter shy", is_terminal=False)


def test_sampled_answers_differ_from_greedy_ones_and_are_reproducible(said):
    hot = [said("say moon", "say star", temperature=50.0) for _ in range(2)]
    assert hot[0] == hot[1] != ["moon", "star"]


@pytest.mark.parametrize("written", ["loud", "=here", "loud=", "v1.0=here", "base=here"])
def test_an_adapter_without_name_or_folder_is_refused(final, written):
    with pytest.raises(UserError, match="write NAME=FOLDER"):
        chat(final, adapters=[written])


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_chat_rejects_models_without_generation(tmp_path, tokenizer, kind):
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="_classification` model does not generate text"):
        chat(tmp_path)
