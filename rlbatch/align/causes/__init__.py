"""Explains the first difference: what its place would hold if its module were computed in other ways."""
