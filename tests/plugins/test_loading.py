"""A job imports what it names and nothing else; every mistake in a plugin is one message with its line."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from finetune.commands.plugins import list_plugins
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config, load_resolved
from finetune.config.plugins import plugin_identities
from finetune.config.schema import json_schema, reference_markdown
from finetune.errors import ConfigError
from finetune.registry.losses import TOKEN_LOSSES
from finetune.registry.optimizers import OPTIMIZERS
from finetune.registry.plugins import loaded_plugins
from tests.launching import capture
from tests.plugin_tables import unload_plugins

FOCAL = """
from finetune import register

class Options(register.Section):
    gamma: float = register.key("The exponent.", 2.0, ge=0.0)

@register.loss("my_focal", options=Options)
def my_focal(log_probabilities, labels, batch, *, options):
    return -((1 - log_probabilities.exp()) ** options.gamma) * log_probabilities
"""

SCHEDULE = "from finetune import register\n\n@register.schedule({})\ndef shape(schedule, steps_done):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def no_plugins():
    unload_plugins()
    yield
    unload_plugins()


def problem(load, *overrides):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    (found,) = error.value.problems
    return found


def test_an_installed_package_is_not_imported_by_a_job_that_does_not_name_it(installed, load):
    load()
    assert not [name for name in sys.modules if name.startswith("fancy_finetune")]
    assert "focal" not in TOKEN_LOSSES


def test_a_name_of_an_entry_point_imports_its_module_alone(installed, load):
    config = load("train.optimizer.name=sign_momentum").config
    assert [plugin.module for plugin in loaded_plugins()] == ["fancy_finetune.optimizers"]
    assert "fancy_finetune.losses" not in sys.modules and "focal" not in TOKEN_LOSSES
    assert config.plugin_options.sign_momentum.decay == 0.9
    assert loaded_plugins()[0].distribution == "fancy-finetune 1.2.0"


def test_a_module_a_distribution_and_a_file_can_be_named(installed, load, job):
    load("plugins=[fancy_finetune.losses]", "task.loss=focal")
    assert "focal" in TOKEN_LOSSES and "sign_momentum" not in OPTIMIZERS
    load("plugins=[fancy-finetune]")
    assert {plugin.module.rpartition(".")[2] for plugin in loaded_plugins()} == {
        *("tasks", "losses", "small", "optimizers", "watchers")
    }
    (job.parent / "mine.py").write_text(FOCAL)
    loaded = load("plugins=[./mine.py]", "task.loss=my_focal")
    assert loaded.config.plugins == (str(job.parent / "mine.py"),)


def test_a_job_does_not_use_what_another_job_has_loaded(job, load):
    (job.parent / "mine.py").write_text(FOCAL)
    load("plugins=[./mine.py]", "task.loss=my_focal")
    found = problem(load, "task.loss=my_focal")
    assert found.key == "task.loss" and f"Add `plugins: [{job.parent / 'mine.py'}]`" in found.message


def test_a_changed_file_is_imported_again(job, load):
    file = job.parent / "mine.py"
    file.write_text(FOCAL)
    first = plugin_identities(load("plugins=[./mine.py]", "task.loss=my_focal").config)
    file.write_text(FOCAL.replace("2.0", "3.0"))
    config = load("plugins=[./mine.py]", "task.loss=my_focal").config
    assert config.plugin_options.my_focal.gamma == 3.0
    assert plugin_identities(config) != first


def test_check_shows_the_line_and_the_option_that_was_meant(installed, job):
    job.write_text(job.read_text().replace("{name: sft}", "{name: sft, loss: focal}"))
    with job.open("a") as file:
        file.write("plugin_options:\n  focal:\n    gama: 2.0\n")
    lines = len(job.read_text().splitlines())
    process = capture([sys.executable, "-m", "finetune", "check", str(job)], timeout_seconds=60)
    assert process.returncode == 2
    assert process.stderr == (
        f"error: job.yaml has 1 problem\n  line {lines}, plugin_options.focal.gama: there is no such key. "
        "Did you mean `gamma`?\n"
    )


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ("{focal: {gamma: high}}", "plugin_options.focal.gamma", '`"high"` is text. Write a number from 0 to 10.'),
        ("{focal: {gamma: 11.0}}", "plugin_options.focal.gamma", "`11.0` is not allowed. Write a number from 0 to 10."),
        ("{focal: 3}", "plugin_options.focal", "`3` is a whole number. Its keys are `gamma`. Write a section."),
        ("{fokal: {gamma: 1.0}}", "plugin_options.fokal", "there is no such key. Did you mean `focal`?"),
        ("{other: {}}", "plugin_options.other", "no plugin of this job has options under this name; known: `focal`"),
    ],
)
def test_an_option_of_a_wrong_name_or_type_is_one_problem(installed, load, options, key, message):
    found = problem(load, "task.loss=focal", f"plugin_options={options}")
    assert found.key == key and message in found.message


def test_required_options_are_asked_for_where_the_name_is_used(job, load):
    (job.parent / "mine.py").write_text(FOCAL.replace('"The exponent.", 2.0', '"The exponent."'))
    load("plugins=[./mine.py]")
    found = problem(load, "plugins=[./mine.py]", "task.loss=my_focal")
    assert found.key == "plugin_options.my_focal" and "It needs `gamma`" in found.message


def test_the_reference_and_the_schema_have_the_options_of_the_jobs_plugins(installed, load):
    load()
    assert "plugin_options.focal" not in reference_markdown()
    load("task.loss=focal")
    assert "| `plugin_options.focal.gamma` | a number from 0 to 10 | `2.0` |" in reference_markdown()
    assert "focal" in json.loads(json_schema())["properties"]["plugin_options"]["properties"]


BAD = {
    "does not import": (
        "import nothing_of_this_name\n",
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
        1,
    ),
    "is not Python": ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax", 2),
    "ends the program": ("import sys\n\nsys.exit(3)\n", "SystemExit: 3", 3),
    "takes a name of the package": (
        SCHEDULE.format("'cosine'"),
        "schedule `cosine`: the name is taken by finetune.train.plan:cosine",
        3,
    ),
    "has two entries of one name": (
        FOCAL + '\n@register.loss("my_focal")\ndef other(log_probabilities, labels, batch):\n    return 0\n',
        "loss `my_focal`: the name is taken by",
        11,
    ),
    "states what no entry has": (
        SCHEDULE.format("'mine', decay=True"),
        "schedule `mine`: got an unexpected keyword argument 'decay'",
        3,
    ),
    "has options that are no section": (
        SCHEDULE.format("'mine', options=dict"),
        "schedule `mine`: options are a class that derives from register.Section",
        3,
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_plugin_that_fails_is_one_message_with_its_line_and_leaves_nothing(job, load, kind):
    source, reason, line = BAD[kind]
    (job.parent / "bad.py").write_text(source)
    found = problem(load, "plugins=[./bad.py]", "task.loss=my_focal")
    assert found.key == "plugins.0"
    assert reason in found.message and re.search(rf"bad\.py, line {line}\)", found.message), found.message
    assert loaded_plugins() == () and "my_focal" not in TOKEN_LOSSES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./absent.py", "cannot be read: No such file or directory"),
        ("./", "is not a regular file that ends with `.py`"),
        ("no_such_module", "is neither a module that can be imported here"),
        ("mine.py", "A file begins with `./`: `./mine.py`."),
    ],
)
def test_a_plugin_that_does_not_exist_is_one_message(load, name, message):
    found = problem(load, f"plugins=['{name}']", "task.loss=my_focal")
    assert found.key == "plugins.0" and message in found.message


def test_a_pipe_is_not_read_as_a_plugin(job, load):
    import os

    os.mkfifo(job.parent / "pipe.py")
    assert "is not a regular file" in problem(load, "plugins=[./pipe.py]").message


def second_distribution(folder, *, name="rival", entry="focal = rival_losses"):
    """Declare an entry point by metadata alone, as an installed wheel has them."""
    metadata = folder / f"{name}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[finetune.losses]\n{entry}\n")
    return folder


def test_two_installed_entries_of_one_name_are_refused_when_used_and_listed(
    installed, load, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(second_distribution(tmp_path / "rival")))
    found = problem(load, "task.loss=focal")
    assert found.key == "task.loss"
    assert "`fancy_finetune.losses of fancy-finetune 1.2.0` and `rival_losses of rival 0.1`" in found.message
    load("train.optimizer.name=sign_momentum")  # other names of theirs can be used
    list_plugins(None, [])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "losses focal rival_losses rival 0.1" in shown
    assert "conflict: also in rival 0.1; refused where a job uses it" in shown
    assert "tasks reversed_pretrain fancy_finetune.tasks fancy-finetune 1.2.0" in shown and len(shown) == 14


def test_an_entry_point_that_registers_nothing_is_one_message(load, tmp_path, monkeypatch):
    folder = second_distribution(tmp_path / "rival")
    (folder / "rival_losses.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    found = problem(load, "task.loss=focal")
    assert found.key == "task.loss" and "registers no loss `focal`" in found.message
    sys.modules.pop("rival_losses", None)


def test_the_list_names_what_a_job_imports(installed, job, capsys):
    list_plugins(job, ["task.loss=focal"])
    shown = capsys.readouterr().out
    assert "fancy_finetune.losses: fancy-finetune 1.2.0 sha256" in shown
    assert "losses focal\n" in shown and "losses capped_margin  (not used by this job)" in shown


def test_plugins_are_registered_without_torch(installed, job):
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from finetune.config.load import load_config
        load_config(Path({str(job)!r}), ["plugins=[fancy_finetune.small]", "train.schedule.name=sawtooth"])
        assert "fancy_finetune.small" in sys.modules
        print("torch" in sys.modules)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"


def test_a_run_folder_imports_no_file_that_its_reader_has_not_allowed(job, load, monkeypatch):
    file = job.parent / "mine.py"
    file.write_text(FOCAL)
    run = job.parent / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text(resolved_yaml(load("plugins=[./mine.py]", "task.loss=my_focal")))
    unload_plugins()
    with pytest.raises(ConfigError) as error:
        load_resolved(run)
    assert "a run folder names this code, which is not imported for that" in str(error.value)
    assert f"set FINETUNE_PLUGINS={file}." in str(error.value) and loaded_plugins() == ()
    monkeypatch.setenv("FINETUNE_PLUGINS", str(file))
    assert load_resolved(run).config.task.loss == "my_focal"


def test_a_resolved_job_is_the_same_job(installed, load, tmp_path):
    loaded = load("task.loss=focal", "plugin_options={focal: {gamma: 1.5}}", "plugins=[fancy_finetune.small]")
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(loaded))
    again = load_config(path).config
    assert again.plugin_options.focal.gamma == 1.5
    assert again.model_dump() == loaded.config.model_dump()


@pytest.mark.parametrize("name", ["policy_gradient", "cross_entropy"])
def test_a_loss_of_session_cannot_be_replaced(job, load, name):
    (job.parent / "mine.py").write_text(
        f'from finetune import register\n\n@register.loss("{name}")\ndef mine(*_):\n    return None\n'
    )
    assert f"`{name}` exists already" in problem(load, "plugins=[./mine.py]").message
