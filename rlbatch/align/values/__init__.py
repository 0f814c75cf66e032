"""What passes through a model: its places, tensors of a side on disk, and how far two sides are apart."""
