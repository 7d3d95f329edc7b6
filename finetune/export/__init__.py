"""The model that a run leaves behind, loadable without this package."""
