"""A package, so that the workers of a rank pool import test functions by the names that pytest gives them."""
