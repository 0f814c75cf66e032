"""Prompts: read, checked, tokenized, kept in files that ranks share, and drawn in an order; what is read of the model's folder for them."""
