"""Libraries that speak once per process are heard once per run."""

import logging
import os
import sys
import warnings

CHATTY_LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "DeepSpeed",
    "huggingface_hub",
    "peft",
    "torch",
    "transformers",
)

_VARIABLES_FOR_OTHERS = {  # read by the libraries when they are imported
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def quieten(*, is_main: bool) -> None:
    """Keep the libraries' warnings on the main rank; on the others keep only errors, without progress bars.

    Serves libraries that are imported already and those that will be. Nothing is hidden that this package says itself.
    """
    level = logging.WARNING if is_main else logging.ERROR
    for library in CHATTY_LIBRARIES:
        logging.getLogger(library).setLevel(level)
    if is_main:
        return
    warnings.simplefilter("ignore")
    for name, value in _VARIABLES_FOR_OTHERS.items():
        os.environ.setdefault(name, value)
    _stop_progress_bars()


def _stop_progress_bars() -> None:
    switches = {
        "transformers.utils.logging": "disable_progress_bar",
        "datasets.utils.tqdm": "disable_progress_bars",
        "huggingface_hub.utils.tqdm": "disable_progress_bars",
    }
    for module, switch in switches.items():
        if module in sys.modules:
            getattr(sys.modules[module], switch)()
