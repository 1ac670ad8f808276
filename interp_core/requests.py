"""The contract between the core and a backend: validated requests in, rows and steps out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve, field, frozen

from interp_core.address import Address
from interp_core.operations import Operation, Replace

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ForwardRequest",
    "ForwardResult",
    "GenerationRun",
    "Read",
    "Sampling",
    "Step",
    "TokenLogprob",
    "Where",
    "Write",
    "narrowed",
    "written",
]


@frozen(kw_only=True)
class Where:
    """Which positions of one request an operation writes.

    Attributes:
        positions: absolute positions, counted from the request's first token; ``None`` for all.
        prompt: whether prompt positions are written.
        generated: whether positions of generated tokens are written, when they are fed back.
    """

    positions: frozenset[int] | None = None
    prompt: bool = True
    generated: bool = True

    def rows(self, start: int, length: int, prompt_length: int) -> list[int] | slice:
        """Row numbers, within a chunk that holds positions ``start .. start + length - 1``, to be written."""
        first = start if self.prompt else max(start, prompt_length)
        end = start + length if self.generated else min(start + length, prompt_length)
        if first >= end:
            return []
        if self.positions is None:
            return slice(first - start, end - start)
        return [p - start for p in sorted(self.positions) if first <= p < end]


@frozen(kw_only=True, eq=False)
class Write:
    """One operation, on one address, with its vectors made into tensors, and where it applies."""

    operation: Operation
    address: Address
    where: Where = Where()


def written(write: Write, start: int, length: int, prompt_length: int) -> tuple[list[int], list[int]]:
    """A write as it concerns a chunk that holds positions ``start .. start + length - 1`` of its request.

    Returns:
        Row numbers within the chunk, and for each its number among all positions that the write names, in order of
        position: the row of a ``Replace`` that holds one row per position.
    """
    where = write.where
    found = where.rows(start, length, prompt_length)
    rows = list(range(length))[found] if isinstance(found, slice) else found
    if where.positions is None:
        return rows, [start + row for row in rows]
    before = sum(1 for p in where.positions if p < start)
    return rows, list(range(before, before + len(rows)))


def narrowed(write: Write, start: int, length: int, prompt_length: int) -> tuple[list[int], Operation]:
    """The rows of a chunk that a write concerns, and its operation with no more rows of its own than those."""
    rows, numbers = written(write, start, length, prompt_length)
    operation: Any = write.operation
    if isinstance(operation, Replace) and operation.value.dim() == 2 and rows:
        operation = evolve(operation, value=operation.value[numbers])
    return rows, operation


@frozen(kw_only=True)
class Read:
    """One address to read.

    Attributes:
        address: what to read.
        positions: absolute positions wanted, in the order wanted; ``None`` for all.
    """

    address: Address
    positions: tuple[int, ...] | None = None


@frozen(kw_only=True)
class Sampling:
    """How new tokens are chosen.

    Attributes:
        max_tokens: most new tokens.
        temperature: 0 for greedy choice.
        top_k: keep this many most likely tokens; ``None`` for all.
        top_p: keep the smallest set of tokens with at least this mass; ``None`` for all.
        min_p: keep tokens with at least this fraction of the most likely one's mass; ``None`` for all.
        repetition_penalty: above 1, tokens of prompt and completion become less likely: their logits are divided by it
            where positive and multiplied where negative, before everything else, also for greedy choice.
        seed: seed of this request's own generator; ``None`` for the process's.
        stop_token_ids: ids that end generation, the model's own end-of-text ids included.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] | None = None


@frozen(kw_only=True, eq=False)
class ForwardRequest:
    """One prompt and everything that is wanted of it.

    Attributes:
        token_ids: the prompt; never empty.
        reads: what to read; empty reads nothing.
        writes: what to change, in order.
        sampling: how to generate, or ``None`` for one forward over the prompt.
        n_logprobs: top log-probabilities per new token.
        want_logits: whether steps carry the full row of logits.
        detach: whether rows are cut from the autograd graph.
        keep_on_device: whether rows stay on the model's device.
    """

    token_ids: tuple[int, ...]
    reads: tuple[Read, ...] = ()
    writes: tuple[Write, ...] = ()
    sampling: Sampling | None = None
    n_logprobs: int = 0
    want_logits: bool = False
    detach: bool = True
    keep_on_device: bool = False


@frozen
class TokenLogprob:
    """A token and its log-probability (natural logarithm, of the model's own distribution)."""

    token_id: int
    logprob: float


@frozen(kw_only=True, eq=False)
class Step:
    """One new token.

    Attributes:
        token_id: the token chosen.
        logits: ``[vocab]`` float32, the model's own before any penalty, or ``None``.
        logprobs: the most likely tokens, best first, as many as were asked for.
    """

    token_id: int
    logits: Tensor | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprob, ...] = ()


@frozen(kw_only=True, eq=False)
class ForwardResult:
    """What came of one request.

    Attributes:
        rows: per address, ``[positions, *axes]`` in token order (``[heads, query, key]`` for
            attention matrices), copies in the model's dtype.
    """

    rows: Mapping[Address, Tensor] = field(factory=dict)


class GenerationRun(Protocol):
    """A running generation: an iterator of steps that can be ended early and then gives its rows."""

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` after an end token, ``"length"`` after the last token allowed, else ``None``."""

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def result(self) -> ForwardResult:
        """Rows of all positions that went through the forward so far (prompt + new - 1)."""

    def close(self) -> None:
        """End it and free what it holds. May be called twice."""
