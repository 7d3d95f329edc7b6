"""Answers about a run: is it the same under every strategy?"""
