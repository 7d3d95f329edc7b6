"""Tests of finetune.model.positions."""
