"""The format of a checkpoint on disk: names of folders and files, manifest, JSON metadata and tensor files."""
