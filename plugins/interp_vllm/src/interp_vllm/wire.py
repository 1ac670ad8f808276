"""A request as bytes: what of it the worker process has to know, and nothing that could run there.

The bytes travel in ``SamplingParams.extra_args``. They are msgpack of typed records, so a forged or broken
message is refused by decoding it; no pickle is involved on either side.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from interp_core import operations as ops
from interp_core.address import parse_address
from interp_core.errors import RequestError
from interp_core.requests import ForwardRequest, Read, Where, Write

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EXTRA_ARG", "WorkerRequest", "decode_request", "encode_request"]

EXTRA_ARG: Final = "interp"
"""The key of ``SamplingParams.extra_args``."""

_KINDS: Final[dict[str, type[ops.Operation]]] = {
    kind.__name__: kind for kind in (ops.Add, ops.Scale, ops.Cap, ops.NormScaledAdd, ops.Ablate, ops.Swap, ops.Replace)
}


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Read(msgspec.Struct, frozen=True, array_like=True):
    address: str
    positions: tuple[int, ...] | None


class _Write(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    address: str
    numbers: dict[str, float | None]
    tensors: dict[str, _Tensor]
    positions: tuple[int, ...] | None
    prompt: bool
    generated: bool


class _Request(msgspec.Struct, frozen=True, array_like=True):
    name: str
    prompt_length: int
    reads: tuple[_Read, ...]
    writes: tuple[_Write, ...]
    fetched: bool


@attrs.frozen(eq=False)
class WorkerRequest:
    """What the worker knows of a request.

    Attributes:
        name: the id under which its rows are fetched.
        prompt_length: tokens of the prompt; later positions are generated.
        reads: what to keep.
        writes: what to change, in order.
        fetched: whether somebody will ask what came of it; if not, it is forgotten when it is over.
    """

    name: str
    prompt_length: int
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    fetched: bool = True


def encode_request(name: str, request: ForwardRequest, *, fetched: bool = True) -> bytes:
    """The bytes of a request.

    Args:
        name: the id under which its rows are fetched.
        request: what to read and write.
        fetched: whether somebody will ask what came of it.

    Raises:
        RequestError: an operation is of a kind whose arithmetic the worker does not have.
    """
    reads = tuple(_Read(str(read.address), read.positions) for read in request.reads)
    writes = tuple(_encode_write(write) for write in request.writes)
    return msgspec.msgpack.encode(_Request(name, len(request.token_ids), reads, writes, fetched))


def decode_request(data: object) -> WorkerRequest:
    """The request of some bytes.

    Raises:
        RequestError: they are not a request.
    """
    if not isinstance(data, (bytes, str)):
        raise RequestError(f"a request for the worker is bytes, or text of base64, not {type(data).__name__}")
    try:
        data = base64.b64decode(data, validate=True) if isinstance(data, str) else data
        found = msgspec.msgpack.decode(data, type=_Request)
        reads = tuple(Read(address=parse_address(r.address), positions=r.positions) for r in found.reads)
        writes = tuple(_decode_write(write) for write in found.writes)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RequestError(f"these bytes are no request for the worker: {error}") from error
    return WorkerRequest(found.name, found.prompt_length, reads, writes, found.fetched)


def _encode_write(write: Write) -> _Write:
    operation: Any = write.operation
    kind = type(operation).__name__
    if _KINDS.get(kind) is not type(operation):
        raise RequestError(f"{kind} at {write.address}: vLLM's worker knows {', '.join(sorted(_KINDS))} only")
    fields = [f.name for f in attrs.fields(type(operation)) if f.name != "address"]
    vectors = {n: getattr(operation, n) for n in operation.tensor_fields if getattr(operation, n) is not None}
    numbers = {n: getattr(operation, n) for n in fields if n not in operation.tensor_fields}
    where = write.where
    positions = None if where.positions is None else tuple(sorted(where.positions))
    tensors = {name: _encode_tensor(tensor) for name, tensor in vectors.items()}
    return _Write(kind, str(write.address), numbers, tensors, positions, where.prompt, where.generated)


def _decode_write(found: _Write) -> Write:
    address = parse_address(found.address)
    tensors = {name: _decode_tensor(tensor) for name, tensor in found.tensors.items()}
    operation = _KINDS[found.kind](address, **found.numbers, **tensors)
    positions = None if found.positions is None else frozenset(found.positions)
    where = Where(positions=positions, prompt=found.prompt, generated=found.generated)
    return Write(operation=operation, address=address, where=where)


def _encode_tensor(tensor: Tensor) -> _Tensor:
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _Tensor(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


def _decode_tensor(found: _Tensor) -> Tensor:
    import torch

    dtype = getattr(torch, found.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"unknown dtype {found.dtype!r}")
    return torch.frombuffer(bytearray(found.data), dtype=dtype).reshape(found.shape)
