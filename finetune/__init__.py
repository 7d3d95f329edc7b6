"""Fine-tune transformer models on Hugging Face Accelerate: the same loss under every strategy."""

__version__ = "0.2.0"
