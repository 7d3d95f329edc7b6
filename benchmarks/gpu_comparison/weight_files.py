"""The files of a model with random weights, as a hub's folder holds them; written once, for all starts."""

import compileall
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_comparison.documents import write_tokenizer
from gpu_comparison.shapes import Shape
from gpu_comparison.weights import fill

ROOT = Path(__file__).parents[2]
SHARD_BYTES = 2 << 30
NUM_WRITERS = 4


def place(folder: Path, shape: Shape) -> Path:
    """Return the folder of the model's files."""
    return folder / f"model-{shape.name}-{shape.width}"


def is_written(folder: Path, shape: Shape) -> bool:
    """Tell whether all files are there: the index comes last."""
    return (place(folder, shape) / "model.safetensors.index.json").exists()


def write(shape: Shape, folder: Path, *, dtype: str, device: torch.device) -> dict[str, Any]:
    """Write config, tokenizer and weights, drawn on the device, unless they are there; return size and seconds."""
    started, target = time.monotonic(), place(folder, shape)
    if not is_written(folder, shape):
        write_tokenizer(folder, vocabulary=shape.vocabulary, place=target)
        config = AutoConfig.for_model(shape.model_type, **shape.values(), dtype=dtype)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(target)
        _write_weights(target, config, dtype=getattr(torch, dtype), device=device)
    compileall.compile_dir(ROOT / "finetune", quiet=2)  # an installed package is compiled, as the peers are
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return {"bytes": size, "seconds": time.monotonic() - started}


@torch.no_grad()
def _write_weights(target: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).named_parameters()}
    places: dict[str, str] = {}
    shards: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += shape.numel() * dtype.itemsize
        if size > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = shape.numel() * dtype.itemsize
        shards[-1][name] = shape
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        waiting = []
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            places |= dict.fromkeys(shard, file)
            tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shard.items()}
            for name, tensor in tensors.items():
                fill(name, tensor)
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            waiting.append(writers.submit(save_file, on_host, target / file, {"format": "pt"}))
            if len(waiting) > NUM_WRITERS:
                waiting.pop(0).result()
        for each in waiting:
            each.result()
    index = {"metadata": {"total_size": sum(s.numel() for s in shapes.values()) * dtype.itemsize}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
