# SPDX-License-Identifier: Apache-2.0
"""Config files are read exactly, and what the decoder does not compute is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvpass.errors import CheckpointError
from model_zoo import DecoderConfig
from model_zoo.configs import Llama3Rope

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_are_those_of_llama() -> None:
    config = DecoderConfig.from_dict(BASE)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert not config.tie_word_embeddings and config.rope_scaling is None


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_rope(key: str) -> None:
    scaling = {key: "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 8192
    old = DecoderConfig.from_dict({**BASE, "rope_theta": 5e5, "rope_scaling": scaling})
    new = DecoderConfig.from_dict({**BASE, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)


def test_list_of_eos_ids() -> None:
    assert DecoderConfig.from_dict({**BASE, "eos_token_id": [7, 8]}).eos_token_id == (7, 8)


def test_mistral_with_a_null_window() -> None:
    config = DecoderConfig.from_dict({**BASE, "model_type": "mistral", "sliding_window": None})
    assert config.model_type == "mistral"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "mistral"}, "window of 4096"),
        ({"model_type": "mistral", "sliding_window": 512}, "sliding_window=512"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope scaling type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_attention_heads": 5}, "hidden_size=64 is not a multiple"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"intermediate_size": -1}, "intermediate_size=-1"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.from_dict({**BASE, **change})
