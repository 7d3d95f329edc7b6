"""Adapters: what learns beside a frozen base, through peft."""
