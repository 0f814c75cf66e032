"""What offload strategies are made of."""
