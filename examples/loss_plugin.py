"""GSPO as a plugin: one importance ratio for a whole response. See docs/use/plugins.md."""

from rlbatch.api import LossSpec, PolicyLossOutputs, always, hookimpl


def my_gspo(inputs):
    """Called for every pack; losses and clipped are one value a token."""
    ratio = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - inputs.eps_clip, 1 + inputs.eps_clip_high)
    return PolicyLossOutputs(unclipped.maximum(clipped), (clipped > unclipped).float())


@hookimpl
def rlbatch_register_policy_losses():
    """Tells rlbatch the name."""
    return {"my_gspo": LossSpec(always(my_gspo), aggregations=("sequence_mean",))}
