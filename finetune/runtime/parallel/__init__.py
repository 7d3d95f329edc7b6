"""Groups of ranks that share the rows or the layers of a microbatch."""
