"""`export:` - the model that the run leaves in `final/`."""

from typing import Literal

from finetune.config.section import Name, Section, key


class ExportSection(Section):
    """The model that the run leaves in `final/`, loadable with `from_pretrained` (or `PeftModel`)."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        "Dtype of the exported weights; unset, the dtype in training.", None
    )
    checkpoint: Literal["last", "best"] = key(
        "The step to export: `last`, or `best` of the steps that `checkpoint.keep_best` keeps.", "last"
    )
    max_shard_size: str = key("Maximum size of a weight file.", "5GB", pattern=r"^[0-9]+(MB|GB)$", examples=["5GB"])
    merge: bool = key("Merge adapters into the base and write one full model.", False)
    push_to_hub: Name | None = key(
        "Also upload the folder to this hub repository (`name` or `organization/name`), with the credentials in "
        "HF_TOKEN.",
        None,
    )
    private: bool = key("Make the repository private if it is new.", True)
    verify: bool = key(
        "Load the written folder in a fresh process and compare its logits, tensors and tokens with the training's.",
        True,
    )
