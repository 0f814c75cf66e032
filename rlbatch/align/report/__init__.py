"""Runs the sides, and says what came of each: a sentence, a table, a page."""
