"""A run taken step by step: what `finetune.api.session.Session` calls."""
