"""The data pipeline: sources, formats, chat templates, encoding, the prepared set, the order and the loader."""
