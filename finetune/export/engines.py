"""The programs that serve exported models: what each reads, and how `finetune verify serving` reaches it."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    verifies: bool = True  # it is an engine of `verify serving`
    exports: bool = True  # `export --for` writes files for it


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
        ),
        Engine(
            name="sglang",
            title="SGLang",
            url="http://localhost:30000/v1",
            max_lora_ranks=_RANKS,
            tokenize_path="/tokenize",
        ),
        Engine(name="llama.cpp", title="llama.cpp", reads_gguf=True),
        Engine(name="ollama", title="Ollama", url="http://localhost:11434/v1", reads_gguf=True, takes_token_ids=False),
        Engine(name="trl", title="TRL", verifies=False, max_lora_ranks=(1 << 30,)),
        Engine(name="openai", title="the server", tokenize_path="/tokenize", exports=False),
    )
}
"""Every engine by the name that options use."""


def find_engine(name: str, *, option: str) -> Engine:
    """Return the engine; raises UserError that lists those that the option accepts."""
    engine = ENGINES.get(name)
    accepted = [each.name for each in ENGINES.values() if (each.exports if option == "--for" else each.verifies)]
    if engine is None or name not in accepted:
        raise UserError(f"{option} {name}: there is no such engine. Write one of: {', '.join(accepted)}.")
    return engine
