"""A plugin whose engine is ``tests.engines.fake_generator`` in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

from rlbatch.api import RolloutContext, hookimpl
from rlbatch.engines.backend.hosted import EngineProgram, HostedOptions, HostedRollout, HostedSpec


def hosted(context: RolloutContext, options: HostedOptions) -> HostedRollout:
    start = {"folder": str(context.folder.resolve())}
    return HostedRollout(context, options, lambda _: EngineProgram("hosted", "tests.engines.fake_generator:FakeGenerator", start))


@hookimpl
def rlbatch_register_rollout_backends() -> Mapping[str, HostedSpec]:
    return {"hosted": HostedSpec(hosted, HostedOptions)}
