"""The origins of rows: files here or in object storage, hub datasets, and the part of them that a source reads."""
