"""Rows become tokens and the targets among them."""
