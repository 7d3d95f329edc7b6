"""Complete, commented job files and the data generator of the quickstart."""
