"""Values inside of a model: the places where sides are compared, a side's tensors on disk, and differences between two sides."""
