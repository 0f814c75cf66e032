"""Turns prompts into updated weights: the training step, the loop around it, and their parts."""
