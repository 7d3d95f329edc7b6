"""The run or model folder that a command is given, and whether Python code that comes with it may run."""

from dataclasses import replace

from finetune.config.load import LoadedConfig
from finetune.errors import UserError


def with_trust(loaded: LoadedConfig, *, trust_remote_code: bool) -> LoadedConfig:
    """Return a run's own job with the caller's word in the place of what is written there.

    A run's folder may come from others, as a model's may: what its resolved.yaml allows, nobody here has allowed.
    """
    model = loaded.config.model.model_copy(update={"trust_remote_code": trust_remote_code})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def require_trusted_metrics(own: LoadedConfig, wanted: LoadedConfig, *, trust_remote_code: bool) -> None:
    """Raise UserError where what is measured needs Python functions that only the run's own record names."""
    functions = set(_functions(own)) & set(_functions(wanted))
    if functions and not trust_remote_code:
        raise UserError(
            f"evaluate.generate.metrics: the run's {own.path.name} names the Python function "
            f"`{min(functions)}`, and its folder may come from others. If you trust it, write --trust-remote-code, or "
            "name your own job with --config."
        )


def _functions(loaded: LoadedConfig) -> tuple[str, ...]:
    evaluate = loaded.config.evaluate
    generate = evaluate.generate if evaluate is not None else None
    return tuple(name for name in (generate.metrics if generate is not None else ()) if ":" in name)
