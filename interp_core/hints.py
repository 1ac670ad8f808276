"""What the numbers show where an identity fails: a factor, an order or a part that the facts did not state, in words.

Nothing here proves a point. It tells the reader of a failed identity which fact, or which binding, to look at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from interp_core.checks import Check, Get
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.fits import fit_combination, fit_factor, fit_gain, normalised
from interp_core.hints_attention import heads_hints
from interp_core.identities import activations
from interp_core.verdicts import listed_layers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["find_hints"]

_CONTRIBUTIONS: Final = ("attn_out_post", "mlp_out_post", "attn_out", "mlp_out")
_KINDS: Final = {"rms": "an RMS norm", "layer": "a layer norm"}

Found = Iterator[str]


def find_hints(facts: ModelFacts, get: Get, failed: Iterable[Check], tolerance: float) -> list[str]:
    """One sentence per thing that the numbers show, with the layers where they do.

    Args:
        facts: of the trunk.
        get: captured rows.
        failed: the identities that the tensors contradict.
        tolerance: largest error of an explanation.
    """
    layers: dict[str, list[int]] = {}
    for at in sorted({check.layer for check in failed if check.layer is not None}):
        mine = [check for check in failed if check.layer == at]
        for look in (_sums, _posts, _inputs, _head_norms, _neurons, _order, heads_hints):
            for text in look(facts, facts.layers[at], get, mine, tolerance):
                layers.setdefault(text, []).append(at)
    found = [f"{text} ({listed_layers(where)})" for text, where in layers.items()]
    ends = [check for check in failed if check.layer is None]
    return [*found, *_start(facts, get, ends, tolerance), *_end(facts, get, ends, tolerance)]


def _speaks(checks: list[Check], *names: str) -> bool:
    """Whether a failed identity is about all of ``names``."""
    return any(set(names) <= set(check.proves) for check in checks)


def _multiplier(facts: ModelFacts) -> str:
    stated = facts.residual_multiplier
    return "no multiplier" if stated == 1.0 else f"the multiplier {stated:g}"


def _sums(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """What a sublayer adds, as a sum of few contributions of this layer or its neighbours."""
    at = layer.index
    steps: list[tuple[str, list[str], str]] = [
        ("resid_pre", ["attn_out_post"], "resid_mid"),
        ("resid_mid", ["mlp_out_post"], "resid_post"),
    ]
    if layer.parallel:
        steps = [("resid_pre", ["attn_out_post", "mlp_out_post"], "resid_post")]
    for before, stated, after in steps:
        first, last = get(before, at), get(after, at)
        if first is None or last is None or not _speaks(failed, *stated, after):
            continue
        parts: dict[str, Tensor] = {}
        for where, near in ((at, ""), (at - 1, " of the layer before"), (at + 1, " of the next layer")):
            if 0 <= where < facts.n_layers:
                captured = {f"{name}{near}": get(name, where) for name in _CONTRIBUTIONS}
                parts |= {name: part for name, part in captured.items() if part is not None}
        # A residual may be ten thousand times a contribution, and what it was rounded to remains in the difference.
        numbers = fit_combination(last.double() - first.double(), parts, max(tolerance, 1e-3))
        terms = [_term(number, name) for name, number in numbers.items()]
        if terms and terms != stated:
            factor = f", and the facts state {_multiplier(facts)}" if terms != list(numbers) else ""
            yield f"{after} - {before} is {' plus '.join(terms)}: by the facts it is {' plus '.join(stated)}{factor}"


def _term(number: float, name: str) -> str:
    return name if abs(number - 1.0) < 1e-3 else f"{number:.4g} times {name}"


def _posts(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """What a contribution to the residual is made of."""
    raws = {name: get(name, layer.index) for name in ("attn_out", "mlp_out")}
    for raw, normed in (("attn_out", facts.attn_post_norm), ("mlp_out", facts.mlp_post_norm)):
        post = get(f"{raw}_post", layer.index)
        if post is None or not _speaks(failed, raw, f"{raw}_post"):
            continue
        for name, source in raws.items():
            found = "" if source is None else _how(facts, source, post, tolerance)
            if found and not (name == raw and found == "as it is" and not normed and facts.residual_multiplier == 1.0):
                stated = "a norm there" if normed else f"no norm there, and {_multiplier(facts)}"
                yield f"{raw}_post is {name} {found}: the facts state {raw}, {stated}"
                break


def _inputs(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """What attention and MLP read."""
    at = layer.index
    pre, attn = get("resid_pre", at), get("attn_out_post", at)
    added = None if pre is None or attn is None else pre + attn
    sources = {"resid_pre": pre, "resid_mid": get("resid_mid", at), "resid_pre + attn_out_post": added}
    stated = {
        "attn_in": ("resid_pre", facts.attn_pre_norm),
        "mlp_in": ("resid_pre" if layer.parallel else "resid_mid", facts.mlp_pre_norm),
    }
    for target, (source, normed) in stated.items():
        after = get(target, at)
        if after is None or not _speaks(failed, target):
            continue
        found = {name: _how(facts, x, after, tolerance) for name, x in sources.items() if x is not None}
        name = next((name for name, how in found.items() if how), None)
        if name is not None:
            expected = f"{source} through {_words(facts)}" if normed else f"{source} as it is"
            order = _order_of(target, name, layer)
            yield f"{target} is {name} {found[name]}: by the facts it is {expected}{order}"


def _words(facts: ModelFacts) -> str:
    return _KINDS.get(facts.norm, facts.norm)


def _order_of(target: str, source: str, layer: LayerFacts) -> str:
    if target == "mlp_in" and source == "resid_pre" and not layer.parallel:
        return "; so attention and MLP run in parallel, and not one after the other"
    if target == "mlp_in" and source != "resid_pre" and layer.parallel:
        return "; so attention and MLP run one after the other, and not in parallel"
    return ""


def _head_norms(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """How the two sides of the norms of queries and keys differ."""
    for letter in "qk":
        sides = [f"{letter}_norm_in", f"{letter}_norm_out"]
        before, after = (get(name, layer.index) for name in sides)
        if before is None or after is None or not _speaks(failed, *sides):
            continue
        for one, other, names in ((before, after, sides[::-1]), (after, before, sides)):
            found = _how(facts, one, other, tolerance)
            if found:
                expected = f"{sides[1]} is {sides[0]} through {_words(facts)}"
                yield f"{names[0]} is {names[1]} {found}: by the facts {expected}"
                break


def _how(facts: ModelFacts, source: Tensor, target: Tensor, tolerance: float) -> str:
    if source.shape != target.shape:
        return ""
    factor, error = fit_factor(source, target)
    if error <= tolerance:
        return "as it is" if abs(factor - 1.0) < 1e-3 else f"times {factor:.4g}"
    kind = _norm_of(facts, source, target, tolerance)
    return f"through {kind}" if kind else ""


def _norm_of(facts: ModelFacts, source: Tensor, target: Tensor, tolerance: float) -> str:
    """The kind of norm, and its epsilon where that is another than the facts state; empty if none fits."""
    before, after = source.double(), target.double()
    for eps in dict.fromkeys((facts.norm_eps, 1e-6, 1e-5, 1e-12, 1e-8)):
        for kind, words in sorted(_KINDS.items(), key=lambda item: item[0] != facts.norm):
            centred = kind == "layer"
            error, _ = fit_gain(normalised(before, eps, centred=centred), after, centred=centred)
            if error <= tolerance:
                return words if eps == facts.norm_eps else f"{words} of epsilon {eps:g}"
    return ""


def _neurons(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """Which activation, and which branch it is put on."""
    gate, linear, act = (get(name, layer.index) for name in ("mlp_pre", "mlp_pre_linear", "mlp_act"))
    if gate is None or act is None or not _speaks(failed, "mlp_act", "mlp_pre"):
        return
    ways: list[tuple[str, Callable[[Callable[[Tensor], Tensor]], Tensor]]] = [("{}(mlp_pre)", lambda f: f(gate))]
    if linear is not None:
        ways = [
            ("{}(mlp_pre) times mlp_pre_linear", lambda f: f(gate) * linear),
            ("{}(mlp_pre_linear) times mlp_pre", lambda f: f(linear) * gate),
        ]
    for name, function in activations().items():
        for words, made in ways:
            if (number := fit_factor(made(function), act))[1] <= tolerance:
                yield f"mlp_act is {_term(number[0], words.format(name))}: the facts state {facts.activation}(mlp_pre)"
                return


def _order(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """Which block's input a block's output is."""
    post = get("resid_post", layer.index)
    if post is None or not any(check.identity.startswith("resid_post is the next") for check in failed):
        return
    for other in facts.layers:
        pre = get("resid_pre", other.index)
        if pre is not None and pre.shape == post.shape and bool((pre == post).all()):
            yield f"resid_post is resid_pre.{other.index}, {other.index - layer.index} layers on: expected is the next"


def _start(facts: ModelFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """Which block's input the embeddings are, and how."""
    embeddings = get("embeddings", None)
    if embeddings is None or not _speaks(failed, "embeddings"):
        return
    stated = 1.0 if facts.embedding_scale_inside else facts.embedding_scale
    for layer in facts.layers:
        pre = get("resid_pre", layer.index)
        found = "" if pre is None else _how(facts, embeddings, pre, tolerance)
        if found:
            yield f"resid_pre.{layer.index} is embeddings {found}: by the facts resid_pre.0 is, times {stated:g}"
            return


def _end(facts: ModelFacts, get: Get, failed: list[Check], tolerance: float) -> Found:
    """What the final norm's output is made of."""
    last, final = get("resid_post", facts.last_layer), get("final_norm", None)
    if last is None or final is None or not _speaks(failed, "final_norm"):
        return
    found = _how(facts, last, final, tolerance)
    if found:
        yield f"final_norm is the last resid_post {found}: by the facts it is that through {_words(facts)}"
