"""A reward: the share of the label's words in the response. Use it with `plugins=[examples/reward_plugin.py] reward=contains_label`."""

from rlbatch.api import hookimpl


def contains_label(samples):
    """One float a sample, in order."""
    pairs = [(sample.prompt.label.split(), sample.response.split()) for sample in samples]
    return [sum(word in response for word in label) / len(label) for label, response in pairs]


@hookimpl
def rlbatch_register_rewards():
    """Tells rlbatch the name."""
    return {"contains_label": contains_label}
