"""``interp demo``: a first look inside a real language model, in four steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from interp_core.cli.console import out, print_json, working
from interp_core.cli.inspect import show_profile
from interp_core.cli.models import BackendName, Json, demo_folder
from interp_core.cli.run import lens_tables
from interp_core.errors import CapabilityUnsupported
from interp_core.loading import load_model
from interp_core.operations import Add
from interp_core.steering import steer

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["demo"]

PROMPT: Final = "The capital of France is"
STORY: Final = "I went to the restaurant and the food was"
TOWARDS: Final = "I hate it. It was horrible, disgusting and awful"
AWAY_FROM: Final = "I love it. It was wonderful, delicious and lovely"
DEPTH: Final = 0.4
STRENGTH: Final = 1.5


def demo(
    path: Annotated[bool, typer.Option("--path", help="Only prepare the model, and print its folder.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Another model than the embedded one.")] = None,
    backend: BackendName = "auto",
    as_json: Json = False,
) -> None:
    """What a real model can do, its logit lens, a steered sentence, and one refusal."""
    folder = demo_folder() if model is None else model
    if path:
        typer.echo(folder)
        return
    with load_model(folder, backend) as loaded:
        with working(f"loading weights on {loaded.backend}"):
            loaded.warmup()
        if as_json:
            print_json(_record(loaded))
            return
        out.print("[bold]1. What this model can do[/bold], from its configuration alone\n")
        show_profile(loaded.profile)
        out.print(f"\n[bold]2. The logit lens[/bold]: what each layer would say after {PROMPT!r}\n")
        result = loaded.logit_lens(loaded.to_tokens(PROMPT), _some_layers(loaded))
        for table in lens_tables(loaded, result, out.width):
            out.print(table)
        out.print(_answer_by_layer(loaded), soft_wrap=True)
        out.print("\n[bold]3. Steering[/bold] by a difference of activations\n")
        plain, steered, where = _steered(loaded)
        out.print(f"plain:   {STORY}[green]{escape(plain)}[/green]", soft_wrap=True)
        out.print(f"steered: {STORY}[red]{escape(steered)}[/red]", soft_wrap=True)
        out.print(
            f"[dim]({STRENGTH:g} × the difference of {where} between {TOWARDS!r} and {AWAY_FROM!r})[/dim]",
            soft_wrap=True,
        )
        out.print("\n[bold]4. A refusal[/bold]: what cannot be had is said before any work is done\n")
        out.print(f"{type(_refusal(loaded)).__name__}: {_refusal(loaded)}", markup=False, soft_wrap=True)


def _some_layers(model: InterpModel) -> list[int]:
    """About ten layers: early ones thinly, the last ones all."""
    n = model.n_layers
    return sorted({*range(0, n, max(1, n // 6)), *range(max(0, n - 5), n)})


def _answer_by_layer(model: InterpModel) -> str:
    """How probable the model's answer is after each of the last layers."""
    layers = list(range(max(0, model.n_layers - 5), model.n_layers))
    result = model.logit_lens(model.to_tokens(PROMPT), layers, model.vocab_size, positions="last")
    answer = int(result.top_ids[-1, 0, 0])
    found = result.top_probs[result.top_ids == answer].tolist()
    word = escape(model.to_str_tokens([answer])[0].strip())
    listed = ", ".join(f"layer {layer} {p:.3f}" for layer, p in zip(layers, found, strict=True))
    return f"probability of [bold]{word}[/bold] after {PROMPT!r}: {listed}"


def _steered(model: InterpModel) -> tuple[str, str, str]:
    layer = int(model.n_layers * DEPTH)
    point = f"resid_post.{layer}"
    vector = _mean(model, TOWARDS, point) - _mean(model, AWAY_FROM, point)
    ids = model.to_tokens(STORY)
    plain = model.generate(ids, max_tokens=20)
    with steer(model, [Add(point, vector, scale=STRENGTH)]):
        changed = model.generate(ids, max_tokens=20)
    return _line(plain.text), _line(changed.text), point


def _mean(model: InterpModel, text: str, point: str) -> Tensor:
    """Mean over positions; the first position is left out, since its residual is of another scale altogether."""
    return model.run_with_cache(model.to_tokens(text), [point])[point][0, 1:].mean(0)


def _line(text: str | None) -> str:
    return (text or "").replace("\n", " ").rstrip()


def _refusal(model: InterpModel) -> CapabilityUnsupported:
    """The first thing, of a few that newcomers try, that this model on this backend does not have."""
    for what in ("gradients", "q_norm_out.0", "attn_gate.0", "router_logits.0", "expert_weights.0", "raw_logits"):
        found = model.refusal(what)
        if isinstance(found, CapabilityUnsupported):
            return found
    raise RuntimeError("this model refuses nothing that the demo knows to ask")


def _record(model: InterpModel) -> dict[str, object]:
    ids = model.to_tokens(PROMPT)
    result = model.logit_lens(ids, positions="last")
    best = [model.to_str_tokens([int(t)])[0] for t in result.top_ids[:, 0, 0]]
    plain, steered, where = _steered(model)
    refused = _refusal(model)
    return {
        "model": model.model_id,
        "backend": model.backend,
        "lens": {
            "prompt": PROMPT,
            "layers": list(result.layers),
            "best": best,
            "probability": [float(p) for p in result.top_probs[:, 0, 0]],
        },
        "steering": {"prompt": STORY, "point": where, "plain": plain, "steered": steered},
        "refusal": {"capability": refused.capability, "why": refused.why, "instead": refused.instead},
    }
