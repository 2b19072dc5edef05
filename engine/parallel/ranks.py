"""How the ranks of one worker exchange tensors: bytes from rank 0 to all, and sums in the order of the ranks.

NCCL and gloo choose the order of an all-reduce by its size and by what connects the ranks. Here every rank gathers all
parts and adds them up itself, in one order, so that a sum has the same bits on every rank and in every pass.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

# An idle rank waits in a call for the next message of rank 0, so no call has a limit; the process that started the
# ranks watches them.
_NO_LIMIT = timedelta(days=365)
_LOOPBACK = "127.0.0.1"

# Messages of up to this many bytes are one call; longer ones are two. The first bytes say the length.
_FIRST_BYTES, _LENGTH_BYTES = 1 << 14, 8


Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"


class Ranks:
    """This process as one of `size` that compute a model together. Every method is to be called by all of them, in the
    same order. Raises RuntimeError, as torch does, where another rank is gone."""

    def __init__(self, rank: int, size: int, device: torch.device, numbers: Group, tensors: Group) -> None:
        """`numbers` connects the processes, `tensors` their devices; both may be the same."""
        self.rank = rank
        self.size = size
        self.device = device
        self._numbers = numbers
        self._tensors = tensors
        # gloo takes tensors of a GPU through the CPU.
        self._through_cpu = device.type == "cuda" and numbers is tensors
        self._room = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)

    def send(self, message: object) -> None:
        """Rank 0 only: sends what JSON can say to all others."""
        text = json.dumps(message).encode()
        content = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
        first = content[:_FIRST_BYTES]
        self._room[: len(first)] = first
        self._broadcast(self._room)
        if len(content) > _FIRST_BYTES:
            self._broadcast(content[_FIRST_BYTES:])

    def receive(self) -> Any:
        """All others: waits for the next message of rank 0."""
        self._broadcast(self._room)
        content = self._room.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if end > _FIRST_BYTES:
            rest = torch.empty(end - _FIRST_BYTES, dtype=torch.uint8)
            self._broadcast(rest)
            content += rest.numpy().tobytes()
        return json.loads(content[_LENGTH_BYTES:end])

    def share(self, content: torch.Tensor) -> torch.Tensor:
        """Rank 0's `content` on every rank; a tensor of the CPU, of equal size and dtype everywhere."""
        self._broadcast(content.view(-1).view(torch.uint8))
        return content

    def parts(self, part: torch.Tensor) -> torch.Tensor:
        """`[size, *part]`, of every rank in their order; parts have one shape and dtype."""
        sent = part.contiguous().view(-1).view(torch.uint8)
        if self._through_cpu:
            sent = sent.cpu()
        received = torch.empty(self.size * len(sent), dtype=torch.uint8, device=sent.device)
        group = self._tensors if sent.device.type == "cuda" else self._numbers
        group._allgather_base(received, sent).wait()
        return received.to(part.device).view(part.dtype).view(self.size, *part.shape)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `part`, in float32 and rounded once: neighbours are added, then neighbouring sums."""
        sums = list(self.parts(part).float())
        while len(sums) > 1:
            rest = sums[len(sums) // 2 * 2 :]
            sums = [*map(torch.add, sums[::2], sums[1::2]), *rest]
        return sums[0].to(part.dtype)

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """On rank 0, the last dimension of every rank's `part`, one after the other; on others their own."""
        parts = self.parts(part)
        return torch.cat(tuple(parts), dim=-1) if self.rank == 0 else part

    def _broadcast(self, content: torch.Tensor) -> None:
        self._numbers.broadcast([content], dist.BroadcastOptions()).wait()


def join_ranks(folder: Path, rank: int, size: int, device: torch.device) -> Ranks:
    """Waits until all ranks are there; they find each other through `folder`, which no other user may write to.

    Each rank has a GPU of its own, or they share those that there are and the CPU carries what they exchange.
    """
    store = dist.FileStore(str(folder / "ranks"), size)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _NO_LIMIT
    numbers = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    if device.type == "cpu" or size > torch.cuda.device_count():
        return Ranks(rank, size, device, numbers, numbers)
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = _NO_LIMIT
    return Ranks(rank, size, device, numbers, dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl))


def device_of(rank: int, first: torch.device) -> torch.device:
    """The device of a rank whose rank 0 computes on `first`."""
    if first.type != "cuda":
        return first
    return torch.device("cuda", ((first.index or 0) + rank) % torch.cuda.device_count())
