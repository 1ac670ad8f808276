"""Every capability that is declared is used once, and gives what its row says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from interp_core.checks import apart, difference
from interp_core.discovery import one_line
from interp_core.functions import decode_residuals
from interp_core.operations import Apply
from interp_core.testing.served import Subject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ability_faults"]


def ability_faults(subject: Subject, uses: Mapping[str, Callable[[Any], Any]], path: str | None) -> Iterator[str]:
    """Use what is declared.

    Args:
        subject: the model under test.
        uses: per capability of the author's own, what uses it: it gets the model and raises if it does not work.
        path: a module's path, for ``module_path``; ``None`` leaves that capability to the backend's own suite.
    """
    known: dict[str, Callable[[Subject], Iterator[str]]] = {
        "attention": _attention,
        "logit_lens": _lens,
        "raw_logits": _raw,
        "apply": _apply,
        "gradients": _gradients,
        "module_path": lambda s: _module(s, path),
    }
    elsewhere = {"capture", "steer", "step_logits", "read_point", "write_point", "residual_stream"}
    for name in subject.profile.capabilities:
        if subject.profile.refusal(name) is not None or name in elsewhere:
            continue
        try:
            if name in uses:
                uses[name](subject.model)
            elif name in known:
                yield from known[name](subject)
            else:
                yield f"the capability {name!r} is declared but not proven: give uses = {{{name!r}: function}}"
        except Exception as error:  # noqa: BLE001 - becomes the finding
            yield f"the capability {name!r} is declared, and using it fails: {one_line(error)}"


def _attention(subject: Subject) -> Iterator[str]:
    layers = [layer.index for layer in subject.profile.facts.layers if layer.softmax]
    served = [i for i in layers if all(subject.profile.supports(f"{n}.{i}") for n in ("attn_scores", "value"))]
    prompt = subject.prompts[0]
    for layer, record in (subject.model.capture_attention(prompt, served) if served else {}).items():
        rows, value = subject.get(), record.value.transpose(0, 1)
        pairs = {"attn_scores": record.scores, "attn_probs": record.probs, "value": value}
        for name, got in pairs.items():
            want = rows(name, layer)
            if want is not None and not bool((got == want).all()) and apart(got.exp(), want.exp()) > 2e-5:
                yield f"capture_attention gives another {name} of layer {layer} than the point"


def _lens(subject: Subject) -> Iterator[str]:
    found = subject.model.logit_lens(subject.prompts[0])
    if list(found.layers) != list(range(subject.profile.facts.n_layers)):
        yield f"logit_lens decodes the layers {list(found.layers)}"
    finished = _logits(subject)
    if finished is not None and finished.shape[-1] > 1:
        last = _residual(subject)
        error = difference(subject.model.decode_residuals(last), finished)
        if error > 2e-4:
            yield f"decode_residuals of the last layer is not the model's own logits: they differ by {error:.1e}"


def _raw(subject: Subject) -> Iterator[str]:
    rows = subject.get()("lm_head", None)
    if subject.profile.refusal("logit_lens") is None and rows is not None:
        error = difference(decode_residuals(subject.model, _residual(subject)), rows)
        if error > 2e-4:
            yield f"the raw logits of the last layer are not lm_head: they differ by {error:.1e}"


def _residual(subject: Subject) -> Tensor:
    rows = subject.get()("resid_post", subject.profile.facts.n_layers - 1)
    assert rows is not None, "the lens is declared, and the last resid_post is not served"
    return rows


def _logits(subject: Subject) -> Tensor | None:
    """``lm_head`` with the family's multiplier and softcap: what the model itself gives out."""
    import torch

    facts, rows = subject.profile.facts, subject.get()("lm_head", None)
    if rows is None:
        return None
    rows = rows * facts.logit_multiplier
    return rows if facts.final_softcap is None else torch.tanh(rows / facts.final_softcap) * facts.final_softcap


def _apply(subject: Subject) -> Iterator[str]:
    address = next((a for a in subject.writable() if a in subject.readable()), None)
    if address is None:
        return
    plain = subject.rows()[address]
    operation = Apply(address, lambda x: 2.0 * x + 1.0)
    got = subject.model.run_with_cache(subject.prompts[0], [address], steering=[operation])[address][0]
    if difference(got, 2.0 * plain + 1.0) > 2e-5:
        yield f"a callable applied to {address} is not what is read there afterwards"


def _gradients(subject: Subject) -> Iterator[str]:
    import torch

    ends = subject.ends()
    source = next((a for a in subject.readable() if a.name == "embeddings"), None)
    if source is None or not ends:
        return
    cache = subject.model.run_with_cache(subject.prompts[0], [source, ends[0]], detach=False)
    (slope,) = torch.autograd.grad(cache[ends[0]].square().sum(), cache[source])
    if not bool(slope.isfinite().all()) or not bool(slope.any()):
        yield f"the gradient of {ends[0]} by {source} is zero or not finite"


def _module(subject: Subject, path: str | None) -> Iterator[str]:
    if path is None:
        return
    rows = subject.model.run_with_cache(subject.prompts[0], [f"path.{path}"])[f"path.{path}"]
    if rows.shape[:2] != (1, len(subject.prompts[0])):
        yield f"path.{path} is {list(rows.shape)}, not one row per position"
