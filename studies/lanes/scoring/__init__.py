"""Scores of a stream: sliding windows, test-time training on what is scored, hints from earlier text."""
