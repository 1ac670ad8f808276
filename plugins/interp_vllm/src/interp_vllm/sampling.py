"""The core's sampling as vLLM's parameters."""

from __future__ import annotations

from typing import Any

from interp_core.requests import ForwardRequest

__all__ = ["sampling_params"]


def sampling_params(request: ForwardRequest, end_tokens: frozenset[int], *, whole: bool) -> Any:
    """vLLM's ``SamplingParams`` of a request.

    Args:
        request: what to run; without sampling it is a forward, which vLLM can only give as one discarded token.
        end_tokens: ids that end generation where the request names none.
        whole: report once, at the end.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    common: dict[str, Any] = {"detokenize": False, "output_kind": kind}
    sampling = request.sampling
    if sampling is None:
        return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, **common)
    ends = end_tokens if sampling.stop_token_ids is None else sampling.stop_token_ids
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=sorted(ends),
        # The model's own end tokens are in the list above, where this process decides over them.
        ignore_eos=True,
        logprobs=request.n_logprobs or None,
        **common,
    )
