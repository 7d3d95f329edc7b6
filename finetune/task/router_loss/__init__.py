"""Mixtures of experts: the load-balancing loss of their routers over a whole step, and the load of each expert."""
