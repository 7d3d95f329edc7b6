"""`export.merge`: a trained adapter, in a whole model that plain transformers loads."""

import json
from pathlib import Path

from safetensors import safe_open

from tests.task_cases.case import LORA, Case
from tests.task_cases.language import SFT, conversations, loss_of_answers

MERGED = (*LORA, "export.merge=true")
TIED = ("model.lora={rank: 4, alpha: 8.0, dora: true, modules_to_save: [lm_head]}", "export.merge=true")


def loss_without_peft(final: Path, folder: Path) -> float:
    """Return the loss of a folder in which nothing is left of an adapter, and whose config tells of its ties."""
    left = [path.name for path in final.iterdir() if "adapter" in path.name or path.is_dir()]
    assert left == [], f"{left} are in a merged model's folder"
    config = json.loads((final / "config.json").read_text())
    with safe_open(final / "model.safetensors", framework="pt") as file:
        has_own_head = "lm_head.weight" in file.keys()  # noqa: SIM118  # not a dict
    assert config["tie_word_embeddings"] is not has_own_head
    return loss_of_answers(final, folder)


NO_PARTED_TIES = (
    "Accelerate ties weights again by the base's names, and peft's wrapper has changed them (fsdp2_prepare_model of "
    "accelerate 1.15)"
)

CASES = (
    Case(
        "merging",
        SFT,
        conversations,
        "loss",
        loss_without_peft,
        variants={"merged": MERGED, "parted": TIED},
        exempt={("parted", "fsdp2"): NO_PARTED_TIES},
    ),
)
