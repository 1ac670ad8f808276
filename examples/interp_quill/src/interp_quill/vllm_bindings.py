"""The same tables, for vLLM."""

from interp_quill.bindings import BLOCKS, POINTS, ROLES, TRUNK
from interp_vllm.trunk import VllmTableTrunk

quill = VllmTableTrunk(blocks=BLOCKS, trunk=TRUNK, roles=ROLES, points=POINTS)
