"""What a checkpoint is on disk: names of folders and files, the manifest, the JSON metadata, the tensor files."""
