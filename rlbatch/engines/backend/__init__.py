"""What a rollout backend is made of whose engine runs in a process of its own."""
