"""Rules across keys and sections: each rule checks a config that matches the schema and yields its problems.

A rule may be given a draft (`config/validation.py`): where it reads an invalid key, it is skipped.
"""

from collections.abc import Callable, Iterator

from finetune.config.rules.checkpoint import CHECKPOINT_RULES, EVALUATION_RULES
from finetune.config.rules.data import BATCHING_RULES, DATA_RULES, FORMAT_RULES, IMAGE_RULES
from finetune.config.rules.model import ADAPTER_RULES, MODEL_RULES
from finetune.config.rules.sources import FILE_OPTION_RULES, SOURCE_RULES, STREAM_RULES
from finetune.config.rules.task import PAIR_RULES, PREFERENCE_RULES, TASK_RULES
from finetune.config.rules.train import BATCH_RULES, TRAINING_RULES
from finetune.config.rules.unused_keys import no_unused_keys
from finetune.config.run_config import RunConfig
from finetune.errors import Problem

Rule = Callable[[RunConfig], Iterator[Problem]]

RULES: tuple[Rule, ...] = (
    *BATCH_RULES,
    *MODEL_RULES,
    *ADAPTER_RULES,
    *SOURCE_RULES,
    *FILE_OPTION_RULES,
    *FORMAT_RULES,
    *DATA_RULES,
    *BATCHING_RULES,
    *STREAM_RULES,
    *EVALUATION_RULES,
    *CHECKPOINT_RULES,
    *TASK_RULES,
    *PREFERENCE_RULES,
    *PAIR_RULES,
    *IMAGE_RULES,
    *TRAINING_RULES,
    no_unused_keys,
)


def rule_problems(config: RunConfig, *, is_draft: bool) -> list[Problem]:
    """Return the problems that all rules find."""
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(config))
        except AttributeError:
            if not is_draft:
                raise
    return problems
