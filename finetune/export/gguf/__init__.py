"""Writes a model folder as a GGUF file for llama.cpp and Ollama."""
