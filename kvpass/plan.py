# SPDX-License-Identifier: Apache-2.0
"""What a model needs of each tier and how fast it would decode, from sizes and rates alone.

A decode step is taken to be bound by the bytes it reads: all weights and the hot blocks at the
rate of device memory, and the cold blocks at the rate of the link (the memory roof of the roofline
model, Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 52(4), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.errors import ConfigError
from kvpass.sizes import format_size

RUNTIME_BYTES = 512 << 20
"""Memory of a CUDA context and of libraries' workspaces, which no tensor shows."""


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of a token.

    Attributes:
        elements: numbers kept of a token, K and V of all KV heads, or a latent and its rotary part.
        window: tokens that a query sees; None is all of them.
    """

    elements: int
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """What of a model matters for memory and speed.

    Attributes:
        name: as the user gave it.
        layers: what each layer keeps; one that shares another's keys and values keeps 0 elements.
        parameters: numbers in the weights.
        expert_parameters: those of them in experts of mixtures.
        experts: experts of a layer; 1 is a dense model.
        experts_per_token: experts that a token goes through.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the feed-forward part.
        vocab_size: rows of the embedding.
        counted: how the parameters were counted, in words.
    """

    name: str
    layers: tuple[LayerKV, ...]
    parameters: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    counted: str
    expert_parameters: int = 0
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no model has.

        Raises:
            ConfigError: a size is not positive, or more experts are used than there are.
        """
        for name in ("parameters", "hidden_size", "intermediate_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name} = {getattr(self, name)} must be positive")
        if not self.layers or all(layer.elements == 0 for layer in self.layers):
            raise ConfigError(f"{self.name}: no layer keeps keys and values; plan needs a decoder")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"{self.name}: {self.experts_per_token} of {self.experts} experts a token"
            )


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, and rates in bytes a second; a rate that is None is not known.

    Attributes:
        device: memory of the device that computes (a GPU, or all RAM that is free on a CPU).
        host: room of the cold tier (free host memory, or disk on a CPU).
        device_rate: of reading device memory.
        link_rate: of reading the cold tier in place.
        unified: whether both tiers come out of one memory, as RAM and page cache of a CPU do.
    """

    device: int
    host: int
    device_rate: float | None = None
    link_rate: float | None = None
    unified: bool = False


@dataclass(frozen=True)
class Plan:
    """What fits where; sizes in bytes.

    Attributes:
        weights: of the model in its dtype.
        kv_token: K and V of one token of one sequence in all layers.
        kv: K and V of all tokens of all sequences, as the cache counts them.
        kv_slots: the same in whole blocks, as the cache allocates them.
        kv_read: those of ``kv`` that one decode step reads; windows hide the rest.
        activations: estimate of what a forward pass needs besides.
        hot_room: what device memory leaves to the hot arena; negative where it does not reach.
        hot: hot arena, at most ``kv_slots``.
        cold_only: what the hot arena cannot hold.
        cold: cold tier in full: a copy of every full block, so that demotion moves no bytes.
        seconds: of a decode step of the batch, or None where a rate is not known.
        tokens_a_second: of all sequences together, or None.
        problems: what does not fit, each with its remedy.
        notes: what fits, but not as it is best.
    """

    weights: int
    kv_token: int
    kv: int
    kv_slots: int
    kv_read: int
    activations: int
    hot_room: int
    hot: int
    cold_only: int
    cold: int
    seconds: float | None
    tokens_a_second: float | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def kv_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of K and V of ``tokens`` tokens; a sliding layer's old ones are kept too."""
    return sum(layer.elements for layer in shape.layers) * tokens * itemsize


def slot_bytes(shape: ModelShape, tokens: int, itemsize: int, block_size: int) -> int:
    """Return the bytes of the blocks that hold ``tokens`` tokens."""
    return kv_bytes(shape, -(-tokens // block_size) * block_size, itemsize)


def read_bytes(shape: ModelShape, tokens: int, itemsize: int, block_size: int) -> int:
    """Return the K and V bytes that a decode step reads: of a sliding layer its window's blocks."""
    total = 0
    for layer in shape.layers:
        seen = tokens
        if layer.window is not None:
            # A window that does not begin at a block's edge reaches into one more.
            blocks = -(-layer.window // block_size) + 1
            seen = min(tokens, blocks * block_size)
        total += layer.elements * seen * itemsize
    return total


def activation_bytes(shape: ModelShape, batch: int, chunk: int, itemsize: int) -> int:
    """Return an estimate of a forward pass's activations.

    For each of ``batch * chunk`` tokens the residual stream, its norm, the queries and the output
    of attention (4 x hidden), the two halves of the feed-forward part and their product
    (3 x intermediate) live at once; the logits of the last token of each sequence are float32.
    """
    tokens = batch * chunk
    width = 4 * shape.hidden_size + 3 * shape.intermediate_size
    return tokens * width * itemsize + batch * shape.vocab_size * 4


def read_weights(shape: ModelShape, batch: int, itemsize: int) -> float:
    """Return the weight bytes a decode step reads: of experts those expected to be chosen.

    Every token is taken to choose its experts uniformly and independently of other tokens.
    """
    missed = (1 - shape.experts_per_token / shape.experts) ** batch
    return (shape.parameters - shape.expert_parameters * missed) * itemsize


def make_plan(
    shape: ModelShape,
    machine: Machine,
    *,
    context: int,
    batch: int,
    itemsize: int,
    block_size: int,
    chunk: int,
) -> Plan:
    """Say what fits where and how fast an exact decode step would be.

    Args:
        shape: the model.
        machine: memory and rates.
        context: tokens of each sequence, prompt and new ones.
        batch: sequences.
        itemsize: bytes of a number, in weights and cache.
        block_size: tokens in a block.
        chunk: tokens of each prompt that one forward pass reads.

    Raises:
        ConfigError: a count is not positive.
    """
    for name, count in (("context", context), ("batch", batch), ("chunk", chunk)):
        if count < 1:
            raise ConfigError(f"{name} = {count}: write at least 1")
    weights = shape.parameters * itemsize
    kv = batch * kv_bytes(shape, context, itemsize)
    slots = batch * slot_bytes(shape, context, itemsize, block_size)
    read = batch * read_bytes(shape, context, itemsize, block_size)
    activations = activation_bytes(shape, batch, min(chunk, context), itemsize)
    reserved = 0 if machine.unified else RUNTIME_BYTES
    room = machine.device - weights - activations - reserved
    hot = max(0, min(slots, room))
    full = batch * kv_bytes(shape, context // block_size * block_size, itemsize)
    # Full blocks are written through, so they have a copy there; the rest is cold for want of room.
    cold = max(full, slots - hot)
    problems = _problems(shape, machine, room, slots - hot, batch * itemsize * block_size)
    seconds = None
    fits_hot = hot >= slots
    if not problems and machine.device_rate and (fits_hot or machine.link_rate):
        hot_read = read if fits_hot else read * hot / slots
        seconds = (read_weights(shape, batch, itemsize) + hot_read) / machine.device_rate
        if not fits_hot:
            assert machine.link_rate is not None
            seconds += (read - hot_read) / machine.link_rate
    return Plan(
        weights=weights,
        kv_token=kv_bytes(shape, 1, itemsize),
        kv=kv,
        kv_slots=slots,
        kv_read=read,
        activations=activations,
        hot_room=room,
        hot=hot,
        cold_only=slots - hot,
        cold=cold,
        seconds=seconds,
        tokens_a_second=None if seconds is None else batch / seconds,
        problems=problems,
        notes=_notes(machine, slots - hot, cold),
    )


def _problems(
    shape: ModelShape, machine: Machine, room: int, cold_only: int, rows: int
) -> tuple[str, ...]:
    """Say what does not fit; ``rows`` is the bytes of one number of a block of each sequence."""
    found = []
    # Every step writes to one block of each layer and sequence.
    newest = rows * sum(layer.elements for layer in shape.layers)
    if room < newest:
        found.append(
            f"the device has {format_size(machine.device)}: weights, activations and one block of "
            f"each layer and sequence need {format_size(newest - room)} more; take a larger GPU, a "
            "smaller dtype, batch or chunk"
        )
    if cold_only > machine.host:
        found.append(
            f"{format_size(cold_only)} would lie in the cold tier only, which has "
            f"{format_size(machine.host)}; take a smaller batch, a shorter context, a larger GPU, "
            "or a machine with more host memory"
        )
    return tuple(found)


def _notes(machine: Machine, cold_only: int, cold: int) -> tuple[str, ...]:
    if cold_only <= machine.host < cold:
        return (
            f"copies of all full blocks need {format_size(cold)} of the cold tier, which has "
            f"{format_size(machine.host)}: blocks without a copy cannot be demoted until there is "
            "room",
        )
    return ()
