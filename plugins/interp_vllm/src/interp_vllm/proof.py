"""The proof of a compiled engine's taps, before it serves anything.

The same engine runs a prompt twice: by its graph with the declared taps, and by the Python forward of the same weights
with the hooked backend's own hooks. Every tap has to give the same rows, and every write has to have the same effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.operations import Add
from interp_core.profile import ModelProfile
from interp_core.requests import ForwardRequest, ForwardResult, Read, Sampling, Where, Write
from interp_vllm.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["prove"]

_LENGTH: Final = 9
_AT: Final = frozenset({2, 5})
_TOP: Final = 8
_TOLERANCE: Final = {"float32": 1e-3, "float64": 1e-3}
_LOOSE: Final = 0.08


async def prove(engine: Engine, profile: ModelProfile) -> None:
    """Prove every declared tap and write site.

    Raises:
        BackendUnavailable: one of them is not what it should be; the message names it.
    """
    prompt = _prompt(profile)
    reads = ForwardRequest(token_ids=prompt, reads=tuple(Read(address=a) for a in profile.static_points))
    await engine.hooked(True)
    try:
        (wanted,) = await engine.run([reads])
        writes = [_writing(prompt, address, wanted, profile) for address in profile.static_writes]
        effects = await _answers(engine, [_plain(prompt), *writes])
    finally:
        await engine.hooked(False)
    (found,) = await engine.run([reads])
    _compare_reads(profile, found, wanted)
    answers = await _answers(engine, [_plain(prompt), *writes])
    _compare_writes(profile, answers, effects)


def _prompt(profile: ModelProfile) -> tuple[int, ...]:
    """Ids from all over the vocabulary, none twice."""
    vocab = profile.facts.vocab_size
    return tuple((7 + i * (vocab // (_LENGTH + 1) + 1)) % vocab for i in range(_LENGTH))


def _plain(prompt: tuple[int, ...]) -> ForwardRequest:
    return ForwardRequest(token_ids=prompt, sampling=Sampling(max_tokens=1), n_logprobs=_TOP)


def _writing(prompt: tuple[int, ...], address: Address, rows: ForwardResult, profile: ModelProfile) -> ForwardRequest:
    import torch

    shape = profile.shape(address)
    known = rows.rows.get(address)
    size = float(known.float().pow(2).mean().sqrt()) if known is not None else 1.0
    # Different at each site, so that two that were exchanged do not look alike.
    width = torch.Size(shape).numel()
    angle = torch.arange(width) * (0.7 + 0.1 * (address.layer or 0))
    vector = torch.sin(angle) * 6.0 * size
    write = Write(operation=Add(address, vector), address=address, where=Where(positions=_AT))
    # The last position too, so that what is behind the last attention can be seen.
    last = Write(operation=Add(address, vector), address=address, where=Where(positions=frozenset({_LENGTH - 1})))
    sampling = Sampling(max_tokens=1)
    return ForwardRequest(token_ids=prompt, writes=(write, last), sampling=sampling, n_logprobs=_TOP)


async def _answers(engine: Engine, requests: Sequence[ForwardRequest]) -> list[dict[int, float]]:
    """Log-probabilities of the first new token, by id."""

    async def answer(request: ForwardRequest) -> dict[int, float]:
        name = engine.name()
        final: Any = None
        async for output in engine.steps(name, request):
            final = output
        await engine.collect([(name, request)])
        return {int(token): float(value.logprob) for token, value in final.outputs[0].logprobs[0].items()}

    return list(await asyncio.gather(*(answer(request) for request in requests)))


def _compare_reads(profile: ModelProfile, found: ForwardResult, wanted: ForwardResult) -> None:
    for address in profile.static_points:
        apart = _apart(found.rows[address], wanted.rows[address])
        if not apart <= _tolerance(found.rows[address]):
            raise BackendUnavailable(
                f"{profile.model_id}: the compiled tap at {address} does not hold what a Python forward has there "
                f"(relative difference {apart:.2g}), so this engine is not served"
            )


def _compare_writes(
    profile: ModelProfile, answers: Sequence[dict[int, float]], effects: Sequence[dict[int, float]]
) -> None:
    plain, kind = answers[0], profile.facts.dtype if profile.options["dtype"] == "auto" else profile.options["dtype"]
    for address, answer, effect in zip(profile.static_writes, answers[1:], effects[1:], strict=True):
        common = answer.keys() & effect.keys()
        apart = max((abs(answer[token] - effect[token]) for token in common), default=float("inf"))
        tolerance = 5e-3 if str(kind) in _TOLERANCE else 0.5
        if not common or apart > tolerance:
            raise BackendUnavailable(
                f"{profile.model_id}: writing {address} in the compiled forward does not do what it does in a Python "
                f"forward (log-probabilities differ by {apart:.2g}), so this engine is not served"
            )
        moved = max((abs(answer[token] - plain[token]) for token in answer.keys() & plain.keys()), default=1.0)
        if moved <= 1e-6:
            raise BackendUnavailable(
                f"{profile.model_id}: writing {address} in the compiled forward changes nothing, so this engine is "
                "not served"
            )


def _apart(x: Tensor, y: Tensor) -> float:
    wide, other = x.float(), y.float()
    return float((wide - other).abs().max() / other.abs().max().clamp(min=1e-9))


def _tolerance(rows: Tensor) -> float:
    return _TOLERANCE.get(str(rows.dtype).removeprefix("torch."), _LOOSE)
