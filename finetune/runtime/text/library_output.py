"""Limits logging, warnings and progress bars of libraries to one process per run."""

import logging
import os
import sys
import warnings

QUIETED_LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "DeepSpeed",
    "huggingface_hub",
    "peft",
    "torch",
    "transformers",
)

HARMLESS_WARNINGS = ("Setting accelerator to CPU",)
"""Prefixes of useless warnings, which every run without a GPU would print."""

DEPRECATION_WARNINGS = (
    r"`is_gradient_checkpointing` is deprecated",  # peft 0.21 of transformers 5.23
    r"`torch\.distributed\.\w+` is deprecated",  # DeepSpeed 0.19 of torch 2.13, in every step
)
"""Patterns of warnings that one library causes in another, and that users cannot fix."""


def quiet_libraries(*, is_main: bool) -> None:
    """Keep the libraries' warnings on the main rank and only errors on the others; progress bars only at a terminal.

    Also affects libraries that are imported later, but not the output of this package.
    """
    level = logging.WARNING if is_main else logging.ERROR
    for library in QUIETED_LIBRARIES:
        logging.getLogger(library).setLevel(level)
    for message in DEPRECATION_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    # DeepSpeed resets its level when it is imported, but keeps filters
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: record.levelno >= level and not record.getMessage().startswith(HARMLESS_WARNINGS)
    )
    if not is_main:
        warnings.simplefilter("ignore")
        for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):  # read when they are imported
            os.environ.setdefault(name, "error")
    if not is_main or not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
        switches = {
            "transformers.utils.logging": "disable_progress_bar",
            "datasets.utils.tqdm": "disable_progress_bars",
            "huggingface_hub.utils.tqdm": "disable_progress_bars",
        }
        for module, switch in switches.items():
            if module in sys.modules:
                getattr(sys.modules[module], switch)()
