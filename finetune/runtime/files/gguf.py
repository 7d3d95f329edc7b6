"""GGUF files that are given as models: how to convert them, because their weights are quantized for inference."""

import shlex
from pathlib import Path

CONVERSION = (
    "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; folder, file, target = sys.argv[1:]; "
    "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype='float32'); "
    "model.hf_quantizer = None; del model.config.quantization_config; model.save_pretrained(target); "
    "AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)"
)
"""Python that converts a GGUF file, with the arguments folder, file and target.

transformers 5 dequantizes the weights when it loads them, but refuses to save them while the two attributes are set.
"""

_CONFIGS = ("config.json", "adapter_config.json")


def gguf_advice(path: Path) -> str | None:
    """Return how to convert a GGUF file, or the one in a folder that has no other model; None for any other path."""
    files = [path] if path.suffix.lower() == ".gguf" and path.is_file() else []
    if path.is_dir() and not any((path / name).exists() for name in _CONFIGS):
        files = sorted(path.glob("*.gguf"))
    if not files:
        return None
    file = files[0].absolute()
    target = f"./{file.stem}"
    return (
        f"{file} is a GGUF file: its weights are quantized for inference. Convert it once (`pip install gguf` first), "
        f"and give the folder {target}, which will have them in float32:\n"
        f'python -c "{CONVERSION}" {shlex.join((str(file.parent), file.name, target))}'
    )
