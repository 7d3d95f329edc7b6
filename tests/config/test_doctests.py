import doctest
import importlib

import pytest

NAMES = ("finetune.errors", "finetune.config.section", "finetune.config.formatting")


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_in_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
