"""The entry point: what a Quill is, without importing torch."""

import attrs

from interp_core import Architecture, Claim, PointSpec, hookimpl
from interp_core.points import hook, unsupported

QUENCH = PointSpec(
    name="quench",
    scope="layer",
    axes=["d_model"],
    definition="Logits of the gate on the MLP's input: the MLP sees its input times their sigmoid.",
)


def facts(config, facts):
    """Block order and multiplier, which the configuration says in a word of its own, or not at all."""
    layers = [attrs.evolve(layer, parallel=layer.index % 2 == 1) for layer in facts.layers]
    return attrs.evolve(facts, structure_known=True, layers=layers, residual_multiplier=config.damping)


@hookimpl
def interp_architectures():
    """One trunk, on three backends."""
    return [
        Architecture(
            name="quill",
            summary="Quill: an example of a decoder that transformers does not know.",
            claim=Claim(model_types={"quill"}),
            facts=facts,
            points=[QUENCH],
            support={
                "eager": {"quench": hook()},
                "vllm": {"quench": hook()},
                "vllm-static": {"quench": unsupported("a compiled forward of this example is not described")},
            },
            config="interp_quill.model:QuillConfig",
            models={"eager": "interp_quill.model:QuillForCausalLM", "vllm": "interp_quill.vllm_model:QuillForCausalLM"},
            bindings={"eager": "interp_quill.bindings:quill", "vllm": "interp_quill.vllm_bindings:quill"},
        )
    ]
