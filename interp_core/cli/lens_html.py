"""The logit lens as one self-contained page: a heat map of layers by positions, details on hover."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.results import LensResult

__all__ = ["lens_page"]

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; background: #fff; }
table { border-collapse: separate; border-spacing: 2px; }
th { font-weight: 600; padding: .2rem .5rem; text-align: left; white-space: pre; }
th.layer { text-align: right; color: #666; font-weight: 400; }
td { padding: .25rem .5rem; white-space: pre; border-radius: 3px; }
td { font: 12px ui-monospace, monospace; }
td.dark { color: #fff; }
.scroll { overflow-x: auto; }
p { max-width: 60rem; }
"""


def lens_page(model: InterpModel, prompt: str, result: LensResult) -> str:
    """A complete HTML document; opens without a network."""
    tokens = model.to_str_tokens(list(result.token_ids))
    heads = "".join(f"<th>{html.escape(_shown(tokens[p]))}</th>" for p in result.positions)
    rows = []
    for i, layer in reversed(list(enumerate(result.layers))):
        cells = "".join(_cell(model, result, i, j) for j in range(len(result.positions)))
        rows.append(f'<tr><th class="layer">{layer}</th>{cells}</tr>')
    title = html.escape(f"Logit lens: {model.model_id}")
    table = f'<table><tr><th class="layer">layer</th>{heads}</tr>{"".join(rows)}</table>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>Prompt: <b>{html.escape(prompt)}</b>. Each cell is the most likely next token if the trunk ended after "
        "that layer; the darker, the more probable. Hover for the runners-up.</p>"
        f'<div class="scroll">{table}</div></body></html>\n'
    )


def _cell(model: InterpModel, result: LensResult, i: int, j: int) -> str:
    words = [model.to_str_tokens([int(t)])[0] for t in result.top_ids[i, j]]
    probabilities = [float(p) for p in result.top_probs[i, j]]
    title = "\n".join(f"{_shown(w)}  {p:.3f}" for w, p in zip(words, probabilities, strict=True))
    strength = probabilities[0]
    dark = ' class="dark"' if strength > 0.55 else ""
    colour = f"background: rgba(11, 92, 173, {strength:.3f})"
    return f'<td{dark} style="{colour}" title="{html.escape(title, quote=True)}">{html.escape(_shown(words[0]))}</td>'


def _shown(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥")
