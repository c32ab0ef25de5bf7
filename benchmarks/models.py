# SPDX-License-Identifier: Apache-2.0
"""The models of the decode and prompt benchmarks, in bf16, as transformers has them.

``KVPASS_BENCH_MODEL`` says which: ``8b`` (the default) and ``13b`` have the sizes of Llama-3.1-8B
and Llama-2-13B and random weights, ``smollm2`` is SmolLM2-135M-Instruct itself.
``KVPASS_BENCH_LAYERS`` makes one of random weights shallower, for machines with little time;
``KVPASS_BENCH_TINY=1`` makes it so small that a CPU runs it, to try the benchmarks themselves.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; ``name`` is what tables call it."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    mlp: int
    vocabulary: int


LLAMA_8B = Shape("8B Llama", 32, 4096, 32, 8, 128, 14336, 128256)
SHAPES = {
    "8b": LLAMA_8B,
    "13b": Shape("13B Llama", 40, 5120, 40, 40, 128, 13824, 32000),
    "smollm2": Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152),
}


def _shape() -> Shape:
    name = os.environ.get("KVPASS_BENCH_MODEL", "8b")
    if name not in SHAPES:
        raise ValueError(f"KVPASS_BENCH_MODEL={name!r} is none of {', '.join(SHAPES)}")
    if TINY:
        return Shape("tiny Llama", 2, 64, 4, 2, 16, 224, 512)
    layers = os.environ.get("KVPASS_BENCH_LAYERS")
    if not layers or name == "smollm2":
        return SHAPES[name]
    named = f"{SHAPES[name].name} of {layers} layers"
    return replace(SHAPES[name], name=named, layers=int(layers))


TINY = os.environ.get("KVPASS_BENCH_TINY", "") == "1"
SHAPE = _shape()
REAL = SHAPE is SHAPES["smollm2"]
LAYERS = SHAPE.layers
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = TINY or DEVICE.type == "cuda"
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
LONGEST = 8192 if REAL else 1 << 20
"""Tokens that the model can take."""
CHUNK = 64 if TINY else 8192
"""Tokens of a prompt at once, which bounds the memory of activations alike for everybody."""


def tokens(count: int) -> int:
    """A context length, a 64th of it in a tiny run."""
    return count // 64 if TINY else count


def group(name: str) -> str:
    """The name of a group of results; another model is another group."""
    return f"{SHAPE.name}, {name}"


def make() -> Any:
    """The model, in eval mode, with attention by SDPA."""
    model = _real() if REAL else _random()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _real() -> Any:
    import model_zoo
    from kvpass.cli import running

    return running.load_transformers(str(model_zoo.load("smollm2-135m").path)).to(DEVICE, DTYPE)


def _random() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.mlp,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.dim,
        vocab_size=SHAPE.vocabulary,
        max_position_embeddings=LONGEST,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def bytes_of_token() -> int:
    """K and V of one token in all layers, bytes."""
    return SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.dim * DTYPE.itemsize


def prompt(batch: int, count: int) -> Tensor:
    """Random token ids ``[B, count]``."""
    generator = torch.Generator(device=DEVICE).manual_seed(batch * 1000003 + count)
    return torch.randint(0, SHAPE.vocabulary, (batch, count), generator=generator, device=DEVICE)


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Peak:
    """Most bytes that were allocated on the device since it was made, beyond those before."""

    before: int = 0

    def __post_init__(self) -> None:
        free()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def forget(self) -> None:
        """Count only from now on, as of what was there before."""
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def gib(self) -> float:
        """Of weights and all else there was before, nothing counts."""
        if DEVICE.type != "cuda":
            return 0.0
        return (torch.cuda.max_memory_allocated() - self.before) / 2**30
