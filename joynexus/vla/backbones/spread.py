"""One frozen backbone on several devices: each forwards a part of a group's rows, in a process of its own.

In: a loaded backbone, and the way to followers that have loaded the same. Out: a `Backbone` whose features have the
bits that one device gives them. Never: a sample's tokens cut apart, pickle (messages are typed, tensors are bytes), a
feature of a follower that has other weights or kernels, or work that goes on without one that is gone.

What is said goes over a stream, what is large over `torch.distributed`. Everything but the forward stays where it was:
the store, the action modules and the optimizer know one device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as ranks
from torch import Tensor

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.feature import Observation, VLAFeature
from joynexus.vla.grouping import even_parts
from joynexus.vla.numerics import numerics_class

_LENGTH = struct.Struct("<I")
_MOST_SAID = 64 * 1024**2


class DeviceLost(torch.AcceleratorError):
    """A follower is gone, or nobody can reach it: this process must start anew, and others with it."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a follower has loaded: all of it must be as at the leader, or bits may differ."""

    backbone: str
    batch_key: str
    numerics_class: str


class Part(msgspec.Struct, frozen=True, tag=True):
    """Rows for a follower; the pictures' bytes follow, end to end.

    Attributes:
        sizes: height and width of each picture of each sample.
        group_exactly: see `Backbone`; what the leader found out.
    """

    instructions: tuple[str, ...]
    sizes: tuple[tuple[tuple[int, int], ...], ...]
    layers: tuple[int, ...]
    group_exactly: bool


class Made(msgspec.Struct, frozen=True, tag=True):
    """What became of a part; hidden states [layers, tokens, width] and kinds of tokens follow, unless it failed.

    Attributes:
        lengths: tokens of each sample.
        busy_s: what it took.
        error: why the forward failed.
        shortage: it failed for want of memory.
    """

    lengths: tuple[int, ...]
    busy_s: float
    error: str = ""
    shortage: bool = False


class Calibrate(msgspec.Struct, frozen=True, tag=True):
    """A follower is to find out how large its forwards should be; see `Backbone.calibrate`."""

    group_exactly: bool


class Calibrated(msgspec.Struct, frozen=True, tag=True):
    """And this is what it found."""

    found: str


Said = Hello | Part | Made | Calibrate | Calibrated
_S = TypeVar("_S", bound=Said)


class Link(Protocol):
    """The way to one other rank."""

    def tell(self, message: Said) -> None:
        """Say something; DeviceLost if nobody is there."""

    def hear(self) -> Said:
        """Wait for what the other one says; DeviceLost if it is gone."""

    def send(self, tensor: Tensor) -> None:
        """Give a tensor's bytes; DeviceLost if nobody takes them."""

    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor; DeviceLost if nobody gives."""


class RankLink:
    """A link between two processes of one group of `torch.distributed`.

    Args:
        stream: to the other one, both ways.
        rank: its number in the group.
        name: what it is called in a sentence.
    """

    def __init__(self, stream: BinaryIO, rank: int, name: str) -> None:
        self._stream, self._rank, self._name = stream, rank, name

    def tell(self, message: Said) -> None:
        """Say something; see `Link`."""
        body = msgspec.msgpack.encode(message)
        try:
            self._stream.write(_LENGTH.pack(len(body)) + body)
            self._stream.flush()
        except OSError as error:
            raise DeviceLost(f"{self._name} is gone: {error}") from error

    def hear(self) -> Said:
        """Wait for what the other one says; see `Link`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MOST_SAID:
            raise DeviceLost(f"{self._name} says {length} bytes at once, which nothing here does")
        try:
            return msgspec.msgpack.decode(self._read(length), type=Said)
        except msgspec.MsgspecError as error:
            raise DeviceLost(f"{self._name} cannot be understood: {error}") from error

    def send(self, tensor: Tensor) -> None:
        """Give a tensor's bytes; see `Link`."""
        if tensor.numel():
            self._carried(ranks.send, tensor)

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor; see `Link`."""
        if tensor.numel():
            self._carried(ranks.recv, tensor)

    def _carried(self, carry: Callable[[Tensor, int], object], tensor: Tensor) -> None:
        try:
            carry(tensor.flatten().view(torch.uint8), self._rank)  # bytes: not every back end has every type
        except RuntimeError as error:
            raise DeviceLost(f"{self._name} is gone: {error}") from error

    def _read(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except OSError as error:
            raise DeviceLost(f"{self._name} is gone: {error}") from error
        if len(data) < count:
            raise DeviceLost(f"{self._name} is gone")
        return data


class _Room(NamedTuple):
    """Where a follower's features are put: hidden states [layers, tokens, width] and kinds of tokens.

    Attributes:
        lengths: tokens of each sample.
    """

    lengths: tuple[int, ...]
    hidden: Tensor
    kinds: Tensor


class SpreadBackbone(Backbone):
    """A backbone whose groups are shared out among its own device and those of followers.

    Args:
        own: the leader's.
        links: to the followers.
        add_busy: is told what followers took, for the role's own account.

    Raises:
        ValueError: if a follower has loaded something else, or computes otherwise.
    """

    kernel = "spread"  # never shown: see `batch_key`

    def __init__(
        self, own: Backbone, links: Sequence[Link], add_busy: Callable[[float], None] = lambda _: None
    ) -> None:
        super().__init__(
            name=own.name, digest=own.digest, hidden_size=own.hidden_size, device=own.device, dtype=own.dtype
        )
        self.exact = own.exact
        self._own, self._links, self._add_busy = own, links, add_busy
        self._far_busy_s = 0.0
        expected = hello(own)
        for number, link in enumerate(links, start=2):
            said = _heard(link, Hello)
            for field in Hello.__struct_fields__:
                theirs, ours = getattr(said, field), getattr(expected, field)
                if theirs != ours:
                    raise ValueError(
                        f"device {number} of {len(links) + 1} cannot share the backbone's rows: its {field} is "
                        f"{theirs}, that of the first is {ours}; give devices of one model on one host"
                    )

    def batch_key(self) -> str:
        """Return the leader's; how many devices there are changes no bit."""
        return self._own.batch_key()

    def check(self, observation: Observation) -> None:
        """Refuse what the leader's refuses."""
        self._own.check(observation)

    def check_layers(self, layers: Collection[int]) -> None:
        """Refuse what the leader's refuses."""
        self._own.check_layers(layers)

    def tokens(self, observation: Observation) -> int:
        """Count the tokens of an observation."""
        return self._own.tokens(observation)

    def calibrate(self) -> str:
        """Let each device find out how large its own forwards should be, all at the same time."""
        for link in self._links:
            link.tell(Calibrate(self.group_exactly))
        self._own.group_exactly = self.group_exactly
        found = [self._own.calibrate(), *(_heard(link, Calibrated).found for link in self._links)]
        return "; ".join(f"device {number}: {sentence}" for number, sentence in enumerate(found, start=1))

    def take_far_busy(self) -> float:
        """Return what followers took since this was last asked."""
        taken, self._far_busy_s = self._far_busy_s, 0.0
        return taken

    def _groups(self, observations: Sequence[Observation]) -> list[Sequence[Observation]]:
        return [observations] if observations else []  # each device cuts its own part

    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        lengths = [self.tokens(observation) for observation in observations]
        count = min(len(self._links) + 1, len(observations))
        ends = accumulate(even_parts(lengths, count))
        own, *far = [slice(start, end) for start, end in pairwise((0, *ends))]
        # What may fail for want of memory is made first: who was asked must be heard out, or it would be out of step.
        asked = [
            (link, pack(observations[part], layers, self.group_exactly), self._room(lengths[part], layers))
            for link, part in zip(self._links, far, strict=False)
        ]
        for link, (part, pictures), _ in asked:
            link.tell(part)
            link.send(pictures)
        features, failure = list[VLAFeature](), None
        self._own.group_exactly = self.group_exactly
        try:
            features = self._own.forward(observations[own], layers)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # those who were asked answer all the same
            failure = error
        for link, _, room in asked:
            try:
                features += self._taken(link, room, layers)
            except DeviceLost:
                raise
            except (RuntimeError, MemoryError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return features

    def _room(self, lengths: Sequence[int], layers: tuple[int, ...]) -> _Room:
        hidden = torch.empty((len(layers), sum(lengths), self.hidden_size), dtype=self.dtype, device=self.device)
        return _Room(tuple(lengths), hidden, torch.empty(sum(lengths), dtype=torch.uint8, device=self.device))

    def _taken(self, link: Link, room: _Room, layers: tuple[int, ...]) -> list[VLAFeature]:
        """Take a follower's features; RuntimeError or MemoryError if its forward failed."""
        made = _heard(link, Made)
        self._far_busy_s += made.busy_s
        self._add_busy(made.busy_s)
        if made.error:
            raise (MemoryError if made.shortage else RuntimeError)(made.error)
        if made.lengths != room.lengths:
            raise DeviceLost(f"a follower made features of {made.lengths} tokens of samples that have {room.lengths}")
        link.receive(room.hidden)
        link.receive(room.kinds)
        return [
            VLAFeature(
                layers={layer: room.hidden[number, start:end].clone() for number, layer in enumerate(layers)},
                token_type=room.kinds[start:end].clone(),
                backbone=self.digest,
            )
            for start, end in pairwise((0, *accumulate(room.lengths)))
        ]


def hello(backbone: Backbone) -> Hello:
    """Say what was loaded."""
    return Hello(backbone.digest, backbone.batch_key(), numerics_class(backbone.device, backbone.dtype))


def pack(part: Sequence[Observation], layers: tuple[int, ...], group_exactly: bool) -> tuple[Part, Tensor]:
    """Make of rows what a follower is told, and the bytes that it is sent."""
    sizes = tuple(tuple((image.shape[0], image.shape[1]) for image in row.images) for row in part)
    pictures = [np.ascontiguousarray(image).reshape(-1) for row in part for image in row.images]
    told = Part(tuple(row.instruction for row in part), sizes, layers, group_exactly)
    return told, torch.from_numpy(np.concatenate(pictures)) if pictures else torch.empty(0, dtype=torch.uint8)


def take_part(link: Link, part: Part) -> list[Observation]:
    """Take the rows of which `pack` made this part."""
    total = sum(3 * height * width for row in part.sizes for height, width in row)
    pictures = torch.empty(total, dtype=torch.uint8)
    link.receive(pictures)
    bytes_left, taken = pictures.numpy(), []
    for instruction, sizes in zip(part.instructions, part.sizes, strict=True):
        images = []
        for height, width in sizes:
            images.append(bytes_left[: 3 * height * width].reshape(height, width, 3))
            bytes_left = bytes_left[3 * height * width :]
        taken.append(Observation(tuple(images), instruction))
    return taken


def _heard(link: Link, kind: type[_S]) -> _S:
    message = link.hear()
    if not isinstance(message, kind):
        raise DeviceLost(f"a follower said {type(message).__name__} where {kind.__name__} was due")
    return message
