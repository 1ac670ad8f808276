"""Names of other libraries, translated to addresses and back, for one model at a time.

A name means a tensor only together with a model: TransformerLens' ``hook_attn_out`` lies behind a norm where the
family has one there, and a block whose sublayers run in parallel has no residual between them. Both directions
therefore take a profile (``inspect_model``, or ``model.profile``). What has no counterpart is refused with the
reason and with what is near. The tables are data: documentation and tests read the same ones.
"""

from __future__ import annotations

from interp_core.vocabularies.records import LIBRARIES, Condition, Name, NoName, NotAPoint, Vocabulary
from interp_core.vocabularies.translate import VOCABULARIES, from_address, to_address

__all__ = [
    "LIBRARIES",
    "VOCABULARIES",
    "Condition",
    "Name",
    "NoName",
    "NotAPoint",
    "Vocabulary",
    "from_address",
    "to_address",
]
