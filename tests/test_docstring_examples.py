"""The examples in the docstrings of `finetune/` run and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMPT = ">>> "


def examples_by_module() -> dict[str, int]:
    """Return the number of examples in each module that has any."""
    counts = {}
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        counts[name] = sum(line.lstrip().startswith(PROMPT) for line in path.read_text(encoding="utf-8").splitlines())
    return {name: count for name, count in counts.items() if count}


EXAMPLES = examples_by_module()


def test_the_package_has_docstring_examples():
    assert len(EXAMPLES) > 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_docstring_example_of_the_module_runs_and_gives_the_shown_result(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    output: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        assert not any(doctest.SKIP in example.options for example in test.examples), f"{test.name} skips an example"
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)
    assert runner.tries == EXAMPLES[name], "an example is in a text that is not a docstring, and so it is not run"
