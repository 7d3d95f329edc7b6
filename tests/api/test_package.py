"""`import finetune`: fast, without torch, and with exactly the names and signatures of this page."""

import inspect
import json
import sys
import types
from pathlib import Path

import pytest

import finetune
import finetune.export.card
import finetune.train.loop
from tests.launching import capture

SIGNATURES = """
CheckpointError(UserError)
ConfigError(UserError)
DataError(UserError)
DiskError(TrainingError)
ExportError(TrainingError)
FinetuneError(Exception)
Hang(TrainingError)
HubError(FinetuneError)
Job(*, run=None, model=None, data=None, task=None, train=None, checkpoint=None, evaluate=None, report=None, export=None, **others)
LostContact(TrainingError)
MissingPackage(UserError)
ModelError(UserError)
NonFiniteError(TrainingError)
RegistryError(UserError)
RunResult(folder, reason, num_steps, metrics=<factory>, checkpoint=None, final=None)
StrategyError(UserError)
TrainingError(FinetuneError)
UserError(FinetuneError)
check(job, *, overrides=None, num_processes=None)
evaluate(source, *, step=None, job=None, overrides=None, trust_remote_code=False)
export(source, *, to=None, step=None, dtype=None, merge=False, push_to_hub=None, public=False, verify=None, trust_remote_code=False)
generate(source, prompts, *, adapter=None, max_new_tokens=256, batch_size=8, temperature=0.0, top_p=1.0, seed=0, system=None, probabilities=False, trust_remote_code=False)
load_job(path, *, overrides=None)
prepare(job, *, overrides=None)
train(job, *, overrides=None, reporters=(), num_processes=None, accelerate=None)
"""  # noqa: E501  # a signature is a line

MODULES = ("register",)
OTHERS = ("__version__", "Session", *MODULES)
"""Names without a signature here: `Session` has a page and tests of its own."""

PROGRAM = """
import os, sys, time, json
before = dict(os.environ)
started = time.process_time()
import finetune
seconds = time.process_time() - started
names = dir(finetune)
heavy = [name for name in ("torch", "numpy", "pydantic", "transformers", "accelerate") if name in sys.modules]
print(json.dumps([seconds, heavy, dict(os.environ) == before, names]))
"""


def signature_of(name: str) -> str:
    value = getattr(finetune, name)
    if isinstance(value, type) and issubclass(value, finetune.FinetuneError):
        return f"{name}({value.__bases__[0].__name__})"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(value).parameters.values()]
    return f"{name}{inspect.Signature(bare)}"


def test_every_public_name_has_the_signature_of_the_page():
    names = [name for name in finetune.__all__ if name not in OTHERS]
    assert [signature_of(name) for name in sorted(names)] == SIGNATURES.strip().splitlines()
    assert all(getattr(finetune, name).__doc__ for name in names)


def test_importing_the_package_is_fast_and_imports_no_torch():
    """A tenth of a second of this process's time: nothing that another process does counts."""
    done = capture([sys.executable, "-c", PROGRAM], is_cold=True)
    assert done.returncode == 0, done.stderr
    seconds, heavy, is_environment_unchanged, names = json.loads(done.stdout)
    assert seconds < 0.1
    assert heavy == []
    assert is_environment_unchanged
    assert set(finetune.__all__) <= set(names)


def test_a_function_keeps_its_name_though_a_folder_of_the_package_has_it():
    assert isinstance(sys.modules["finetune.train"], types.ModuleType)
    assert (finetune.train.__module__, finetune.export.__module__) == ("finetune.api.training", "finetune.api.commands")
    from finetune import export, train

    assert (train, export) == (finetune.train, finetune.export)


def test_the_page_names_every_function_with_its_arguments():
    page = (Path(finetune.__file__).parents[1] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert [name for name in finetune.__all__ if name not in page and name != "__version__"] == []
    for name in ("train", "check", "prepare", "evaluate", "load_job"):
        first, *others = inspect.signature(getattr(finetune, name)).parameters
        shown = [other for other in others if other != "trust_remote_code"]
        assert f"`{name}({', '.join([first, *(f'{other}=' for other in shown)])})`" in page


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute `trian`"):
        _ = finetune.trian  # type: ignore[attr-defined]


def test_the_stub_for_type_checkers_has_all_names():
    text = Path(finetune.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert [name for name in finetune.__all__ if f" as {name}\n" not in text and f"{name}: " not in text] == []


WRONG_ARGUMENTS = {
    "a text in place of a list": (lambda run: finetune.generate(run, "3 + 1 ="), "prompts"),
    "a number in place of a prompt": (lambda run: finetune.generate(run, ["3 + 1 =", 3]), "prompts.1"),
    "a negative count": (lambda run: finetune.generate(run, ["a"], max_new_tokens=-2), "max_new_tokens"),
    "no batch": (lambda run: finetune.generate(run, ["a"], batch_size=0), "batch_size"),
    "a share above one": (lambda run: finetune.generate(run, ["a"], top_p=1.5), "top_p"),
    "not a number": (lambda run: finetune.generate(run, ["a"], temperature=float("nan")), "temperature"),
    "a list of overrides": (lambda run: finetune.check(run, overrides=["train.steps=4"]), "overrides"),
    "one function in place of a list": (lambda run: finetune.train(run, reporters=print), "reporters"),
    "a text in place of a number": (lambda run: finetune.evaluate(run, step="4"), "step"),
    "an unknown type": (lambda run: finetune.export(run, dtype="float8"), "dtype"),
    "no path": (lambda run: finetune.export(None), "source"),
}
UNKNOWN_ARGUMENTS = {
    "another name": (lambda: finetune.check("job.yaml", colour=1), r"check: .*'colour'"),
    "a missing one": (lambda: finetune.generate("runs/first"), r"generate: .*'prompts'"),
    "no job": (lambda: finetune.check(3), "`int` is not a job"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_an_argument_of_another_type_is_a_user_error_that_names_it(tmp_path, case):
    call, name = WRONG_ARGUMENTS[case]
    with pytest.raises(finetune.UserError) as error:
        call(tmp_path)
    assert str(error.value).startswith(f"{name}: `")


@pytest.mark.parametrize("case", UNKNOWN_ARGUMENTS)
def test_arguments_that_do_not_fit_the_signature_are_a_user_error(case):
    call, message = UNKNOWN_ARGUMENTS[case]
    with pytest.raises(finetune.UserError, match=message):
        call()
