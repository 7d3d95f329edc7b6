"""Every workaround that the export needs for transformers and torch.

Each names the source line upstream. `CHECKED_WITH` has the newest versions with which each was found necessary and
right; a test fails with a newer version, and one for each workaround when it is no longer needed.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import set_zero3_state

CHECKED_WITH: Mapping[str, str] = {"torch": "2.13", "transformers": "5.24"}


@contextmanager
def without_zero3_init() -> Iterator[None]:
    """Build models meanwhile as if DeepSpeed did not exist, so that building one is not collective.

    Under ZeRO-3 the parts of a composite model are partitioned at birth even on the meta device: they are built by
    `_from_config`, which enters `deepspeed.zero.Init` (`transformers/modeling_utils.py`, 5.23). `set_zero3_state` is
    what `from_pretrained` uses against it; it has no public equivalent.
    """
    with set_zero3_state():
        yield


def transformers_class(model: PreTrainedModel) -> Any:
    """Return the model's class as transformers defines it.

    FSDP2 replaces the class of a model by a subclass of its own, which builds another model when it is called
    (`torch/distributed/fsdp/_fully_shard/_fsdp_init.py`, 2.13).
    """
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind for kind in classes if not any("fsdp" in base.__module__ for base in kind.__mro__))


def savable_generation_config(original: GenerationConfig) -> GenerationConfig:
    """Return a copy, or the defaults where settings contradict one another.

    Some models on the hub have such a config (`temperature` without `do_sample`); transformers loads it with a warning
    and refuses to save it (`GenerationConfig.save_pretrained` validates strictly, 5.23).
    """
    config = copy.deepcopy(original)
    try:
        config.validate(strict=True)
    except ValueError:
        return GenerationConfig()
    return config
