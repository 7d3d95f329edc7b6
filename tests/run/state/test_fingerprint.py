from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import check_changes
from finetune.config.load import load_config
from finetune.data.token_cache.store import CACHE_VERSION
from finetune.errors import CheckpointError
from finetune.model.processing import Processing
from finetune.run.state.resume import make_fingerprint
from finetune.task.protocol import Precomputed
from tests.refusals import refused


def training_data(*, words=("a", "b"), rows="f1", precomputed=None):
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    return SimpleNamespace(
        processing=Processing(tokenizer),
        task=SimpleNamespace(precomputed=precomputed, samples=SimpleNamespace(identity={})),
        training=SimpleNamespace(fingerprint=rows),
    )


@pytest.fixture
def facts(tmp_path):
    def of(*overrides, sequence_size=1, tensor_size=1, peft_config=None, **changed):
        (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n')
        (tmp_path / "job.yaml").write_text(
            "run: {folder: runs/a}\nmodel: {name: org/model}\ndata: {train: {path: rows.jsonl}, max_length: 8}\n"
            "task: {name: sft}\ntrain: {global_batch_size: 2, microbatch_size: 2, steps: 4, learning_rate: 1e-3}\n"
        )
        loaded = load_config(tmp_path / "job.yaml", overrides)
        expected = SimpleNamespace(sequence_size=sequence_size, tensor_size=tensor_size)
        strategy = SimpleNamespace(name="ddp", expected=expected)
        model = SimpleNamespace(config=SimpleNamespace(_commit_hash="c0ffee"), peft_config=peft_config or {})
        return make_fingerprint(loaded.config, strategy, training_data(**changed), model=model, log=print)

    return of


def test_a_run_is_its_settings_and_the_digests_of_its_rows_and_tokenizer(facts):
    identity = facts().identity
    assert identity["train.learning_rate"] == "0.001"
    assert identity["training data"] == f"f1-{CACHE_VERSION}"
    assert "base weights" not in identity  # all of them are trained, so they are in the checkpoint
    assert facts(rows="f2").identity["training data"] == f"f2-{CACHE_VERSION}"
    assert facts(words=("a", "c")).identity["tokenizer"] != identity["tokenizer"]


def test_strategy_and_world_size_are_recorded_separately_from_settings(facts):
    assert facts().origin == {"strategy": "ddp", "processes": "1"}
    assert facts(sequence_size=2).origin["strategy"] == "ddp with rows shared by 2"
    assert facts(tensor_size=4).origin["strategy"] == "ddp with layers shared by 4"
    assert facts().settings["report.log_every_steps"] == "10"


def test_frozen_weights_of_the_hub_are_identified_by_their_commit(facts):
    assert facts("model.lora={}").identity["base weights"] == "commit c0ffee"


def test_a_run_that_trained_tied_embeddings_under_a_frozen_head_is_not_resumed(facts):
    """A checkpoint of version 0.2 has the same tensors, and nothing about the tie."""
    keys = ("model.lora.modules_to_save=[embed_tokens]",)
    older = facts(*keys, peft_config={"default": LoraConfig(modules_to_save=["embed_tokens"])})
    tied = LoraConfig(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    now = facts(*keys, peft_config={"default": tied})
    assert check_changes(Path("step-4"), now, current=now, allowed=()) == []
    with refused(CheckpointError, "tied weights: "):
        check_changes(Path("step-4"), older, current=now, allowed=())


def test_the_reason_for_other_held_out_rows_is_named(facts):
    now = facts("data.validation={fraction: 0.5}", "evaluate={}", rows="f2")
    settings = {**now.settings, "data.validation.fraction": "0.5"}  # as version 0.2 has recorded it
    older = RunFingerprint({**now.identity, "training data": "f1"}, settings, now.origin)
    with refused(CheckpointError, "data.validation.fraction: 0.5 in the checkpoint, 0.5, "):
        check_changes(Path("step-4"), older, current=now, allowed=())


def test_weights_that_are_the_reference_of_a_loss_are_identified_by_their_commit(facts):
    reference = Precomputed("log-probabilities", "reference", {}, lambda *_: ())
    assert facts(precomputed=reference).identity["base weights"] == "commit c0ffee"
