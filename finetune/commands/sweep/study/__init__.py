"""A search over ranges instead of a grid: which values come next, and which runs are given up."""
