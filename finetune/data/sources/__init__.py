"""Where rows come from: files here or in object storage, hub datasets, and what a source takes of them."""
