"""Vectors of texts (`embedding`) and scores of queries and passages (`reranking`)."""
