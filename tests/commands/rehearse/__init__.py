"""Tests of `finetune rehearse`."""
