"""A tiny random Quill."""

from __future__ import annotations

from pathlib import Path

import torch
from interp_quill.model import QuillConfig, QuillForCausalLM

__all__ = ["save"]


def save(folder: Path) -> str:
    """A tiny random Quill, with random gains and biases."""
    torch.manual_seed(0)
    model = QuillForCausalLM(QuillConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)
