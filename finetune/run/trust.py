"""Whose word counts where a model brings code of its own: that of who calls now."""

from dataclasses import replace

from finetune.config.load import LoadedConfig


def with_trust(loaded: LoadedConfig, *, trust_remote_code: bool) -> LoadedConfig:
    """Return a run's own job with the caller's word in the place of what is written there.

    A run's folder may come from others, as a model's may: what its resolved.yaml allows, nobody here has allowed.
    """
    model = loaded.config.model.model_copy(update={"trust_remote_code": trust_remote_code})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))
