"""Where the time of a window of steps went: phases, a trace of each rank, the memory, and the table of them all."""
