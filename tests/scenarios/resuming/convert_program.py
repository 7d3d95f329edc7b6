"""Converts checkpoints to Accelerate's folder and back, several in one launch: RUN FOLDER BACK, as often as given."""

import gc
import sys
from pathlib import Path

import torch

from finetune.commands.convert import convert_from, convert_to
from finetune.runtime import distributed
from finetune.runtime.text.terminal import quiet_libraries
from tests.scenarios.trained import forget


def main(words: list[str]) -> None:
    quiet_libraries(is_main=distributed.is_main())
    paths = [Path(word) for word in words]
    for run, folder, back in zip(paths[::3], paths[1::3], paths[2::3], strict=True):
        convert_to(run, folder, step=None)
        forget()
        gc.collect()
        convert_from(back, folder, step=4, trust_remote_code=True)
        forget()
        gc.collect()
    distributed.shut_down(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
