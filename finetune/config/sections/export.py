"""`export:` - the model that the run leaves in `final/`."""

from typing import Literal

from finetune.config.section import Section, key


class ExportSection(Section):
    """The model that the run leaves in `final/`, loadable with `from_pretrained` (or `PeftModel`)."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        "Type of the exported weights; unset, as they were trained.", None
    )
    max_shard_size: str = key("Largest file of weights.", "5GB", pattern=r"^[0-9]+(MB|GB)$", examples=["5GB"])
    merge: bool = key("Fold adapters into the base and write one whole model.", False)
    push_to_hub: str | None = key(
        "Also upload the folder to this hub repository (`name` or `organisation/name`), as HF_TOKEN allows.", None
    )
    private: bool = key("Make that repository private where it is new.", True)
