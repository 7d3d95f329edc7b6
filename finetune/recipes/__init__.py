"""Complete, commented job files and the data generators of two of them."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the job files are."""
