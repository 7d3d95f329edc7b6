"""Every job file that the package ships loads, whole and without a key that has no effect."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

import finetune.recipes
from finetune.commands.init.init import make_recipe, recipes
from finetune.config.load import load_config, require_divisible_batch

FOLDER = Path(finetune.recipes.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def with_its_data(name: str, folder: Path) -> Path:
    """Return the recipe's job file in the folder, with a file of one row for each path that it reads."""
    job = make_recipe(name, folder)[0]
    data = YAML(typ="safe").load(job.read_text())["data"]
    for source in (data["train"], data["validation"]):
        if "path" in source and not (folder / source["path"]).exists():
            (folder / source["path"]).write_text('{"text": "a row"}\n')
    return job


def test_all_recipes_were_found():
    assert NAMES == [
        "distillation",
        "dpo",
        "embedding",
        "image-cifar10",
        "image-digits",
        "kto",
        "masked-lm",
        "orpo",
        "pretrain",
        "qlora",
        "quickstart",
        "quickstart-pretrained",
        "reranking",
        "reward",
        "seq2seq",
        "sft-full",
        "sft-jsonl",
        "sft-lora",
        "text-classification",
        "token-classification",
        "vision-language-sft",
    ]
    assert list(recipes()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads(tmp_path, name):
    config = load_config(with_its_data(name, tmp_path)).config
    assert Path(config.run.folder) == tmp_path / "runs" / name


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_shared_by_processes(tmp_path, name, world):
    loaded = load_config(with_its_data(name, tmp_path))
    require_divisible_batch(loaded, num_processes=world)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_documents_its_launch_command(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    (launch,) = [line for line in text.splitlines() if "accelerate launch" in line]
    strategy = launch.split("--config_file ")[1].split()[0]
    assert (Path(__file__).parents[1] / strategy).is_file()
