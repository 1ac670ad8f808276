"""From running generations to completions and streams of text: stop strings, reasons, several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from interp_core.cancellation import check_cancelled
from interp_core.requests import ForwardRequest, ForwardResult, GenerationRun, TokenLogprob
from interp_core.results import Completion, GenStep
from interp_core.text import TextStream

if TYPE_CHECKING:
    from interp_core.model import InterpModel

__all__ = ["complete", "stream"]


@define(eq=False)
class _Completing:
    """One generation on its way to a completion."""

    request: ForwardRequest
    run: GenerationRun
    text: TextStream | None
    done: bool = False
    _ids: list[int] = field(factory=list)
    _logprobs: list[tuple[TokenLogprob, ...]] = field(factory=list)

    def advance(self) -> None:
        """Take one more token, or find that there is none."""
        check_cancelled()
        step = next(self.run, None)
        if step is None:
            self.done = True
            return
        self._ids.append(step.token_id)
        self._logprobs.append(step.logprobs)
        if self.text is not None:
            self.text.push(step.token_id)
            self.done = self.text.stopped

    def completion(self) -> tuple[Completion, ForwardResult]:
        """What came of it, and its rows; it is closed."""
        result = self.run.result()
        stopped = self.text is not None and self.text.stopped
        reason = "stop" if stopped else self.run.finish_reason or "length"
        self.run.close()
        if self.text is not None:
            self.text.finish()
        completion = Completion(
            text=None if self.text is None else self.text.text,
            token_ids=self._ids,
            prompt_token_ids=self.request.token_ids,
            finish_reason=reason,
            logprobs=tuple(self._logprobs) if self.request.n_logprobs else None,
        )
        return completion, result


def complete(
    model: InterpModel, requests: Sequence[ForwardRequest], stops: tuple[str, ...]
) -> list[tuple[Completion, ForwardResult]]:
    """Run generations to their end, in the batches that the backend makes of them; results in the order given."""
    # Text decoders come first: they may be refused.
    texts = [model.text_stream(request.token_ids, stops) for request in requests]
    found: dict[int, tuple[Completion, ForwardResult]] = {}
    for batch in model.session.generate_together(requests):
        going = {i: _Completing(requests[i], run, texts[i]) for i, run in batch.items()}
        try:
            while going:
                for i, one in list(going.items()):
                    one.advance()
                    if one.done:
                        # At once, so that it costs its batch no more than it has to.
                        found[i] = one.completion()
                        del going[i]
        finally:
            for one in going.values():
                one.run.close()
    return [found[i] for i in range(len(requests))]


def stream(model: InterpModel, request: ForwardRequest, stops: tuple[str, ...]) -> Iterator[GenStep]:
    """One generation step by step; leaving it early ends it."""
    text = model.text_stream(request.token_ids, stops)
    run = model.session.generate(request)
    try:
        for step in run:
            piece = None
            if text is not None:
                piece = text.push(step.token_id)
                # The last step carries whatever text was still uncertain.
                piece += text.finish() if run.finish_reason is not None else ""
            yield GenStep(token_id=step.token_id, token_str=piece, logits=step.logits, logprobs=step.logprobs)
            if text is not None and text.stopped:
                return
    finally:
        run.close()
