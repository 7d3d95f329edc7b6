"""Whatever makes an exported folder another model, or another tokenizer, is found by the process that loads it."""

import copy
import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import ExportError
from finetune.export import save
from finetune.export.save import Preprocessors, TextPreprocessor
from finetune.export.verify import verifier
from finetune.export.verify.rows import expected_tokens, logits_of, synthetic_rows
from finetune.export.verify.verifier import ExpectedOutputs, ExportVerifier, failed_folder, model_facts
from tests.export.conftest import FACTS, GATED, load_from, make_tokenizer, values_of
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.fixture
def verify(tmp_path, tokenizer):
    """Return a function that exports a model, lets the folder be damaged, and verifies it."""

    def export_and_verify(
        model, *, damage=lambda folder: None, merge=False, tokenizer=tokenizer, dtype_trained=None, **keys
    ):
        inputs = Preprocessors(TextPreprocessor(tokenizer, stop_ids(tokenizer)))
        section = ExportSection(merge=merge, **keys)
        rows = synthetic_rows(inputs, head="causal_lm")
        trained = model if dtype_trained is None else copy.deepcopy(model).to(getattr(torch, dtype_trained))
        logits = logits_of(trained, rows, device=CPU)
        how = {"model": model, "weights": values_of(model), "preprocessors": inputs, "facts": FACTS}
        with ExportVerifier(
            model_facts(model, head="causal_lm", merge=merge, trust_remote_code=False), num_threads=1
        ) as it:
            unmerged = None
            if merge and "dtype" in keys:
                unmerged = save.export_model(tmp_path / "unmerged", section=ExportSection(), **how).folder
            report = save.export_model(tmp_path / "final", section=section, **how)
            damage(report.folder)
            tokens = expected_tokens(tokenizer, ["amber violet", "2 + 2"], renders=lambda turns: True)
            expected = ExpectedOutputs(rows, logits, dtype_trained or "float32", tokens, inputs.text, unmerged)
            return it.check(report, expected)

    return export_and_verify


@pytest.mark.full
def test_the_verification_of_a_correct_export_lists_its_comparisons(verify, build, architecture_name, tmp_path):
    said = verify(build(architecture_name))
    assert said.startswith("verified in a fresh process in ") and "the same tokens for 203 texts" in said
    assert "logits of 4 rows within" in said
    assert (tmp_path / "final").is_dir() and not failed_folder(tmp_path / "final").exists()


def rewritten(name, change):
    """Return a damage that changes a JSON file."""

    def damage(folder):
        path = folder / name
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return damage


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def swapped(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, path, {"format": "pt"})


def nudged(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 1e-7
    save_file(tensors, path, {"format": "pt"})


def with_other_pre_tokenizer(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    backend.save(str(folder / "tokenizer.json"))


def without_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def tied(folder):
    """Leave the head out, as if it were the embeddings."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})
    rewritten("config.json", lambda values: values.update(tie_word_embeddings=True))(folder)


def set_theta(config):
    config["rope_parameters"]["rope_theta"] = 100.0


DAMAGES = {
    "a truncated shard": ("llama untied", truncated, "loading it failed: SafetensorError"),
    "two tensors swapped": (
        "llama untied",
        swapped,
        "2 of 21 tensors differ from the exported ones.*layers.0.self_attn.q_proj.weight",
    ),
    "one value of one tensor": (
        "llama untied",
        nudged,
        r"1 of 21 tensors .*layers.0.mlp.up_proj.weight \(other values",
    ),
    "weights tied that were not": (
        "llama untied",
        tied,
        r"tensors differ from the exported ones.*: lm_head.weight \(other values",
    ),
    "weights untied that were": (
        "qwen3 tied",
        rewritten("config.json", lambda values: values.update(tie_word_embeddings=False)),
        r"1 missing tensors: lm_head.weight",
    ),
    "another value in the config": (
        "llama untied",
        rewritten("config.json", set_theta),
        r"config.json: `rope_parameters.rope_theta` is 100.0 instead of 10000.0.*its logits differ from",
    ),
    "a stop id missing": (
        "llama untied",
        rewritten("generation_config.json", lambda values: values.update(eos_token_id=0)),
        r"generation_config.json: `eos_token_id` is 0 instead of \[0, 2\]",
    ),
    "another pre-tokenizer": (
        "llama untied",
        with_other_pre_tokenizer,
        r"differs from the tokenizer in training, .* texts:\n.*trained with \[.*loaded gives \[",
    ),
    "another chat template": ("llama untied", without_template, "the chat template renders"),
    "a value that no logit shows": (
        "llama untied",
        rewritten("config.json", lambda values: values.update(max_position_embeddings=16)),
        "config.json: `max_position_embeddings` is 16 instead of",
    ),
    "a truncated config": (
        "llama untied",
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        r"config.json is not a JSON object \(",
    ),
    "no generation config": (
        "llama untied",
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation_config.json is missing, although the export wrote it",
    ),
    "a file of another export": (
        "llama untied",
        lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b""),
        "model-00002-of-00002.safetensors is in the folder, although the export did not write it",
    ),
    "another card": (
        "llama untied",
        lambda folder: (folder / "README.md").write_text("# Another model\n"),
        "README.md has changed since the export wrote it",
    ),
}


ALWAYS = ("two tensors swapped", "another pre-tokenizer", "no generation config")
"""Of the damages, those that the quick tier looks for."""


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[] if each in ALWAYS else [pytest.mark.full]) for each in DAMAGES]
)
def test_a_damaged_export_is_reported_and_renamed(verify, build, tmp_path, what):
    name, damage, message = DAMAGES[what]
    with pytest.raises(ExportError, match=f"(?s){message}") as raised:
        verify(build(name), damage=damage)
    assert raised.value.exit_code == 1
    assert "final.failed; do not use it" in str(raised.value)
    assert not (tmp_path / "final").exists() and failed_folder(tmp_path / "final").is_dir()


def test_a_verification_that_hangs_is_killed_at_its_time_limit(verify, build, monkeypatch):
    monkeypatch.setattr(verifier, "_LIMIT_SECONDS", 0.2)
    hanging = lambda words, log: subprocess.Popen(["sleep", "300"], stdin=subprocess.PIPE)  # noqa: E731
    monkeypatch.setattr(verifier, "start_program", hanging)
    with refused(ExportError, "0 minutes"):
        verify(build("llama untied"))


def test_a_folder_whose_process_is_killed_is_not_called_another_model(verify, build, monkeypatch):
    killed = lambda words, log: subprocess.Popen(["sh", "-c", "kill -9 $$"], stdin=subprocess.PIPE)  # noqa: E731
    monkeypatch.setattr(verifier, "start_program", killed)
    with refused(ExportError, "signal 9") as raised:
        verify(build("llama untied"))
    assert "differs from the trained model" not in str(raised.value)


def without_merge(merges):
    del merges[-1]


def swap_merges(merges):
    merges[-1], merges[-2] = merges[-2], merges[-1]


@pytest.mark.parametrize("change", [without_merge, swap_merges])
def test_a_merge_rule_that_no_text_needs_is_missed(verify, change):
    tokenizer = make_tokenizer(["zyzzyva qoph zyzzyva qoph"])
    sizes = FromConfigSection(model_type="llama", values=GATED)
    model = load_from(ModelSection(from_config=sizes), vocabulary_size=len(tokenizer))
    damage = rewritten("tokenizer.json", lambda values: change(values["model"]["merges"]))
    with refused(ExportError, "tokenizer.json: `model.merges`", varies=True):
        verify(model, damage=damage, tokenizer=tokenizer)


@pytest.fixture
def deep_mixture():
    """Return a mixture of experts that amplifies the roundings of bfloat16 far beyond the usual limit."""
    sizes = {"num_hidden_layers": 6, "num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.4}
    values = {**GATED, "hidden_size": 64, **sizes}
    return load_from(ModelSection(from_config=FromConfigSection(model_type="granitemoe", values=values)))


def test_the_tolerance_of_a_model_that_amplifies_rounding_is_its_own_rounding_error(verify, deep_mixture):
    said = verify(deep_mixture, dtype_trained="bfloat16")
    distance = float(re.search(r"logits of 4 rows within (\S+),", said)[1])
    assert distance > 3e-2 * 7**0.5
    assert "was allowed, twice the effect of rounding" in said


@pytest.mark.full
def test_a_wrong_value_exceeds_the_tolerance_of_rounding(verify, deep_mixture):
    damage = rewritten("config.json", lambda values: values.update(logits_scaling=8.0))
    with refused(ExportError, "config.json: `logits_scaling` is 8.0 instead of 1.0", varies=True):
        verify(deep_mixture, dtype_trained="bfloat16", damage=damage)


@pytest.fixture
def mixture():
    """Return a mixture of experts with an adapter on its experts that does something."""
    values = {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = load_from(ModelSection(from_config=FromConfigSection(model_type="mixtral", values=values)))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted.eval()


@pytest.fixture
def merge_without_one_expert(monkeypatch):
    """Have a merge leave out the adapter of one expert of one layer."""
    right = save.merging.merge

    def merge(model, weights, *, dtype):
        merged = right(model, weights, dtype=dtype)
        name = "model.layers.1.mlp.experts.down_proj"
        base = next(
            value for key, value in weights.items() if key.endswith("layers.1.mlp.experts.base_layer.down_proj")
        )
        found = dict(merged.weights)
        found[name] = found[name].clone()
        found[name][2] = base[2].to(found[name].dtype)
        return replace(merged, weights=found)

    monkeypatch.setattr(save.merging, "merge", merge)


def test_a_merge_that_lacks_the_adapter_of_one_expert_is_found(verify, mixture, merge_without_one_expert):
    with refused(ExportError, "(merging", varies=True):
        verify(mixture, merge=True)


@pytest.mark.full
def test_rounding_does_not_hide_a_merge_without_the_adapter_of_one_expert(verify, mixture, merge_without_one_expert):
    with refused(ExportError, "layers.1.mlp.experts.down_proj", varies=True):
        verify(mixture, merge=True, dtype="bfloat16")


PARENT = """
import subprocess, sys
from finetune.export.verify.verifier import start_program

program = start_program([], log=2)
# holds the pipe open, so that the program does not end because its input does
command = [sys.executable, "-c", "import time; time.sleep(600)"]
holder = subprocess.Popen(command, stdout=2, pass_fds=[program.stdin.fileno()])
print(program.pid, holder.pid, flush=True)
program.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports a parent's death")
def test_the_program_is_killed_with_the_process_that_verifies(tmp_path):
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=log, text=True) as parent,
    ):
        program, holder = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
        while not any("libtorch" in file.path for file in program.memory_maps()):  # past its first lines
            assert program.is_running() and program.status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        assert holder.is_running()
        parent.kill()
    _, alive = psutil.wait_procs([program], timeout=30)
    assert holder.is_running()
    holder.kill()
    for process in alive:
        process.kill()
    assert alive == []
