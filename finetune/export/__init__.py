"""Export of the trained model: complete, checked, and loadable without this package."""
