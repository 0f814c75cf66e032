"""Makes updated weights of prompts: the step, the loop around it, and what they need."""
