"""Checks that a reward accepts its own labels as answers: one that refuses them teaches nothing."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlbatch.api import Prompt, Reward, RlbatchError, Sample, SampleGroup
from rlbatch.api.declarations import Scope
from rlbatch.rewards.score import prepare, score

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from transformers import PreTrainedTokenizerBase

FORMS: Mapping[str, str] = {"the label itself": "{}", "\\boxed{label}": "\\boxed{{{}}}", "#### label": "#### {}"}
"""Forms in which a reward may want an answer: what messages call it -> the format of the label."""
SHOWN_VALUES = 4


def verdicts(
    name: str, reward: Reward, scope: Scope, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, seconds: float
) -> Iterator[str]:
    """A line for each form: what the reward gives the prompts' own labels, written so.

    Args:
        name: The reward's.
        reward: The reward as it was built; it is called in a process of its own.
        scope: What a call of it gets; see ``RewardSpec``.
        prompts: Prompts with labels.
        tokenizer: The model's tokenizer.
        seconds: After which that process is ended.
    """
    for form, pattern in FORMS.items():
        samples = [_sample(prompt, pattern.format(_text(prompt.label)), tokenizer) for prompt in prompts]
        yield f"{form}: {_asked(name, reward, scope, samples, seconds)}"


def _text(label: Any) -> str:
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _sample(prompt: Prompt, response: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
    before, after = len(prompt.token_ids), len(tokens)
    mask = torch.tensor([0.0] * before + [1.0] * after)
    return Sample(prompt, 0, torch.tensor([*prompt.token_ids, *tokens]), mask, torch.zeros(before + after), response, "stop")


def _asked(name: str, reward: Reward, scope: Scope, samples: Sequence[Sample], seconds: float) -> str:
    """What the reward gives the samples, in words. It runs in a fork, which has the plugins already, and can be ended if it hangs."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_score, args=(name, reward, scope, list(samples), sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return f"no answer within {seconds:g} s"
        answer = receiver.recv()
    except EOFError:
        return "its process ended without an answer"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        return answer
    counts = Counter(f"{value:g}" for value in answer)
    shown = ", ".join(f"{value} for {count}" for value, count in counts.most_common(SHOWN_VALUES))
    return f"mean {sum(answer) / len(answer):g} ({shown}{', ...' if len(counts) > SHOWN_VALUES else ''})"


def _score(name: str, reward: Reward, scope: Scope, samples: Sequence[Sample], sender: Connection) -> None:
    groups = [SampleGroup(sample.prompt, [sample]) for sample in samples]
    try:
        prepare(name, reward)
        for scored in [groups] if scope == "rank" else [[group] for group in groups]:
            score(scored, {name: reward}, name)
        sender.send([value for group in groups for value in group.rewards])
    except RlbatchError as error:
        sender.send(str(error))
