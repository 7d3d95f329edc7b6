"""Positions: how many a model is made for, and how its rotary embedding makes them."""
