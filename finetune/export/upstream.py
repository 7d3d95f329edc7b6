"""Every workaround for transformers and torch in the export.

Each names its upstream source. `CHECKED_WITH` has the newest versions with which they were found necessary and
correct; a test fails with a newer version, and one per workaround fails when it is no longer needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import set_zero3_state
from transformers.utils import GENERATION_CONFIG_NAME

CHECKED_WITH: Mapping[str, str] = {"torch": "2.14", "transformers": "5.24"}


without_zero3_init = set_zero3_state
"""Builds models as if DeepSpeed were not used, so that building one is not collective.

Under ZeRO-3 the parts of a composite model are partitioned when they are built, even on the meta device: they are built
by `_from_config`, which enters `deepspeed.zero.Init` (`transformers/modeling_utils.py`, 5.23). `from_pretrained` avoids
it with `set_zero3_state`, which has no public equivalent.
"""


def transformers_class(model: PreTrainedModel) -> Any:
    """Return the model's class as transformers defines it.

    FSDP2 replaces the class of a model with its own subclass, whose constructor builds another model
    (`torch/distributed/fsdp/_fully_shard/_fsdp_init.py`, 2.13).
    """
    classes = [parent for parent in type(model).__mro__ if issubclass(parent, PreTrainedModel)]
    return next(parent for parent in classes if not any("fsdp" in base.__module__ for base in parent.__mro__))


def write_generation_config(config: GenerationConfig, folder: Path) -> None:
    """Write the config into the folder, even if values contradict one another.

    Some models on the hub have such a config (`temperature` without `do_sample`), which transformers loads with a
    warning but refuses to save once a value has changed (`GenerationConfig.save_pretrained` validates strictly, 5.24).
    """
    config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
