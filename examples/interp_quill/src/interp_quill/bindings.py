"""Where the tensors are: which module plays which role. The vLLM model has the same names."""

from interp_core import TableTrunk
from interp_core.expressions import Read

BLOCKS = "rungs"
TRUNK = {"embed": "lexicon", "final_norm": "finish", "lm_head": "scribe"}
ROLES = {
    "attn": "gaze",
    "attn.v_proj": "gaze.content",
    "attn.o_proj": "gaze.blend",
    "mlp": "forge",
    "mlp.gate_proj": "forge.heat",
    "mlp.up_proj": "forge.iron",
    "mlp.down_proj": "forge.cast",
    "mlp_pre_norm": "before_forge",
    "quench": "forge.quench",
}
POINTS = {"quench": Read("quench")}

quill = TableTrunk(blocks=BLOCKS, trunk=TRUNK, roles=ROLES, points=POINTS)
