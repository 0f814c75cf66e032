"""Runs the sides of a comparison, and reports each with a sentence, a table and a page."""
