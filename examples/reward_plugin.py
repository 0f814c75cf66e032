"""A reward: 1 if the label occurs in the response, else 0. Use it with `plugins=[examples/reward_plugin.py] reward=contains_label`."""

from rlbatch.api import hookimpl


def contains_label(samples):
    """One float a sample, in order."""
    return [1.0 if str(sample.prompt.label) in sample.response else 0.0 for sample in samples]


@hookimpl
def rlbatch_register_rewards():
    """Tells rlbatch the name."""
    return {"contains_label": contains_label}
