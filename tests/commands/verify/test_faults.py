"""Faults that servers have been seen to have, each planted in the server's copy of the folder."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.serving_folders import TEXTS, make_tokenizer

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor] | None]


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(path: Path, change: Change) -> None:
    """Write the tensors as changed in place, or those that are returned."""
    tensors = load_file(path)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    changed = dict(change(tensors) or tensors)
    assert changed.keys() != before.keys() or any(not torch.equal(changed[name], before[name]) for name in before)
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path, metadata={"format": "pt"})


def edit_adapter(folder: Path, change: Change) -> None:
    edit_tensors(folder / "adapter_model.safetensors", change)


def drop_experts(folder: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "experts" in name and "lora_B" in name:
                tensors[name].zero_()

    edit_adapter(folder, drop)


def transpose_experts(folder: Path) -> None:
    """Read ranks of experts in the other order: [experts x rank] rows as [rank x experts]."""

    def transpose(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "experts" in name and "lora_A" in name:
                tensors[name] = tensor.reshape(4, -1, tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)

    edit_adapter(folder, transpose)


def ignore_head(folder: Path) -> None:
    def ignore(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.lm_head.lora_B.weight"].zero_()

    edit_adapter(folder, ignore)


def cut_rank(folder: Path) -> None:
    """Keep half of the ranks of attention, as a server with a limit below the adapter's rank might."""

    def cut(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "self_attn" in name and "lora_A" in name:
                tensor[len(tensor) // 2 :] = 0

    edit_adapter(folder, cut)


def lose_saved_modules(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", modules_to_save=None)
    edit_adapter(folder, lambda tensors: {name: each for name, each in tensors.items() if "embed_tokens" not in name})


def use_other_template(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<|im_start|>", "<|im_start|> "))


def add_second_bos(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + template)


def lose_end_of_turn(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=0)


def scale_positions_otherwise(folder: Path) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def untie_head(folder: Path) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        embeddings = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embeddings + 0.01 * torch.randn_like(embeddings)

    torch.manual_seed(2)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    edit_tensors(folder / "model.safetensors", untie)


def take_stale_tokenizer(folder: Path) -> None:
    """Take a tokenizer that was trained before one of the texts was added."""
    stale = make_tokenizer(texts=TEXTS[:3])
    stale.save_pretrained(folder)


def quantize_weights(folder: Path) -> None:
    """Round every matrix to 8 bits, as a merge into a quantized base does."""

    def quantize(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.dim() == 2:
                scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
                tensor.copy_((tensor / scale).round() * scale)

    edit_tensors(folder / "model.safetensors", quantize)


def change_nothing(folder: Path) -> None:
    """The server itself computes in another dtype."""


FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "an adapter of experts that is dropped": ("adapter", drop_experts, "log-probabilities differ"),
    "an adapter of experts that is transposed": ("adapter", transpose_experts, "log-probabilities differ"),
    "an adapter of the head that is ignored": ("adapter", ignore_head, "log-probabilities differ"),
    "a rank above the server's limit": ("adapter", cut_rank, "log-probabilities differ"),
    "modules_to_save that are lost": ("adapter", lose_saved_modules, "log-probabilities differ"),
    "another template": ("full", use_other_template, "prompts differently"),
    "two BOS": ("full", add_second_bos, "prompts differently"),
    "a missing EOS": ("full", lose_end_of_turn, "does not end at <|im_end|> (2)"),
    "other scaled positions": ("full", scale_positions_otherwise, "log-probabilities differ"),
    "an untied head": ("full", untie_head, "log-probabilities differ"),
    "another dtype": ("full", change_nothing, "lower precision"),
    "a stale tokenizer": ("full", take_stale_tokenizer, "texts differently"),
    "a quantized merge": ("full", quantize_weights, "log-probabilities differ"),
}
"""The folder, the change of the server's copy, and what the problem says."""


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_reported(name, request, tmp_path, verify):
    folder, plant, expected = FAULTS[name]
    original = request.getfixturevalue(folder)
    copy = shutil.copytree(original, tmp_path / "served")
    plant(copy)
    dtype = torch.bfloat16 if plant is change_nothing else torch.float32
    comparison = verify(original, served=copy, dtype=dtype)
    assert expected in "\n".join(comparison.problems)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_an_adapter_that_is_not_applied_is_named(name, adapter, tmp_path, verify):
    copy = shutil.copytree(adapter, tmp_path / "served")

    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.zero_() if "lora_B" in name else tensor for name, tensor in tensors.items()}

    lose_saved_modules(copy)
    edit_adapter(copy, drop)
    comparison = verify(adapter, served=copy, dtype=getattr(torch, name), expected_dtype=name)
    assert comparison.measurements["effect of training"]["served part"] == pytest.approx(0, abs=0.05)
    assert "of what training changed: the adapter is not applied." in "\n".join(comparison.problems)


def test_an_adapter_of_experts_served_in_bfloat16_has_no_problem(adapter, verify):
    comparison = verify(adapter, dtype=torch.bfloat16, expected_dtype="bfloat16")
    assert comparison.problems == []
    assert comparison.measurements["effect of training"]["served part"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("folder", "faults"), [("adapter", 5), ("full", 8)])
def test_the_clean_folder_of_the_faults_has_no_problem(folder, faults, request, verify):
    assert sum(each == folder for each, _, _ in FAULTS.values()) == faults
    comparison = verify(request.getfixturevalue(folder))
    assert (comparison.problems, comparison.not_compared) == (
        [],
        [] if folder == "adapter" else ["the effect of training (give the base model's folder with --base)"],
    )
