"""interp-engine's names of points.

Read off decoderesearch/interp-engine: ``interp_engine/points.py``, ``interp_engine/address.py`` and
``docs/ENGINE_HOOK_MAPPINGS.md``. Names and grammar are those of this project; what differs is listed here: two
shapes, the packed gate, the orientation of a mixing matrix, and which coordinates there are.
"""

from __future__ import annotations

from typing import Final

from interp_core.points import GENERAL_POINTS
from interp_core.vocabularies.records import Name, NoName, NotAPoint, Vocabulary

__all__ = ["INTERP_ENGINE"]

_FLAT: Final = "flat over heads there: [batch, pos, heads * width]"
_GROUP_FLAT: Final = "flat over key/value heads there: [batch, pos, kv_heads * width]"
_NOTES: Final = {
    "z": _FLAT,
    "value": _GROUP_FLAT,
    "q_norm_in": "flat over heads there, where one norm spans all of them",
    "q_norm_out": "flat over heads there, where one norm spans all of them",
    "k_norm_in": "flat over heads there, where one norm spans all of them",
    "k_norm_out": "flat over heads there, where one norm spans all of them",
    "attn_scores": "masked entries are the dtype's minimum on its eager backend, -inf here",
}
_STREAM_POINTS: Final = (
    "resid_streams",
    "attn_stream_collapse",
    "mlp_stream_collapse",
    "attn_stream_write",
    "mlp_stream_write",
)
_HALF: Final = "the packed projection holds queries and gate, and their point is both"
_TRANSPOSED: Final = "their matrix is the one of the modelling code, [from, to]"


def _general() -> tuple[Name, ...]:
    rows = []
    for spec in GENERAL_POINTS.values():
        name = spec.name if spec.scope == "trunk" else spec.name + ".{layer}"
        when = ("separate_gate",) if spec.name == "attn_gate" else ()
        near = "attn_gate, which is the gate alone" if when else ""
        rows.append(Name(name=name, point=spec.name, when=when, note=_NOTES.get(spec.name, ""), near=near))
    return tuple(rows)


INTERP_ENGINE: Final = Vocabulary(
    library="interp_engine",
    title="interp-engine",
    names=(*_general(), *(Name(name=name + ".{layer}", point=name, when=("streams",)) for name in _STREAM_POINTS)),
    others=(
        NotAPoint(name="attn_stream_mix.{layer}", why=_TRANSPOSED, near="attn_stream_mix, transposed"),
        NotAPoint(name="mlp_stream_mix.{layer}", why=_TRANSPOSED, near="mlp_stream_mix, transposed"),
    ),
    unnamed=(
        NoName(point="attn_gate", why=_HALF, near="the second half, per head, of its attn_gate"),
        NoName(point="attn_stream_mix", why=_TRANSPOSED, near="its attn_stream_mix, transposed"),
        NoName(point="mlp_stream_mix", why=_TRANSPOSED, near="its mlp_stream_mix, transposed"),
    ),
    addresses=True,
)
"""Its addresses, as strings."""
