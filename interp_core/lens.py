"""The logit lens: each layer's residual through the final norm and the unembedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.errors import RequestError
from interp_core.functions import run_with_cache
from interp_core.results import LensResult
from interp_core.sampling import read_count
from interp_core.streams import read_reduction, reduced
from interp_core.tokens import read_layers, read_tokens, select_positions

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["Transport", "logit_lens"]

Transport = Mapping[int, Any] | Callable[[int, "Tensor"], Any]

_CHUNK: Final = 256
"""Rows decoded at once: a chunk of a 250,000-token vocabulary is then 256 MB of float32, not all layers' worth."""


def logit_lens(
    model: InterpModel,
    tokens: Any,
    layers: Sequence[int] | None = None,
    top_k: int = 5,
    *,
    positions: Any = None,
    steering: Any = None,
    reduction: Any = None,
    transport: Transport | None = None,
    progress: bool = False,
) -> LensResult:
    """Decode ``resid_post`` of each layer; on a trunk of several streams, a reduction of ``resid_streams``.

    Args:
        model: the model.
        tokens: one prompt.
        layers: layers to decode; ``None`` for all that run on text alone.
        top_k: tokens to keep per layer and position.
        positions: absolute positions, a slice, or ``"last"``; ``None`` for all.
        steering: operations for this call.
        reduction: on a trunk of several residual streams, and only there, how the stack becomes one row: ``"mean"``,
            ``"sum"``, the number of one stream, or ``"head"`` for the model's own contraction.
        transport: what carries a layer's residual to where the unembedding reads it, such as the Jacobian of the last
            layers averaged over a data set, or a tuned lens: a matrix ``[d_model, d_model]`` per layer (``row @
            matrix.T``), or a callable from a layer and rows ``[rows, d_model]`` to such rows.
        progress: show a bar on standard error.

    Returns:
        A :class:`LensResult`. Probabilities are of the family's own logits, softcap and multiplier included.

    Raises:
        AddressError: a layer does not exist.
        CapabilityUnsupported: the lens is not valid on this trunk, or needs a reduction and none is named.
        RequestError: the tokens, positions or ``top_k`` are not valid, or ``transport`` lacks a layer or gives rows of
            another shape.
    """
    import torch
    from tqdm.auto import tqdm

    how = read_reduction(reduction, model.profile)
    batch = read_tokens(tokens, model.facts)
    if not batch.single:
        raise RequestError("logit_lens takes one prompt")
    wanted = read_layers(layers, model.n_layers)
    if layers is None:
        wanted = [layer for layer in wanted if model.facts.layers[layer].mixer != "cross_attention"]
    top_k = min(read_count("top_k", top_k), model.vocab_size)
    ids = batch.rows[0]
    chosen = select_positions(positions, len(ids))
    chosen = tuple(range(len(ids))) if chosen is None else chosen
    if not chosen:
        raise RequestError(f"positions={positions!r} select nothing of this prompt of {len(ids)} tokens")
    name = "resid_post" if how is None else "resid_streams"
    cache = run_with_cache(model, list(ids), [(name, i) for i in wanted], positions=chosen, steering=steering)
    by_layer = [cache[Address(name, i)][0] for i in wanted]
    if how is not None:
        by_layer = [reduced(rows, how) for rows in by_layer]
    if transport is not None:
        by_layer = [_carried(transport, layer, rows) for layer, rows in zip(wanted, by_layer, strict=True)]
    rows = torch.cat(by_layer)
    top_ids, top_probs = [], []
    chunks = rows.split(_CHUNK)
    for chunk in tqdm(chunks, desc="logit lens", disable=not progress, leave=False):
        ids_of_chunk, probs = model.session.top_tokens(chunk, top_k)
        top_ids.append(ids_of_chunk)
        top_probs.append(probs)
    shape = (len(wanted), len(chosen), top_k)
    return LensResult(
        token_ids=ids,
        layers=wanted,
        positions=chosen,
        top_ids=torch.cat(top_ids).reshape(shape),
        top_probs=torch.cat(top_probs).reshape(shape),
    )


def _carried(transport: Transport, layer: int, rows: Tensor) -> Tensor:
    import torch

    if isinstance(transport, Mapping):
        if layer not in transport:
            raise RequestError(f"transport has no map for layer {layer}")
        matrix = torch.as_tensor(transport[layer]).to(rows.dtype)
        if matrix.shape != (rows.shape[-1], rows.shape[-1]):
            raise RequestError(f"the map of layer {layer} is {list(matrix.shape)}, not a square of {rows.shape[-1]}")
        return rows @ matrix.T
    carried = transport(layer, rows)
    if not isinstance(carried, torch.Tensor) or carried.shape != rows.shape:
        shown = list(carried.shape) if isinstance(carried, torch.Tensor) else type(carried).__name__
        raise RequestError(f"transport gave {shown} for rows {list(rows.shape)} of layer {layer}")
    return carried.to(rows.dtype)
