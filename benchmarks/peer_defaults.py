"""Reads what the keys of other trainers' configs are when they are not written, from the trainers' own packages.

    python benchmarks/peer_defaults.py             # writes finetune/migration/defaults.json
    python benchmarks/peer_defaults.py --compare   # prints what is another in the newest release of each package

`finetune init --from` reads the table. Each package is downloaded with `pip download --no-deps` into a folder, unpacked
and parsed; none is imported. A default that is not a literal (`field(default_factory=make)`) is `null`, as a key
without a default is: what follows from others there stands in `finetune/migration/peers/`.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "finetune" / "migration" / "defaults.json"
CACHE = Path.home() / ".cache" / "finetune" / "peers"
VERSIONS = {
    "axolotl": "0.19.0",
    "llamafactory": "0.9.5",
    "torch": "2.13.0",
    "torchtune": "0.6.1",
    "transformers": "5.24.0",
    "trl": "1.16.0",
}


@dataclass(frozen=True)
class Group:
    """Keys with their defaults: a class of a package and its bases, a function's arguments, or calls of `.get`."""

    package: str
    files: tuple[str, ...]  # globs; classes and constants are looked up in them
    name: str  # of the class or the function; "get" for calls of `.get(KEY, DEFAULT)`
    prefix: str = ""
    """What stands before these keys in a config: `datasets[].`"""


_AXOLOTL = ("axolotl/utils/schemas/*.py", "axolotl/integrations/*/args.py")
_TRL = ("trl/trainer/*_config.py", "trl/scripts/utils.py", "trl/experimental/*/*_config.py")
_TUNE = ("torchtune/datasets/*.py", "torchtune/datasets/multimodal/*.py")
GROUPS = (
    *(Group("transformers", ("transformers/training_args*.py", "transformers/trainer_utils.py"), "TrainingArguments"),),
    Group("axolotl", _AXOLOTL, "AxolotlInputConfig"),
    Group("axolotl", _AXOLOTL, "LigerArgs"),
    Group("axolotl", _AXOLOTL, "CutCrossEntropyArgs"),
    Group("axolotl", _AXOLOTL, "SFTDataset", "datasets[]."),
    Group("axolotl", _AXOLOTL, "UserDefinedPrompterType", "datasets[].type."),
    Group("axolotl", _AXOLOTL, "UserDefinedDPOType", "datasets[].type."),
    Group("axolotl", _AXOLOTL, "UserDefinedKTOType", "datasets[].type."),
    Group("axolotl", _AXOLOTL, "PretrainingDataset", "pretraining_dataset[]."),
    Group("axolotl", ("axolotl/prompt_strategies/chat_template.py",), "get", "datasets[]."),
    Group("axolotl", ("axolotl/core/builders/base.py",), "_configure_save_and_eval_strategy"),
    Group("axolotl", ("axolotl/core/builders/base.py",), "_configure_warmup_and_logging"),
    *(Group("llamafactory", ("llamafactory/hparams/*.py",), f"{name}Arguments") for name in ("Model", "Data")),
    *(Group("llamafactory", ("llamafactory/hparams/*.py",), f"{name}Arguments") for name in ("Finetuning", "Training")),
    Group("llamafactory", ("llamafactory/hparams/*.py",), "GeneratingArguments"),
    *(Group("trl", _TRL, name) for name in ("ScriptArguments", "DatasetMixtureConfig", "ModelConfig")),
    Group("trl", _TRL, "DatasetConfig", "datasets[]."),
    *(Group("trl", _TRL, f"{name}Config") for name in ("SFT", "DPO", "KTO", "Reward", "GKD", "ORPO", "CPO")),
    Group("torchtune", ("recipes/*_finetune_*.py", "recipes/*_dpo_*.py", "recipes/knowledge_distillation_*.py"), "get"),
    Group("torchtune", ("torchtune/models/llama3_1/_model_builders.py",), "lora_llama3_1_8b", "model."),
    Group("torchtune", ("torchtune/models/llama3_2_vision/*.py",), "lora_llama3_2_vision_11b", "model."),
    Group("torchtune", ("torchtune/training/lr_schedulers.py",), "get_cosine_schedule_with_warmup", "lr_scheduler."),
    Group("torchtune", ("torchtune/training/_profiler.py",), "setup_torch_profiler", "profiler."),
    *(
        Group("torchtune", ("torchtune/rlhf/loss/dpo.py",), f"{name}.__init__", "loss.")
        for name in ("DPOLoss", "RSOLoss")
    ),
    *(
        Group("torchtune", _TUNE, name, "dataset.")
        for name in (
            *("alpaca_dataset", "alpaca_cleaned_dataset", "instruct_dataset", "grammar_dataset", "samsum_dataset"),
            *("chat_dataset", "multimodal_chat_dataset", "slimorca_dataset", "llava_instruct_dataset"),
            *("the_cauldron_dataset", "text_completion_dataset", "wikitext_dataset"),
            *("cnn_dailymail_articles_dataset", "preference_dataset", "hh_rlhf_helpful_dataset"),
            "stack_exchange_paired_dataset",
        )
    ),
    Group("torch", ("torch/optim/adamw.py",), "AdamW.__init__", "optimizer."),
)


def unpacked(package: str, version: str | None, cache: Path = CACHE) -> Path:
    """Return the folder of an unpacked release, the newest where no version is given; downloaded where it is missing.

    Raises CalledProcessError where pip cannot download it.
    """
    folder = cache / package / (version or "newest")
    if version is None or not any(folder.glob("*")):
        folder.mkdir(parents=True, exist_ok=True)
        requirement = package if version is None else f"{package}=={version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement, "--dest", str(folder)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    archive = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime)
    into = folder / archive.stem
    if not into.is_dir():
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(into)
        else:
            with tarfile.open(archive) as sources:
                sources.extractall(into, filter="data")
    return into


def source_folder(package: str, version: str | None, cache: Path = CACHE) -> tuple[Path, str]:
    """Return the folder with the package's sources and its version: the installed one where it is that version."""
    for entry in map(Path, sys.path):
        if version is not None and (entry / f"{package}-{version}.dist-info").is_dir():
            return entry, version
    folder = unpacked(package, version, cache)
    found = re.match(r"[^-]+-([^-]+?)(?:-py|-cp|\.tar|$)", folder.name)
    return folder, version or (found[1] if found else "unknown")


@dataclass(frozen=True)
class Sources:
    """The parsed files of a group."""

    trees: Sequence[ast.Module]

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the defaults of a class with its bases, a function, or of calls of `.get`; raises KeyError."""
        if name == "get":
            return dict(self._gets())
        owner, _, method = name.rpartition(".")
        for tree in self.trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == (owner or name):
                    bodies = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == method]
                    return self._arguments(bodies[0]) if owner else self._fields(node)
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    is_builder = name.startswith("_configure_")
                    return dict(_fallbacks(node)) if is_builder else self._arguments(node)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    call = node.value
                    if not isinstance(call, ast.Call):
                        continue  # another name of a class
                    given = {part.arg: self._value(part.value) for part in call.keywords if part.arg}
                    return self.defaults(ast.unparse(call.args[0])) | given
        raise KeyError(name)

    def _fields(self, node: ast.ClassDef) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for base in reversed(node.bases):
            try:
                found |= self.defaults(ast.unparse(base).rpartition(".")[2])
            except KeyError:
                continue  # of another package
        for item in node.body:
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and item.target.id != "model_config"
            ):
                names = [item.target.id]
                if isinstance(item.value, ast.Call):
                    names += [self._value(part.value) for part in item.value.keywords if part.arg == "alias"]
                found |= dict.fromkeys(names, self._value(item.value))
        return found

    def _arguments(self, node: ast.FunctionDef) -> dict[str, Any]:
        named = [*node.args.posonlyargs, *node.args.args]
        values = [None] * (len(named) - len(node.args.defaults)) + [self._value(value) for value in node.args.defaults]
        found = {argument.arg: value for argument, value in zip(named, values, strict=True)}
        found |= {
            argument.arg: self._value(value)
            for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        }
        return {name: value for name, value in found.items() if name not in ("self", "tokenizer", "model_transform")}

    def _gets(self) -> Iterator[tuple[str, Any]]:
        for tree in self.trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                    owner = ast.unparse(node.func.value)
                    key = self._value(node.args[0]) if node.args else None
                    if owner in ("cfg", "ds_cfg", "dataset_config") and isinstance(key, str):
                        yield key, self._value(node.args[1]) if len(node.args) > 1 else None

    def _value(self, node: ast.expr | None) -> Any:
        """Return a literal, also of `field(default=...)`, a member of an enumeration or a constant; else None."""
        if isinstance(node, ast.Call):
            for part in node.keywords:
                if part.arg == "default":
                    return self._value(part.value)
                if part.arg == "default_factory":
                    if isinstance(part.value, ast.Lambda):
                        return self._value(part.value.body)
                    return {"list": [], "dict": {}}.get(ast.unparse(part.value))
            is_field = ast.unparse(node.func) == "Field" and node.args
            return self._value(node.args[0]) if is_field else None
        if isinstance(node, ast.Attribute | ast.Name):
            return self._constant(ast.unparse(node).removesuffix(".value"))
        try:
            value = ast.literal_eval(node) if node is not None else None
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError):
            return None
        return list(value) if isinstance(value, tuple) else None if value is ... else value

    def _constant(self, name: str) -> Any:
        owner, _, member = name.rpartition(".")
        for tree in self.trees:
            for node in tree.body if not owner else ast.walk(tree):
                body = (
                    node.body if isinstance(node, ast.ClassDef) and node.name == owner else [node] if not owner else []
                )
                for item in body:
                    if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == member:
                        return self._value(item.value)
        return None


def _fallbacks(node: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Yield what a builder assigns where the config has nothing: `x if self.cfg.x else 4`, a literal, `min(...)`."""
    for item in ast.walk(node):
        if not isinstance(item, ast.Assign):
            continue
        target, value = item.targets[0], item.value
        key = (
            target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else None
        )
        if isinstance(value, ast.IfExp) and isinstance(value.orelse, ast.Constant):
            yield str(key), value.orelse.value
        elif key == "save_strategy" and isinstance(value, ast.Constant):
            yield key, value.value  # the last is that of the last `else`
        elif ast.unparse(target) == "warmup_steps" and isinstance(value, ast.Call) and ast.unparse(value.func) == "min":
            share = next(part for part in ast.walk(value.args[0]) if isinstance(part, ast.Constant))
            yield "warmup_ratio", share.value
            yield "warmup_steps_limit", ast.literal_eval(value.args[1])


def read_table(versions: Mapping[str, str | None], cache: Path = CACHE) -> dict[str, Any]:
    """Return the table of the packages in these versions; a version of None is the newest."""
    folders = {package: source_folder(package, version, cache) for package, version in versions.items()}
    groups: dict[str, Any] = {}
    for group in GROUPS:
        if group.package in folders:
            files = [file for pattern in group.files for file in sorted(folders[group.package][0].glob(pattern))]
            trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
            found = Sources(trees).defaults(group.name)
            groups[group_name(group)] = {f"{group.prefix}{key}": found[key] for key in sorted(found)}
    return {"versions": {package: version for package, (_, version) in folders.items()}, "defaults": groups}


def group_name(group: Group) -> str:
    """Return the name of a group in the table: the package and the class or function."""
    where = Path(group.files[0]).parts[0 if group.files[0].startswith("recipes") else -1].removesuffix(".py")
    return f"{group.package} {where if group.name == 'get' else group.name.removesuffix('.__init__')}"


def format_table(table: Mapping[str, Any]) -> str:
    """Return the table as JSON with as many keys on a line as fit."""
    groups = []
    for name, defaults in table["defaults"].items():
        pairs = ", ".join(
            f"{json.dumps(key)}:\0{json.dumps(value).replace(' ', chr(0))}" for key, value in defaults.items()
        )
        lines = textwrap.wrap(pairs, 116, break_long_words=False, break_on_hyphens=False)
        groups.append(f"  {json.dumps(name)}: {{\n   " + "\n   ".join(lines).replace("\0", " ") + "\n  }")
    return f'{{\n "versions": {json.dumps(table["versions"])},\n "defaults": {{\n' + ",\n".join(groups) + "\n }\n}\n"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key whose default is another in the new table, or that only one of them has."""
    for name, defaults in new["defaults"].items():
        before = old["defaults"].get(name, {})
        for key in sorted({*before, *defaults}):
            if key not in before or key not in defaults or before[key] != defaults[key]:
                values = [json.dumps(group[key]) if key in group else "absent" for group in (before, defaults)]
                yield f"{name}: {key}: {values[0]} in the table, {values[1]} in the package"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="compare with the newest releases; write nothing")
    options = parser.parse_args()
    if not options.compare:
        TABLE.write_text(format_table(read_table(VERSIONS)), encoding="utf-8")
        return
    old = json.loads(TABLE.read_text(encoding="utf-8"))
    for package, version in old["versions"].items():
        new = read_table({package: None})
        print(f"{package}: {version} in the table, {new['versions'][package]} is the newest")
        for line in differences(old, new):
            print(f"  {line}")


if __name__ == "__main__":
    main()
