# SPDX-License-Identifier: Apache-2.0
"""Load a decoder with its tokenizer, from a Hugging Face folder or by a known name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvpass.errors import CheckpointError
from model_zoo.configs import DecoderConfig
from model_zoo.decoder import Decoder
from model_zoo.optional import require
from model_zoo.smollm2 import smollm2_folder
from model_zoo.tokenizer import Tokenizer, load_tokenizer

_NAMED = {"smollm2-135m": smollm2_folder}
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class LoadedModel:
    """A decoder in eval mode and what belongs to it; `path` is the folder it came from."""

    decoder: Decoder
    tokenizer: Tokenizer
    path: Path
    config: DecoderConfig


def available() -> tuple[str, ...]:
    """Names that `load` knows besides local folders."""
    return tuple(_NAMED)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a checkpoint.

    Args:
        name_or_path: one of `available()`, which is fetched and converted on first use, or a local
            folder with `config.json`, safetensors (one file or shards) and `tokenizer.json` or
            `tokenizer.model`.
        dtype: a floating dtype; the weights are converted to it one tensor at a time.
        device: where the weights go.
        cache_dir: where converted checkpoints are kept; default `$KVPASS_CACHE`, else the user's
            cache folder.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another family, or a library for
            it is not installed; the message says what to do.
    """
    if not dtype.is_floating_point:
        raise CheckpointError(f"dtype {dtype} is not a floating dtype; use for example bfloat16")
    folder = Path(name_or_path)
    if str(name_or_path) in _NAMED:
        folder = _NAMED[str(name_or_path)](None if cache_dir is None else Path(cache_dir))
    elif not folder.is_dir():
        raise CheckpointError(
            f"{str(name_or_path)!r} is neither a folder nor a known name; known names: "
            f"{', '.join(available())}"
        )
    config = DecoderConfig.from_dict(_read_json(folder / "config.json"))
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but vocab_size is "
            f"{config.vocab_size}; they do not belong together"
        )
    decoder = load_decoder(folder, config, dtype=dtype, device=torch.device(device))
    return LoadedModel(decoder, tokenizer, folder, config)


def load_decoder(
    folder: Path, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Build a decoder from the safetensors of a folder, one tensor at a time.

    Raises:
        CheckpointError: a file or tensor is missing, unexpected, damaged or of the wrong shape.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    expected = {_hf_name(name): name for name, _ in decoder.named_parameters()}
    files = _tensor_files(folder)
    found = {name for names in files.values() for name in names if not _is_derived(name, config)}
    if missing := sorted(expected.keys() - found):
        raise CheckpointError(f"{folder} lacks {_listed(missing)}")
    if unexpected := sorted(found - expected.keys()):
        raise CheckpointError(
            f"{folder} has {_listed(unexpected)}, which config.json does not account for"
        )
    for file, names in files.items():
        with _safetensors(file) as tensors:
            for name in names:
                if name in expected:
                    _assign(decoder, expected[name], tensors, name, file, dtype, device)
    for file, names in files.items():
        if _HEAD in names and config.tie_word_embeddings:
            _check_tied_head(decoder, file)
    decoder.rotary.to_empty(device=device)
    return decoder.eval()


def _assign(
    decoder: Decoder,
    target: str,
    tensors: Any,
    name: str,
    file: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    entry = tensors.get_slice(name)
    shape = tuple(entry.get_shape())
    wanted = tuple(decoder.get_parameter(target).shape)
    if shape != wanted:
        raise CheckpointError(
            f"{name} in {file} has shape {list(shape)}; config.json asks for {list(wanted)}"
        )
    if entry.get_dtype() not in _DTYPES:
        raise CheckpointError(
            f"{name} in {file} is stored as {entry.get_dtype()}; quantised checkpoints are not "
            f"supported, only {', '.join(_DTYPES)}"
        )
    # A copy even when nothing changes: the tensor of the file may be a view of mapped memory.
    value = tensors.get_tensor(name).to(device=device, dtype=dtype, copy=True)
    owner, _, attribute = target.rpartition(".")
    setattr(decoder.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def _check_tied_head(decoder: Decoder, file: Path) -> None:
    """Refuse a stored head that is not the embedding it is said to be tied to."""
    embedding = decoder.embed_tokens.weight
    with _safetensors(file) as tensors:
        head = tensors.get_tensor(_HEAD).to(device=embedding.device, dtype=embedding.dtype)
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{_HEAD} in {file} differs from the embedding, but config.json has "
            "tie_word_embeddings=true; set it to false, or remove the tensor"
        )


def _hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _is_derived(name: str, config: DecoderConfig) -> bool:
    """Whether a stored tensor only repeats what the config or another tensor says."""
    tied_head = name == _HEAD and config.tie_word_embeddings
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _tensor_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a folder, each with the names of its tensors."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise CheckpointError(f"{index} has no weight_map")
        shards: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise CheckpointError(f"{index} puts {name} into {file!r}, outside the folder")
            shards.setdefault(folder / file, []).append(name)
        if absent := sorted(file.name for file in shards if not file.is_file()):
            raise CheckpointError(f"{folder} lacks the shard {', '.join(absent)}; fetch it again")
        for file, names in shards.items():
            with _safetensors(file) as tensors:
                if lost := sorted(set(names) - set(tensors.keys())):
                    raise CheckpointError(f"{file} lacks {_listed(lost)}, which {_INDEX} names")
        return shards
    if single.is_file():
        with _safetensors(single) as tensors:
            return {single: list(tensors.keys())}
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor {_INDEX}; other weight formats are not read"
    )


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    safetensors = require("safetensors", "a checkpoint")
    try:
        with safetensors.safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _listed(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor {', '.join(names[:limit])}{rest}"
