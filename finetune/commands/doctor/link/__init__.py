"""The ranks of a launch: how they meet, what is measured between them, and which strategy suits that."""
