"""From prompts to updated weights: the step, the loop around it, and what they need."""
