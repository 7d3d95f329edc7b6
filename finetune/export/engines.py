"""The programs that serve exported models: what each reads, and how `finetune verify serving` reaches it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A program that serves models; one without a URL runs in this process."""

    name: str
    title: str
    url: str | None = None  # of its OpenAI-compatible API, as it starts by default
    reads_gguf: bool = False
    max_lora_ranks: tuple[int, ...] = ()  # the limits that it can be started with; empty: it serves no adapters
    tokenize_path: str | None = None  # of its own endpoint that renders and tokenizes
    takes_token_ids: bool = True  # as prompts; otherwise only text
    exports: bool = True  # `export --for` writes files for it
    commands: str = ""  # that serve a full model, filled with its facts
    adapter_commands: str = ""  # that serve an adapter


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="vllm",
            title="vLLM",
            url="http://localhost:8000/v1",
            max_lora_ranks=_RANKS,
            tokenize_path="/tokenize",
            commands="vllm serve {folder} --served-model-name {name} --dtype {dtype}",
            adapter_commands="""\
# Tokenizer, template and generation config are the adapter's: the base's end answers elsewhere.
vllm serve {base} --tokenizer {folder}{template} --generation-config {folder} --dtype {dtype} \
--enable-lora --max-lora-rank {rank} --lora-modules {name}={folder}""",
        ),
        Engine(
            name="sglang",
            title="SGLang",
            url="http://localhost:30000/v1",
            max_lora_ranks=_RANKS,
            tokenize_path="/tokenize",
            commands="python -m sglang.launch_server --model-path {folder} --served-model-name {name} --dtype {dtype}",
            adapter_commands="""\
# Tokenizer, template and the tokens that end answers are the adapter's, not the base's.
python -m sglang.launch_server --model-path {base} --tokenizer-path {folder}{template} \
--json-model-override-args {stops} --dtype {dtype} \
--enable-lora --max-lora-rank {rank} --lora-paths {name}={folder}""",
        ),
        Engine(
            name="llama.cpp",
            title="llama.cpp",
            reads_gguf=True,
            commands="""\
llama-server -m {weights} --jinja -c {context}
# Smaller, and less exact:
llama-quantize {weights} {quantized} Q4_K_M""",
        ),
        Engine(
            name="ollama",
            title="Ollama",
            url="http://localhost:11434/v1",
            reads_gguf=True,
            takes_token_ids=False,
            commands="""\
cd {folder} && ollama create {name} -f Modelfile && ollama run {name}
# Ollama guesses the template from that in the file: the command below finds a wrong guess.""",
        ),
        Engine(name="openai", title="the server", tokenize_path="/tokenize", exports=False),
    )
}
"""Every engine by the name that options use."""


IGNORED_KEYS = ("target_parameters", "rank_pattern", "alpha_pattern")
"""Keys of an adapter's config that released servers do not read (vllm#41384, November 2026)."""

_REFUSED_KEYS = ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication")


def serving_problems(config: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return why the engine would not serve this adapter as it was trained; nothing for one that it serves."""
    if not engine.max_lora_ranks:
        return [f"{engine.title} serves full models"]
    if config.get("peft_type") != "LORA":
        return [f"{engine.title} does not serve adapters of the type {config.get('peft_type')}"]
    problems = [f"{engine.title} silently ignores `{key}`" for key in IGNORED_KEYS if config.get(key)]
    problems += [f"{engine.title} does not support `{key}`" for key in _REFUSED_KEYS if config.get(key)]
    if config.get("bias", "none") != "none":
        problems.append(f"{engine.title} does not support trained biases (`bias: {config['bias']}`)")
    if config["r"] > max(engine.max_lora_ranks):
        problems.append(f"its rank of {config['r']} is above the largest limit, {max(engine.max_lora_ranks)}")
    return problems


def find_engine(name: str, *, option: str) -> Engine:
    """Return the engine; raises UserError with the engines that the option accepts."""
    engine = ENGINES.get(name)
    accepted = [each.name for each in ENGINES.values() if each.exports or option != "--for"]
    if engine is None or name not in accepted:
        raise UserError(f"{option} {name}: there is no such engine. Write one of: {', '.join(accepted)}.")
    return engine
