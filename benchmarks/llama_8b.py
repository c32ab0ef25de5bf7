# SPDX-License-Identifier: Apache-2.0
"""transformers' own Llama with the sizes of Llama-3.1-8B and random weights, in bf16.

``KVPASS_BENCH_LAYERS`` makes it shallower, for machines with little time; ``KVPASS_BENCH_TINY=1``
makes it so small that a CPU runs it, to try the benchmarks themselves.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TINY = os.environ.get("KVPASS_BENCH_TINY", "") == "1"
LAYERS = int(os.environ.get("KVPASS_BENCH_LAYERS", "2" if TINY else "32"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = TINY or DEVICE.type == "cuda"
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
VOCABULARY = 512 if TINY else 128256
CHUNK = 64 if TINY else 8192
"""Tokens of a prompt at once, which bounds the memory of activations alike for everybody."""


def tokens(count: int) -> int:
    """A context length, a 64th of it in a tiny run."""
    return count // 64 if TINY else count


def group(name: str) -> str:
    """The name of a group of results; a tiny run, or one of fewer layers, is another group."""
    return f"{name}, tiny" if TINY else name if LAYERS == 32 else f"{name}, {LAYERS} layers"


def make() -> Any:
    """The model, in eval mode, with attention by SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scale = 64 if TINY else 1
    config = LlamaConfig(
        hidden_size=4096 // scale,
        intermediate_size=14336 // scale,
        num_hidden_layers=LAYERS,
        num_attention_heads=32 // (8 if TINY else 1),
        num_key_value_heads=8 // (4 if TINY else 1),
        head_dim=16 if TINY else 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def bytes_of_token() -> int:
    """K and V of one token in all layers, bytes."""
    heads, dim = (2, 16) if TINY else (8, 128)
    return LAYERS * 2 * heads * dim * DTYPE.itemsize


def prompt(batch: int, count: int) -> Tensor:
    """Random token ids ``[B, count]``."""
    generator = torch.Generator(device=DEVICE).manual_seed(batch * 1000003 + count)
    return torch.randint(0, VOCABULARY, (batch, count), generator=generator, device=DEVICE)


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

    def gib(self) -> float:
        """Of weights and all else there was before, nothing counts."""
        if DEVICE.type != "cuda":
            return 0.0
        return (torch.cuda.max_memory_allocated() - self.before) / 2**30
