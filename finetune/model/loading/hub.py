"""Hub names and folders of models and tokenizers, checks of their files, and one message for any failure to load them.

Files are checked before they are parsed, and the damaged one is named after a failure. The rules of a tokenizer.json
can transform text in any way, so they are tried on a short text within limits.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import NormalizedString, Regex, Tokenizer, normalizers
from transformers import PreTrainedTokenizerBase

from finetune.errors import FinetuneError, ModelError, NotAFile
from finetune.runtime.files.read import gguf_advice, require_regular
from finetune.runtime.upstream import is_offline


def is_local_path(name: str) -> bool:
    """Return whether the name is a path: hub names never begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def resolve_name(name: str, *, key: str) -> str:
    """Return a hub name unchanged and a path expanded; raises ModelError if it is not a folder that can be loaded."""
    folder = Path(name).expanduser() if is_local_path(name) else Path(name)
    if advice := gguf_advice(folder):
        raise ModelError(f"{key}: {advice}")
    if not is_local_path(name):
        return name
    if not folder.is_dir():
        raise ModelError(f"{key}: the folder {folder} does not exist. A hub name has no leading `.`, `/` or `~`.")
    return str(folder)


@contextmanager
def loading_errors(name: str, *, key: str) -> Iterator[None]:
    """Turn any error while libraries load `name` into one ModelError with advice.

    Damaged files cause errors of any type, and Rust panics, which are not Exceptions.
    """
    try:
        yield
    except FinetuneError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # such as KeyboardInterrupt
        text = str(error)
        type_name = f"{type(error).__name__}: " if isinstance(error, LookupError | TypeError | AttributeError) else ""
        reason = f"{type_name}{error_summary(error)} "
        if "trust_remote_code" in text or "execute custom code" in text:
            reason = REMOTE_CODE_ADVICE
        elif "use_safetensors=True" in text:
            reason = f"it has no safetensors. If it has weights at all, {PICKLE_ADVICE}"
        elif "ignore_mismatched_sizes" in text:
            reason = (
                "the sizes in its config.json do not match its weights (see above): one of them belongs to another "
                "model."
            )
        elif is_local_path(name):
            damage = damaged_file(Path(name).expanduser())
            reason += damage or "Check that the folder contains what `save_pretrained` writes."
        elif not isinstance(error, OSError):
            reason += (
                "Check the values in its config.json. If you have not changed them, its files in the local cache may "
                "be damaged: delete them (`hf cache rm`) and download them again."
            )
        elif is_offline():
            reason += (
                "The hub cannot be reached and the name is not in the local cache: download it on a machine with "
                "network access (`hf download`), or give the path of a folder."
            )
        else:
            reason += (
                "Check the spelling and `model.revision`; for a gated or private model log in with `hf auth login`."
            )
        raise ModelError(f"{key}: `{name}` cannot be loaded: {reason}") from error


def error_summary(error: BaseException) -> str:
    """Return the first two lines of an exception's text as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:400] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


CONFIG = "config.json"
# fmt: off
SETTINGS = (
    CONFIG, "generation_config.json", "adapter_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)
# fmt: on
"""Files that contain one JSON object of settings."""

VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

MAX_SETTINGS_BYTES = 16 << 20
MAX_VOCABULARY_BYTES = 128 << 20
"""More than four times the largest known vocabulary file (33 MB, 262,144 tokens)."""
MAX_NESTING = 64
MAX_LAYERS = 1000
"""More layers are accepted only if the weights have enough tensors: building a billion layers would never finish."""

REMOTE_CODE_ADVICE = (
    "it contains Python code. Review the code; if you trust it, set `model.trust_remote_code: true` in the job, "
    "or pass `--trust-remote-code` to a command without a job file."
)

PICKLE_ADVICE = (
    "its weights are pickles (.bin), which can run code when they are loaded; only safetensors are loaded. Convert "
    'them once in their folder: python -c "import torch; from safetensors.torch import save_file; save_file({name: '
    "each.clone() for name, each in torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors', "
    "{'format': 'pt'})\" (an adapter: adapter_model.bin, adapter_model.safetensors). A whole model that you trust "
    "like code is loaded as it is with `model.trust_remote_code: true` or `--trust-remote-code`."
)


def check_model_files(folder: Path) -> None:
    """Raise ModelError, which names the file, for invalid settings, and for absurd sizes or nesting."""
    for path in sorted(folder.iterdir()):
        is_file = path.suffix in (".json", ".safetensors", ".model", ".bin", ".jinja")
        if not path.exists() or (path.is_dir() and not is_file):
            continue
        try:
            require_regular(path)  # reading a FIFO, socket or device may never finish
        except NotAFile as error:
            raise ModelError(f"{path}: {error.strerror}. Copy the folder again from its source.") from error
    limits = {folder / name: MAX_SETTINGS_BYTES for name in SETTINGS}
    limits |= {folder / name: MAX_VOCABULARY_BYTES for name in VOCABULARIES}
    limits |= {path: MAX_SETTINGS_BYTES for pattern in TEMPLATES for path in folder.glob(pattern)}
    for path, limit in limits.items():
        if path.is_file() and (size := path.stat().st_size) > limit:
            raise ModelError(f"{path}: the file has {size:,} bytes, but the limit is {limit:,}. Is it the right file?")
    settings = {name: read_json_settings(folder / name) for name in SETTINGS if (folder / name).is_file()}
    # A config, or a part of it, may not have more layers or experts than the weights have tensors.
    config = settings.get(CONFIG, {})
    counts: dict[str, int] = {}
    for part in (config, *config.values()):
        for key, value in part.items() if isinstance(part, dict) else ():
            if isinstance(value, int) and ("layer" in key or "expert" in key):
                counts[key] = value
    key, largest = max(counts.items(), key=lambda item: item[1], default=("", 0))
    num_tensors = 0
    for path in folder.glob("*.safetensors") if largest > MAX_LAYERS else ():
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            num_tensors += len(file.keys())
    if largest > max(MAX_LAYERS, num_tensors):
        raise ModelError(
            f"{folder / CONFIG}: `{key}` is {largest:,}, but the weights in the folder have {num_tensors:,} tensors. "
            "The file is damaged: copy it again from its source."
        )


def read_json_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; raises ModelError, which names the file, for any other content."""
    try:
        if path.stat().st_size > MAX_SETTINGS_BYTES:
            raise ValueError(f"it has more than {MAX_SETTINGS_BYTES:,} bytes")
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it contains `{json.dumps(settings):.40}` instead of a JSON object (`{{...}}`)")
        level: list[Any] = [settings]
        for _ in range(MAX_NESTING):
            for text in level + [key for value in level if isinstance(value, dict) for key in value]:
                if isinstance(text, str):
                    text.encode("utf-8")
            level = [inner for value in level for inner in _children(value)]
        if level:
            raise ValueError(f"it is nested more than {MAX_NESTING} deep")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, UnicodeError):
            reason = "it is not valid UTF-8, or has an unpaired surrogate"
        elif isinstance(error, RecursionError):
            reason = f"it is nested more than {MAX_NESTING} deep"
        raise ModelError(f"{path}: the file is damaged: {reason}. Copy it again from its source.") from error
    return settings


def check_matrix_sizes(folder: Path, config: Any) -> None:
    """Raise ModelError if the config has matrices far larger than all of the folder's weights.

    Loading would allocate them before it compares their shapes.
    """
    text = config.get_text_config()
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    values = ((name, getattr(text, name, None)) for name in names)
    sizes: dict[str, int] = {name: size for name, size in values if isinstance(size, int)}
    hidden, heads = sizes.get("hidden_size", 0), sizes.get("num_attention_heads", 0)
    head_size = sizes.get("head_dim") or hidden // max(heads, 1)
    rows = (*(sizes.get(name, 0) for name in names[:3]), max(heads, sizes.get("num_key_value_heads", 0)) * head_size)
    weight_bytes = sum(path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    if max(rows) * hidden > 16 * weight_bytes + (1 << 28):
        listed = ", ".join(f"`{name}` {size:,}" for name, size in sizes.items())
        raise ModelError(
            f"{folder / CONFIG}: {listed} do not match the weights in the folder. One of them belongs to another model."
        )


def check_index(index: str | PurePath) -> None:
    """Raise ModelError unless the index maps names of tensors to safetensors files in the same folder."""
    path = Path(index)
    if path.stat().st_size > MAX_VOCABULARY_BYTES:
        raise ModelError(f"{path}: the file has {path.stat().st_size:,} bytes, which is too large for a weight index.")
    try:
        index_content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index_content["metadata"], dict):
            raise TypeError("`metadata` is not an object")
        shards = set(index_content["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path}: the file is damaged: it has no `weight_map` of names and no `metadata`. Copy it again from "
            "its source."
        ) from error
    for shard in shards or {None}:
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{path}: {shard!r} is not a safetensors file in the same folder.")


def damaged_file(folder: Path) -> str | None:
    """Return a sentence that names the first damaged file of weights or tokenizer; None if there is none.

    For use after loading has failed: reads the headers of all weights, and the whole tokenizer.
    """
    shards = sorted(folder.glob("*.safetensors"))
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        shards += [folder / name for name in sorted(set(names)) if not (folder / name).exists()]
    for path in shards:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            return f"{path} is damaged or missing ({_first_line(error)}): copy it again."
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            Tokenizer.from_file(str(path))
    except BaseException as error:
        if not is_panic(error) and not isinstance(error, Exception):
            raise
        return f"{path} is damaged ({_first_line(error)}): copy it again."
    return None


def is_panic(error: BaseException) -> bool:
    """Return whether this is a Rust panic in safetensors or tokenizers, which is not an Exception."""
    return type(error).__name__ == "PanicException"


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


MAX_GROWTH = 64
"""The maximum factor by which a normalizer may lengthen a text; NFKC can expand one character to 18."""
MAX_ADDED_TOKENS = 1_000
"""The maximum number of special tokens added to each text."""

_PROBE = "".join(map(chr, range(0x20, 0x7F))) + "\u00e9\u2581\ufdfa\n"


def check_tokenizer(loaded: Any, source: str) -> None:
    """Raise ModelError for a tokenizer (or a processor's) whose rules lengthen text excessively, or that panics."""
    tokenizer = getattr(loaded, "tokenizer", loaded)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or backend is None:
        return
    try:
        problem = _tokenizer_problem(backend)
    except BaseException as error:
        if not is_panic(error) and not isinstance(error, Exception):
            raise
        problem = f"it cannot encode plain text ({_first_line(error)})"
    if problem is not None:
        raise ModelError(f"{source}: tokenizer.json is damaged: {problem}. Copy it again from its source.")


def _tokenizer_problem(backend: Any) -> str | None:
    """Return the reason why the tokenizer cannot be used; exceptions from encoding plain text propagate.

    The normalizer's rules are applied one by one to a text with all patterns, so that every step is fast.
    """
    if backend.num_special_tokens_to_add(False) > MAX_ADDED_TOKENS:
        return f"its post-processor adds more than {MAX_ADDED_TOKENS:,} special tokens to each text"
    text = _PROBE
    for rule in _rules(json.loads(backend.normalizer.__getstate__()) if backend.normalizer else None):
        pattern = rule["pattern"] if isinstance(rule.get("pattern"), dict) else {}
        if isinstance(written := pattern.get("Regex"), str) and rule.get("content"):
            # Encoding panics where a rule inserts at the start of a text (tokenizers 0.23).
            split = [NormalizedString(character).split(Regex(written), "isolated") for character in _PROBE]
            if any(pieces[0].original == "" for pieces in split):
                return "a rule of its normalizer matches the empty text"
        text += str(pattern.get("String", ""))
    text = text[:10_000]
    allowed = MAX_GROWTH * len(text)
    for step in _steps(backend.normalizer):
        text = step.normalize_str(text)
        if len(text) > allowed:
            return f"its normalizer makes texts more than {MAX_GROWTH} times as long"
    backend.encode(_PROBE)
    return None


def _rules(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        yield state
    for part in _children(state):
        yield from _rules(part)


def _steps(normalizer: Any) -> Iterator[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        for index in range(len(normalizer)):
            yield from _steps(normalizer[index])
    elif normalizer is not None:
        yield normalizer
