"""What must not be left behind or let through: hooks after a failure, raw errors, work after the end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from interp_core.checks import apart
from interp_core.discovery import one_line
from interp_core.errors import BackendUnavailable, InterpError
from interp_core.operations import Add, Apply
from interp_core.testing.served import Subject
from interp_core.testing.writes import _vector, _width

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.address import Address

__all__ = ["bad_input_faults", "leftover_faults", "shutdown_faults", "thread_faults"]


def bad_input_faults(subject: Subject) -> Iterator[str]:
    """Everything that a user may get wrong is one error of this project's family, and the model still works."""
    import torch

    model, prompt = subject.model, subject.prompts[0]
    size, layers = model.vocab_size, model.n_layers
    one = next(iter(subject.readable()), None)
    layered = next((a for a in subject.readable() if a.layer is not None), None)
    written = next(iter(subject.writable()), None)
    calls: dict[str, Callable[[], Any]] = {
        "an unknown point": lambda: model.run_with_cache(prompt, ["no_such_point.0"]),
        "an empty prompt": lambda: model.generate([], max_tokens=1),
        "an id beyond the vocabulary": lambda: model.generate([size], max_tokens=1),
        "a negative id": lambda: model.generate([-1], max_tokens=1),
        "text for ids": lambda: model.generate("text", max_tokens=1),
        "no tokens to generate": lambda: model.generate(prompt, max_tokens=0),
        "an unknown option": lambda: subject.__class__(
            **{**_fields(subject), "options": {**subject.options, "no_such_option": 1}}
        ).lazy(),
    }
    if layered is not None:
        calls["a layer out of range"] = lambda: model.run_with_cache(prompt, [(layered.name, layers)])
    if one is not None:
        calls["a position that is not there"] = lambda: model.run_with_cache(prompt, [one], positions=[len(prompt)])
    if written is not None:
        width = _width(subject, written)
        calls["a vector of the wrong width"] = lambda: _steered(subject, written, torch.zeros(width + 1))
        calls["a vector that is not finite"] = lambda: _steered(subject, written, torch.full((width,), float("nan")))
    for what, call in calls.items():
        yield from _typed(what, call)
    limit = subject.profile.facts.max_positions
    if limit is not None and limit < 4096:
        yield from _typed("a prompt that is too long", lambda: model.generate([1] * (limit + 1), max_tokens=1))
    yield from _still_works(subject, "after bad input")


def _fields(subject: Subject) -> dict[str, Any]:
    return {name: getattr(subject, name) for name in ("name", "path", "bare", "backend", "host", "options")}


def _steered(subject: Subject, address: Address, vector: Tensor) -> None:
    subject.model.run_with_cache(subject.prompts[0], subject.ends(), steering=[Add(address, vector)])


def _typed(what: str, call: Callable[[], Any]) -> Iterator[str]:
    try:
        call()
    except InterpError as error:
        if not str(error).strip():
            yield f"{what} is refused by an error without a message"
    except Exception as error:  # noqa: BLE001 - becomes the finding
        yield f"{what} raises {one_line(error)}, which is no InterpError"
    else:
        yield f"{what} is accepted"


def _still_works(subject: Subject, when: str) -> Iterator[str]:
    ends = subject.ends()
    if not ends:
        if len(subject.model.generate(subject.prompts[0], max_tokens=1).token_ids) != 1:
            yield f"{when}, nothing is generated"
        return
    rows, again = subject.rows(), subject.model.run_with_cache(subject.prompts[0], ends)
    for end in ends:
        if apart(again[end][0], rows[end]) > subject.exact:
            yield f"{when}, a plain run gives another {end}"


def leftover_faults(subject: Subject) -> Iterator[str]:
    """After a failing operation, and a generation that was left, nothing is steered and no hook is left."""
    model, prompt = subject.model, subject.prompts[0]
    subject.rows()
    address = next(iter(subject.writable()), None)
    before = _hooks()
    if address is not None and subject.profile.refusal("apply") is None:
        try:
            model.run_with_cache(prompt, subject.ends(), steering=[Apply(address, _raises)])
        except InterpError:
            pass
        except Exception as error:  # noqa: BLE001 - becomes the finding
            yield f"a callable that raises ends in {one_line(error)}, which is no InterpError"
        else:
            yield f"a callable that raises, applied to {address}, goes unnoticed"
        yield from _still_works(subject, "after an operation that raised")
    if address is not None:
        vector = _vector(_width(subject, address), 10.0)
        with model.steer(Add(address, vector)):
            steps = iter(model.generate_stream(prompt, max_tokens=8, ignore_eos=True))
            next(steps)
            getattr(steps, "close", lambda: None)()
        yield from _still_works(subject, "after a steered generation that was left early")
    after = _hooks()
    if after > before:
        yield f"{after - before} hooks are left on modules of this process"


def _raises(_rows: Any) -> Any:
    raise ValueError("on purpose")


def _hooks() -> int:
    """Forward hooks on all modules of this process."""
    from torch import nn

    gc.collect()
    # By their type: asking an object itself may run code of a lazy module.
    modules: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def thread_faults(subject: Subject) -> Iterator[str]:
    """Callers on several threads get what each gets alone."""
    ends, alone = subject.ends(), [subject.rows(prompt) for prompt in subject.prompts]
    got: dict[int, Any] = {}

    def work(index: int) -> None:
        try:
            got[index] = subject.model.run_with_cache(subject.prompts[index], ends)
        except Exception as error:  # noqa: BLE001 - becomes the finding
            got[index] = one_line(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(alone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, rows in enumerate(alone):
        if isinstance(got[index], str):
            yield f"on a thread beside others, prompt {index} fails: {got[index]}"
        elif any(apart(got[index][end][0], rows[end]) > 2e-5 for end in ends):
            yield f"on a thread beside others, prompt {index} gives other rows than alone"


def shutdown_faults(subject: Subject) -> Iterator[str]:
    """A model can be shut down before it was used, twice, and then refuses work by name."""
    for what, model in (("a model that was never used", subject.lazy()), ("the model", subject.model)):
        for time in ("once", "twice"):
            try:
                model.shutdown()
            except Exception as error:  # noqa: BLE001 - becomes the finding
                yield f"shutting {what} down {time} raises {one_line(error)}"
        try:
            model.generate(subject.prompts[0], max_tokens=1)
        except BackendUnavailable:
            pass
        except Exception as error:  # noqa: BLE001 - becomes the finding
            yield f"{what}, shut down, raises {one_line(error)} when used, not BackendUnavailable"
        else:
            yield f"{what}, shut down, still works"
    subject.close()
