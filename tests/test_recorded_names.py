"""What files of earlier runs call things, written out: prepared sets, checkpoints, events.jsonl, status and audit.

Where a test fails here, a class, a field or a message was renamed that stands in such files: keep the recorded name.
"""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from finetune import errors
from finetune.checkpoint.format.manifest import FileChecksum, Manifest, RunFingerprint
from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.audit import Audit, Exceeded, Histogram, Padding, SourceAudit
from finetune.data.encoding.text import TextEncoder
from finetune.data.loader import LoaderSettings
from finetune.data.sources.source import open_source
from finetune.data.template_check import PromptMismatch, TemplateCheck
from finetune.data.token_cache.cache import identify
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.counts import Counts, Share
from finetune.data.token_cache.store import CACHE_VERSION, TokenCacheManifest
from finetune.data.token_cache.store import PrecomputedManifest as KnownManifest
from finetune.model.generation import SamplingParams
from finetune.model.processing import Processing
from finetune.registry.tasks import TASKS
from finetune.report import events
from finetune.run.setup.training_data import make_encoding
from finetune.runtime.progress import Progress
from finetune.runtime.supervision.status import RankProcess
from finetune.runtime.supervision.watchdog import HangReport
from finetune.task.classification import RECORDED_KINDS
from finetune.task.distillation import DistillationTask
from finetune.task.preference import PreferenceTask
from finetune.task.protocol import SampleSpec


def identity_of(encode, folder, identity):
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    train = TrainingSourceSection(path=str(rows))
    source = open_source(train, key="data.train", log=lambda _: None)
    return identify(source, Encoding(encode, DataSection(train=train, max_length=64), identity=identity))


def test_a_prepared_set_is_found_again_whatever_its_encoder_is_called(tmp_path):
    """Where the fingerprint or the version has changed: sets are prepared again, so increase CACHE_VERSION."""
    renamed = type("Renamed", (TextEncoder,), {"__module__": "finetune.data.encoding.elsewhere"})
    identities = [
        identity_of(object.__new__(kind), tmp_path, {"task name": "pretrain"}) for kind in (TextEncoder, renamed)
    ]
    assert [identity.fingerprint for identity in identities] == ["7a5d94862fc860aa359289949b44a96a"] * 2
    assert CACHE_VERSION == 6


def test_every_task_has_sets_of_its_own(tmp_path):
    processing, data = Processing(None), DataSection(train=TrainingSourceSection(path="rows.jsonl"), max_length=64)
    task = SimpleNamespace(samples=SampleSpec(object.__new__(TextEncoder)))
    names = [make_encoding(data, processing, task, name=entry.name).identity["task name"] for entry in TASKS]
    assert len(set(names)) == len(names) and len(names) > 8


def test_an_encoder_outside_the_package_is_identified_by_its_module_path(tmp_path):
    class OwnEncoder(TextEncoder):
        pass

    name = identity_of(object.__new__(OwnEncoder), tmp_path, {}).parts["encode"]
    assert name == f"{__name__}.{OwnEncoder.__qualname__}"


def test_the_identity_of_a_classification_keeps_its_recorded_problem_names():
    assert RECORDED_KINDS == {"single_label": "OneOfMany", "multi_label": "SomeOfMany", "regression": "Regression"}


EVENTS = {
    "RunStarted": "num_steps strategy arithmetic config flops_per_token peak_flops_per_second previous device_price "
    "parameter_groups",
    "StartedUp": "seconds cpu_seconds memory_bytes",
    "StepTaken": "loss gradient_norm learning_rate num_targets num_tokens samples_sha256 epoch seconds data_seconds "
    "data_share memory_bytes metrics device layers",
    "Profiled": "first_step num_steps seconds wall_seconds trace overlapped_seconds ranks",
    "StepSkipped": "reason sample_ids rows",
    "Evaluated": "metrics num_rows seconds",
    "Answered": "prompt answer reference",
    "CheckpointSaved": "path size_bytes seconds stall_seconds",
    "Noted": "message",
    "Warned": "message",
    "RunEnded": "reason seconds metrics final_folder talks",
}


def test_events_have_their_names_and_fields_in_the_log():
    kinds = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events.Event)]
    found = {
        each.__name__: " ".join(field.name for field in fields(each)) for each in kinds if each is not events.Event
    }
    assert found == {name: f"step {those}" for name, those in EVENTS.items()}


WRITTEN = [
    (Progress, "step num_tokens num_targets num_scale_skips num_nonfinite_skips seconds best_metric "
     "evaluations_since_best last_metrics metrics_step samples_sha256 knows_contents"),
    (Manifest, "step run metrics state_sha256 created versions files format_version"),
    (RunFingerprint, "identity settings origin"),
    (FileChecksum, "size_bytes sha256"),
    (Counts, "rows samples tokens targets truncated_rows truncated_tokens truncated_targets long_rows "
     "rows_without_target dropped_tokens dropped_targets split_rows excluded_rows empty_rows unknown_tokens "
     "control_rows longest longest_place first_without_target answers repeated_tokens "
     "argument_rows dropped_reasoning_rows empty_answers "
     "first_empty_answer unread_keys unlabeled_rows own_prompt_rows first_own_prompt same_prompt_rows unread_rows "
     "lacking_rows"),
    (Audit, "sources total validation padding template exceeded classes num_sequences"),
    (SourceAudit, "key counts is_streamed duplicates in_validation length_quantiles lengths target_shares"),
    (Exceeded, "key share"),
    (Share, "name what num among limit"),
    (PromptMismatch, "case prompt trained prompt_tokens trained_tokens"),
    (Histogram, "edges bars"),
    (Padding, "num_batches num_samples tokens computed plain_computed num_positions budget"),
    (HangReport, "rank host pid point step silent_seconds where"),
    (RankProcess, "rank host pid"),
    (LoaderSettings, "num_workers pin_memory persistent_workers prefetch_factor"),
    (SamplingParams, "max_new_tokens temperature top_p"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "names"), WRITTEN, ids=lambda value: getattr(value, "__name__", ""))
def test_records_written_field_by_field_keep_their_keys(kind, names):
    assert " ".join(field.name for field in fields(kind)) == names


def test_a_check_of_a_template_is_written_with_the_same_keys():
    check = TemplateCheck("`qwen`", "markers", "", (), True, "", (), {}, (), False)
    assert " ".join(check.as_json()) == (
        "template targets_by end_of_turn end_of_turn_tokens is_end_learnt begins_with learnt refused differences "
        "wants_parts arguments default_system"
    )


MODELS = [
    (TokenCacheManifest, "version fingerprint names counts origins shards made_of files"),
    (KnownManifest, "version names samples made_of files"),
]


@pytest.mark.parametrize(("kind", "names"), MODELS, ids=lambda value: getattr(value, "__module__", ""))
def test_the_manifests_of_prepared_sets_have_the_same_keys(kind, names):
    assert " ".join(kind.model_fields) == names


def test_precomputed_answers_are_found_by_their_title():
    task = SimpleNamespace(
        section=SimpleNamespace(cache=True, top_k=2, temperature=1.0), _num_tokens=8, _teacher_arrays=None
    )
    preference = SimpleNamespace(section=SimpleNamespace(loss="sigmoid"))
    found = [PreferenceTask.precomputed.fget(preference), DistillationTask.precomputed.fget(task)]
    assert [each.title for each in found] == ["reference log-probabilities", "teacher's log-probabilities"]


def test_the_status_of_a_failed_run_records_its_error():
    names = {
        each.__name__
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, Exception) and not issubclass(each, Warning)
    }
    expected = "FinetuneError UserError ConfigError DataError ModelError StrategyError CheckpointError MissingPackage "
    expected += "RegistryError "
    assert names == set(
        (expected + "HubError NotAFile TrainingError ExportError DiskError NonFiniteError LostContact Hang").split()
    )
