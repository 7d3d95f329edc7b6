"""The cost model: its assumptions, and pure functions of sizes, bandwidths and counts; no job, file or device."""
