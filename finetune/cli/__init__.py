"""The command line: typed words become one call."""
