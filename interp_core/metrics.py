"""What a run is judged by: a token's logit, the difference of two, or any function of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from interp_core.errors import RequestError
from interp_core.scalars import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["Metric", "read_metric", "read_token"]


@frozen(kw_only=True, eq=False)
class Metric:
    """A number per prompt.

    Attributes:
        function: from the logits of one prompt, ``[pos, vocab]``, to a scalar tensor.
        last_only: whether it looks at the last position alone, so that no other need be read.
        name: for people.
    """

    function: Callable[[Tensor], Any]
    last_only: bool
    name: str

    def __call__(self, logits: Tensor) -> Tensor:
        """The number for one prompt, as a scalar tensor that keeps its place in the autograd graph.

        Raises:
            RequestError: the caller's own function failed, or gave something else than one real number.
        """
        import torch

        try:
            value = torch.as_tensor(self.function(logits))
        except Exception as error:
            raise RequestError(f"the metric failed on logits {list(logits.shape)}: {error}") from error
        if value.numel() != 1 or value.is_complex():
            raise RequestError(f"a metric gives one number for logits [pos, vocab]; this gave {list(value.shape)}")
        return value.reshape(())


def read_metric(model: InterpModel, metric: Any) -> Metric:
    """A caller's metric.

    Args:
        model: the model.
        metric: a token (its id, or its text), whose logit at the last position counts; a pair of tokens, whose
            logits' difference counts; or a callable from logits ``[pos, vocab]`` to one number.

    Raises:
        RequestError: it is none of these, or a text that is not one token.
    """
    if callable(metric):
        return Metric(function=metric, last_only=False, name=getattr(metric, "__name__", "metric"))
    if isinstance(metric, (tuple, list)):
        if len(metric) != 2:
            raise RequestError(f"a metric of tokens is one token, or a pair whose logits differ; not {metric!r}")
        wanted, other = (read_token(model, token) for token in metric)
        return Metric(
            function=lambda logits: logits[-1, wanted] - logits[-1, other],
            last_only=True,
            name=f"logit of {metric[0]!r} less that of {metric[1]!r}",
        )
    token = read_token(model, metric)
    return Metric(function=lambda logits: logits[-1, token], last_only=True, name=f"logit of {metric!r}")


def read_token(model: InterpModel, token: Any) -> int:
    """The id of one token, given as an id or as text.

    Raises:
        RequestError: it is neither, not in the vocabulary, or a text of several tokens.
    """
    if isinstance(token, str):
        ids = model.tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise RequestError(f"{token!r} is {len(ids)} tokens of this model ({ids}), not one; give a token's id")
        return int(ids[0])
    number = whole_number(token)
    if number is None or not 0 <= number < model.vocab_size:
        raise RequestError(f"a token is its text, or an id from 0 to {model.vocab_size - 1}, not {token!r}")
    return number
