"""Generation: greedy tokens are what one forward over the whole sequence says, and so are the rows read on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.address import Address
from interp_core.checks import apart
from interp_core.operations import Add
from interp_core.results import Completion
from interp_core.testing.served import Subject
from interp_core.testing.writes import _vector, _width

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["captured_generation_faults", "generation_faults"]

_NEW = 5


def generation_faults(subject: Subject) -> Iterator[str]:
    """``generate``, a batch of it, and ``generate_stream`` agree, and log-probabilities are those of the tokens."""
    model, prompt = subject.model, subject.prompts[0]
    done = model.generate(prompt, max_tokens=_NEW, ignore_eos=True, n_logprobs=3)
    if len(done.token_ids) != _NEW or done.finish_reason != "length":
        yield f"{len(done.token_ids)} tokens and finish_reason {done.finish_reason!r} came of max_tokens={_NEW}"
    if tuple(done.prompt_token_ids) != tuple(prompt):
        yield "prompt_token_ids are not the prompt"
    yield from _likely(done)
    yield from _streamed(subject, list(done.token_ids))
    several = model.generate(subject.prompts, max_tokens=_NEW, ignore_eos=True)
    if tuple(several[0].token_ids) != tuple(done.token_ids):
        yield "the first prompt of a batch gets other tokens than alone"
    drawn = [model.generate(prompt, max_tokens=_NEW, temperature=1.0, seed=7, ignore_eos=True) for _ in range(2)]
    if drawn[0].token_ids != drawn[1].token_ids:
        yield "the same seed gives other tokens"


def _likely(done: Completion) -> Iterator[str]:
    """Three log-probabilities per greedy token, the best first, and the best is the token's."""
    if len(done.logprobs or ()) != len(done.token_ids):
        yield "there is not one set of log-probabilities per new token"
    for token, best in zip(done.token_ids, done.logprobs or (), strict=False):
        values = [entry.logprob for entry in best]
        if len(best) != 3 or values != sorted(values, reverse=True) or max(values) > 1e-6:
            yield f"three log-probabilities were asked for, and these came: {values}"
        elif best[0].token_id != token:
            yield f"the greedy token {token} is not the most likely one by its own log-probabilities"


def _streamed(subject: Subject, tokens: list[int]) -> Iterator[str]:
    steps = list(subject.model.generate_stream(subject.prompts[0], max_tokens=_NEW, ignore_eos=True))
    if [step.token_id for step in steps] != tokens:
        yield "generate_stream gives other tokens than generate"
    served = subject.profile.refusal("step_logits") is None
    for step in steps:
        if served != (step.logits is not None):
            yield f"step_logits are {'' if served else 'not '}declared, and a step's logits are {step.logits}"
        elif step.logits is not None and int(step.logits.argmax()) != step.token_id:
            yield f"the greedy token {step.token_id} is not the argmax of its own step's logits"


def captured_generation_faults(subject: Subject, tolerance: float) -> Iterator[str]:
    """Rows read while generating are those of one forward over prompt and new tokens, all but the last token's."""
    model, prompt, addresses = subject.model, subject.prompts[0], subject.readable()
    done, grown = model.capture_generation(prompt, addresses, max_tokens=_NEW, ignore_eos=True)
    whole = [*prompt, *done.token_ids][:-1]
    once = model.run_with_cache(whole, addresses)
    for address in addresses:
        if grown[address].shape != once[address].shape:
            rows, wanted = list(grown[address].shape), list(once[address].shape)
            yield f"{address} is {rows} after generating; prompt and new tokens less one are {wanted}"
        elif _finite_apart(grown[address], once[address]) > tolerance:
            yield f"{address} differs between generating and one forward over the same tokens"
    if Address("lm_head") in once:
        logits = once["lm_head"][0]
        forced = [int(row.argmax()) for row in logits[len(prompt) - 1 :]]
        if forced != list(done.token_ids):
            yield f"greedy tokens {list(done.token_ids)} are not the argmax of one forward over them, {forced}"
    if subject.profile.refusal("steer") is None:
        yield from _steered(subject)


def _steered(subject: Subject) -> Iterator[str]:
    """Steering of generated positions alone leaves the prompt's rows, and changes those behind it."""
    model, prompt = subject.model, subject.prompts[0]
    readable = set(subject.readable())
    usable = [a for a in subject.writable() if a in readable and subject.profile.specs[a.name].positional]
    for address in usable[:1]:
        _, plain = model.capture_generation(prompt, [address], max_tokens=3, ignore_eos=True)
        vector = _vector(_width(subject, address), float(plain[address].abs().max()))
        with model.steer(Add(address, vector), prompt=False):
            _, steered = model.capture_generation(prompt, [address], max_tokens=3, ignore_eos=True)
        n = len(prompt)
        if apart(steered[address][0, :n], plain[address][0, :n]) > subject.exact:
            yield f"steering {address} with prompt=False changes it at positions of the prompt"
        if steered[address].shape[1] > n and apart(steered[address][0, n], plain[address][0, n]) <= 1e-6:
            yield f"steering {address} with prompt=False changes nothing at the first new token"


def _finite_apart(one: Tensor, other: Tensor) -> float:
    if bool((one.isinf() != other.isinf()).any()):
        return float("inf")
    return apart(one.double().nan_to_num(neginf=0.0), other.double().nan_to_num(neginf=0.0))
