"""The cost model: pure functions of sizes, bandwidths and counts; nothing here knows a job, a file or a device."""
