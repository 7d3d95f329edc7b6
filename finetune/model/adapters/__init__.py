"""Adapters: parameters trained on top of a frozen base, through peft."""
