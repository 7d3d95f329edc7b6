import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.advise.chat import chat, load_speaker
from finetune.data.encoding.chat import set_chat_template, stop_ids, tokenize
from finetune.data.encoding.rendering import render
from finetune.errors import UserError
from finetune.model.byte_pairs import trained_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = ["say moon", "say star", "moon and star"] * 20
    folder = tmp_path_factory.mktemp("cache")
    tokenizer = trained_tokenizer(lambda: texts, vocabulary_size=300, cache_folder=folder, say=lambda _: None)
    set_chat_template(tokenizer, "chatml")
    return tokenizer


def small_llama(tokenizer, *, max_position_embeddings=96):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=max_position_embeddings,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def final(tmp_path_factory, tokenizer):
    """Return a run's `final/` whose model has learnt to answer `moon` to `say moon`, and `star` to `say star`."""
    model = small_llama(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        for word in ("moon", "star"):
            turns = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
            prompt = tokenize(tokenizer, render(tokenizer, turns[:1], with_answer_cue=True).text)
            tokens = torch.tensor([tokenize(tokenizer, render(tokenizer, turns).text)])
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


def test_exit_ends(final, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("say star\nexit\nsay moon\n"))
    chat(final)
    assert capsys.readouterr().out.split() == ["star"]


def test_the_run_folder_serves_as_well(final):
    assert load_speaker(final.parent).answer([{"role": "user", "content": "say star"}]) == "star"


def test_an_answer_ends_with_the_templates_end_of_turn(final, tokenizer):
    speaker = load_speaker(final)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_ids(speaker.tokenizer)
    assert speaker.answer([{"role": "user", "content": "say moon"}]) == "moon"


def test_a_conversation_longer_than_the_model_forgets_its_oldest_turns(final, capsys):
    old = [{"role": "user", "content": "say moon"}, {"role": "assistant", "content": "moon"}] * 20
    assert load_speaker(final).answer([*old, {"role": "user", "content": "say star"}])


def test_an_adapter_is_loaded_on_its_base(final, tmp_path, tokenizer):
    base = LlamaForCausalLM.from_pretrained(final)
    base.name_or_path = str(final)
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    speaker = load_speaker(tmp_path)  # a new adapter changes nothing
    assert any("lora" in name for name, _ in speaker.model.named_parameters())
    assert speaker.answer([{"role": "user", "content": "say star"}]) == "star"


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no model"):
        chat(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        chat(tmp_path / "nothing")


def test_a_broken_model_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        chat(tmp_path)


def test_at_a_terminal_the_conversation_goes_on_until_it_is_cleared(final, monkeypatch, capsys):
    terminal = io.StringIO("say moon\nsay star\nclear\nsay star\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    asked = []
    monkeypatch.setattr(
        "finetune.advise.chat.Speaker.answer", lambda _, turns: asked.append(list(turns)) or "an answer"
    )
    chat(final)
    assert [len(turns) for turns in asked] == [1, 3, 1]
    assert asked[1][1] == {"role": "assistant", "content": "an answer"}
    assert "`exit` ends, `clear` begins a new conversation." in capsys.readouterr().out
