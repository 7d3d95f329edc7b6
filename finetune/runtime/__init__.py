"""What every floor above needs of the process it runs in: ranks, seeds, files, signals, optional packages."""
