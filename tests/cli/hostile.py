"""Folders of models as an enemy, or a failing disk, would leave them: each is a good one that was changed."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CODE = """
open({canary!r}, "a").write(__name__)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Tokens(PreTrainedTokenizerFast): pass
class Config(LlamaConfig): model_type = "evil"
class Model(LlamaForCausalLM): config_class = Config
def generate(model, **settings): return type(model).generate(model, **settings)
"""
AUTO_MAP = {
    "AutoConfig": "evil.Config",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokens", "evil.Tokens"],
    "AutoProcessor": "evil.Tokens",
    "AutoImageProcessor": "evil.Tokens",
}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

Change = Callable[[Path], None]


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def write_good(folder: Path) -> Path:
    """Write a small model with its tokenizer, as `save_pretrained` does."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate([*vocabulary, END])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=256, **LLAMA)).save_pretrained(folder)
    return folder


def write_bad(folder: Path, *, good: Path, change: Change) -> Path:
    """Write a copy of the good folder with the change, and with code that would leave a canary beside it."""
    shutil.copytree(good, folder)
    for place in (folder, folder / "custom_generate"):
        place.mkdir(exist_ok=True)
        for name in ("evil.py", "generate.py"):
            (place / name).write_text(CODE.format(canary=str(canary_of(folder))))
    change(folder)
    return folder


def canary_of(folder: Path) -> Path:
    """Return the file that exists if code of the folder has run."""
    return folder.with_name("canary")


def _with(name: str, **settings: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**found, **settings}))

    return change


def _text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def _without(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _pickled(name: str) -> Change:
    return lambda folder: torch.save({"lm_head.weight": Payload(canary_of(folder))}, folder / name)


def _adapter(**settings: Any) -> Change:
    """Make an adapter of the folder, on the good model beside it."""

    def change(folder: Path) -> None:
        _without("config.json", "model.safetensors")(folder)
        base = str(folder.with_name("good"))
        _with("adapter_config.json", **{**LORA, "base_model_name_or_path": base, **settings})(folder)
        save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")

    return change


def _index(content: Any) -> Change:
    text = content if isinstance(content, str) else json.dumps(content)
    return _both(_without("model.safetensors"), _text("model.safetensors.index.json", text))


def _weights(alter: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        alter(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def _header(**tensor: Any) -> bytes:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", **tensor}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _evil_base(folder: Path) -> None:
    evil = folder.with_name("evil-base")
    shutil.copytree(folder, evil)
    _with("config.json", auto_map=AUTO_MAP, model_type="evil")(evil)
    _adapter(base_model_name_or_path=str(evil))(folder)


_TEMPLATE = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"
_SHARD = {"metadata": {}, "weight_map": {"lm_head.weight": "x.bin"}}

HOSTILE: Mapping[str, Change] = {
    "code of a tokenizer": _with("tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Evil"),
    "code of a config": _with("config.json", auto_map=AUTO_MAP, model_type="evil"),
    "code beside a known config": _with("config.json", auto_map=AUTO_MAP),
    "code in another repository": _with("config.json", auto_map={"AutoConfig": "a/b--evil.Config"}, model_type="evil"),
    "code of processors": _both(
        *(_with(name, auto_map=AUTO_MAP, processor_class="Evil", image_processor_type="Evil") for name in PROCESSORS)
    ),
    "code of generation": _with("generation_config.json", auto_map=AUTO_MAP, penalty_alpha=0.6, top_k=4),
    "a model as tokenizer": _with("tokenizer_config.json", tokenizer_class="AutoModelForCausalLM"),
    "a kernel of the hub": _with("config.json", attn_implementation="evil/kernel"),
    "pickled weights": _both(_pickled("pytorch_model.bin"), _without("model.safetensors")),
    "pickled shards": _both(_pickled("x.bin"), _index(_SHARD)),
    "pickled weights by name": _both(_pickled("x.bin"), _with("config.json", transformers_weights="x.bin")),
    "a template that calls": _text("chat_template.jinja", _TEMPLATE),
    "an adapter with a module": _adapter(megatron_config={"a": 1}, megatron_core="evil"),
    "an adapter with another model": _adapter(peft_type="SHADOW", shadow_model="evil"),
    "an adapter from pickles": _adapter(init_lora_weights="corda", corda_config={"cache_file": "x.bin"}),
    "a pickled adapter": _both(_adapter(), _without("adapter_model.safetensors"), _pickled("adapter_model.bin")),
    "an adapter on code": _evil_base,
    "an adapter within a model": _both(_with("adapter_config.json", **LORA), _pickled("adapter_model.bin")),
}
"""Folders whose code must not run, whatever is typed."""

_BROKEN = {
    "a list": "[]",
    "null": "null",
    "half": '{"a": ',
    "empty": "",
    "deep": "[" * 1000 + "]" * 1000,
    "deep objects": '{"a":' * 900 + "1" + "}" * 900,
    "a surrogate": '{"model_type": "\\ud800", "a": "\\udfff"}',
    "a long number": f'{{"a": {"9" * 5000}}}',
    "binary": b"\xff\xfe\x00",
}
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")

DAMAGED: Mapping[str, tuple[Change, str]] = {
    **{
        f"{name}: {what}": (_text(name, text), name)
        for name in _FILES
        for what, text in _BROKEN.items()
        if name == "config.json" or what in ("half", "deep objects")
    },
    "100 MB of config": (_text("config.json", f'{{"a": "{"x" * (17 << 20)}"}}'), "config.json"),
    "a header of 10^18": (_text("model.safetensors", struct.pack("<Q", 10**18)), "model.safetensors"),
    "a header that is no JSON": (_text("model.safetensors", struct.pack("<Q", 8) + b"{{{{{{{{"), "model.safetensors"),
    "no header": (_text("model.safetensors", b""), "model.safetensors"),
    "cut weights": (_cut, "model.safetensors"),
    "offsets beyond the end": (
        _text("model.safetensors", _header(shape=[257, 16], data_offsets=[0, 10**15])),
        "model.safetensors",
    ),
    "sizes that overflow": (
        _text("model.safetensors", _header(shape=[2**62, 2**62], data_offsets=[0, 64])),
        "model.safetensors",
    ),
    "a missing weight": (_weights(lambda each: each.pop("lm_head.weight")), "lm_head.weight"),
    "another shape": (_weights(lambda each: each.update({"lm_head.weight": torch.zeros(3, 3)})), "config.json"),
    "a missing shard": (_index({**_SHARD, "weight_map": {"a": "x-1.safetensors"}}), "x-1.safetensors"),
    "a shard above": (_index({**_SHARD, "weight_map": {"a": "../good/model.safetensors"}}), "index.json"),
    "a shard elsewhere": (_index({**_SHARD, "weight_map": {"a": "/etc/passwd"}}), "index.json"),
    "an index without names": (_index({**_SHARD, "weight_map": {}}), "index.json"),
    "an index of numbers": (_index({"metadata": 3, "weight_map": [1]}), "index.json"),
    "an index that is a list": (_index("[]"), "index.json"),
    "a billion layers": (_with("config.json", num_hidden_layers=10**9), "config.json"),
    "a vocabulary of 10^12": (_with("config.json", vocab_size=10**12), "config.json"),
    "no heads": (_with("config.json", num_attention_heads=0), "folder"),
    "labels that are a list": (_with("config.json", id2label=[1]), "folder"),
    "a length that is a text": (_with("tokenizer_config.json", model_max_length="a"), "model_max_length"),
    "an end that is a number": (_with("tokenizer_config.json", eos_token={"content": 3}), "folder"),
    "tokens beyond 32 bits": (_text("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 9e99}}}'), "tokenizer"),
    "beams that are a text": (_with("generation_config.json", num_beams="a"), "generation_config.json"),
    "an adapter's config: a list": (_both(_adapter(), _text("adapter_config.json", "[]")), "adapter_config.json"),
    "an adapter's config: types": (_adapter(peft_type=7, auto_mapping=[1]), "adapter_config.json"),
    "an adapter's config: a kind": (_adapter(peft_type="EVIL"), "EVIL"),
    "an adapter's weights": (
        _both(_adapter(), _text("adapter_model.safetensors", struct.pack("<Q", 10**18))),
        "adapter_model.safetensors",
    ),
}
"""Folders that cannot be used, each with what its message must name."""
