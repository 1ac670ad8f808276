"""The rule that heavy targets, which are strings until an engine needs them, lead somewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from interp_core.collect import Collected
from interp_core.testing.isolated import ask

__all__ = ["target_faults", "targets_of"]


def targets_of(found: Collected) -> dict[str, str]:
    """Every target that records name, by what names it."""
    targets: dict[str, str] = {}
    for spec in found.backends:
        targets[f"factory of BackendSpec {spec.name!r}"] = spec.factory
        if spec.demo_model is not None:
            targets[f"demo_model of BackendSpec {spec.name!r}"] = spec.demo_model
    for architecture in found.architectures:
        for backend, target in architecture.bindings.items():
            targets[f"bindings[{backend!r}] of Architecture {architecture.name!r}"] = target
        for backend, target in architecture.models.items():
            targets[f"models[{backend!r}] of Architecture {architecture.name!r}"] = target
        if architecture.config:
            targets[f"config of Architecture {architecture.name!r}"] = architecture.config
    return targets


def target_faults(found: Collected) -> tuple[list[str], list[str]]:
    """Resolve every target in a process of its own.

    Returns:
        What is wrong, and what could not be looked at because an engine is not installed.
    """
    targets = targets_of(found)
    if not targets:
        return [], []
    answers = ask("targets", json.dumps(targets))
    if "broken" in answers:
        return [f"resolving {', '.join(targets)}: {answers['broken']}"], []
    faults: list[str] = []
    skipped: list[str] = []
    for label, target in targets.items():
        answer = answers[label]
        if _engine_missing(answer, target):
            skipped.append(f"{label} was not looked at: {answer['missing']} is not installed")
        elif fault := _fault(answer, label):
            faults.append(f"{label} is {target!r}: {fault}")
    return faults, skipped


def _engine_missing(answer: Mapping[str, Any], target: str) -> bool:
    """Whether a module of somebody else is missing; a missing one of the plugin's own is a wrong target."""
    missing = str(answer.get("missing", ""))
    own = target.partition(":")[0].partition(".")[0]
    return bool(missing) and missing.partition(".")[0] != own


def _fault(answer: Mapping[str, Any], label: str) -> str:
    if "error" in answer:
        return str(answer["error"])
    if label.startswith("bindings"):
        return "" if answer["trunk"] else "the object has no methods layout and bind, as interp_core.trunk.Trunk has"
    return "" if answer["callable"] else "the object cannot be called"
