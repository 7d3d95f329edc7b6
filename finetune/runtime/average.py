"""The words under which an optimizer keeps a moving average of the weights, for what trains and what saves."""

STATE = "average"
"""The key of a parameter's average among its optimizer state, beside `exp_avg`; float32, laid out as the parameter."""

DECAY = "average_decay"
"""The key in a parameter group of the share of the average that the next update keeps; absent where none is kept."""
