# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, for the two tokenizer formats of Llama-family checkpoints."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvpass.errors import CheckpointError
from model_zoo.optional import require


class Tokenizer(ABC):
    """The little of a tokenizer that decoding a prompt needs.

    Attributes:
        vocab_size: number of ids, special tokens included.
        bos_token_id, eos_token_id: ids that open and close a text, or None.
        chat_template: the Jinja template of a chat model, or None.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None

    @abstractmethod
    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`; `add_bos=None` does what the checkpoint says."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""

    @abstractmethod
    def token_of(self, token_id: int) -> str:
        """The written form of one id, such as `<|im_end|>`."""

    def apply_chat(self, prompt: str) -> str:
        """One user turn in the model's chat format, up to where the answer begins.

        Encode the result with `add_bos=False`: templates write the opening token themselves.

        Raises:
            CheckpointError: the checkpoint has no chat template, or it refuses the turn.
        """
        if self.chat_template is None:
            raise CheckpointError(
                "this checkpoint has no chat template; encode the prompt as it is"
            )
        from jinja2 import TemplateError  # a dependency of torch
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # Sandboxed, because the template is code that comes with the weights.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse_turn
        bos, eos = (
            "" if token_id is None else self.token_of(token_id)
            for token_id in (self.bos_token_id, self.eos_token_id)
        )
        try:
            text = environment.from_string(self.chat_template).render(
                messages=[{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                bos_token=bos,
                eos_token=eos,
            )
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be rendered: {error}") from error
        return text

    def _need_bos(self) -> int:
        if self.bos_token_id is None:
            raise CheckpointError("add_bos=True, but this checkpoint has no opening token")
        return self.bos_token_id


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        tokenizers = require("tokenizers", "tokenizer.json")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._add_bos: bool | None = settings.get("add_bos_token")
        self.vocab_size = self._backend.get_vocab_size()
        self.bos_token_id = self._special(settings.get("bos_token"))
        self.eos_token_id = self._special(settings.get("eos_token"))
        self.chat_template = _chat_template(settings, path.parent)

    def _special(self, token: Any) -> int | None:
        """Id of a token written as a string or as a dict with `content`."""
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        token_id: int | None = self._backend.token_to_id(content)
        if token_id is None:
            raise CheckpointError(f"special token {content!r} is not in the vocabulary")
        return token_id

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids."""
        if add_bos is None:
            add_bos = self._add_bos
        if add_bos is None:
            return list(self._backend.encode(text).ids)
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        return [self._need_bos(), *ids] if add_bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are written out."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def token_of(self, token_id: int) -> str:
        """The written form of one id."""
        return str(self._backend.id_to_token(token_id))


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`, run by the `sentencepiece` library."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        sentencepiece = require("sentencepiece", "tokenizer.model")
        try:
            self._backend = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.vocab_size = self._backend.vocab_size()
        bos, eos = self._backend.bos_id(), self._backend.eos_id()
        self.bos_token_id = bos if bos >= 0 else None
        self.eos_token_id = eos if eos >= 0 else None
        # Llama's own rule where tokenizer_config.json does not say.
        self._add_bos = bool(settings.get("add_bos_token", self.bos_token_id is not None))
        self.chat_template = _chat_template(settings, path.parent)

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`; control tokens written in it stay plain text."""
        ids = list(self._backend.encode(text))
        return [self._need_bos(), *ids] if (self._add_bos if add_bos is None else add_bos) else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; control tokens are left out."""
        return str(self._backend.decode([int(i) for i in ids]))

    def token_of(self, token_id: int) -> str:
        """The written form of one id."""
        return str(self._backend.id_to_piece(token_id))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json`, or else `tokenizer.model`, from a checkpoint folder.

    Raises:
        CheckpointError: neither file is there, one is damaged, or its library is not installed.
    """
    settings: dict[str, Any] = {}
    settings_path = folder / "tokenizer_config.json"
    if settings_path.is_file():
        try:
            settings = json.loads(settings_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{settings_path} is not valid JSON: {error}") from error
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json", settings)
    if (folder / "tokenizer.model").is_file():
        return SentencePieceTokenizer(folder / "tokenizer.model", settings)
    raise CheckpointError(
        f"{folder} has neither tokenizer.json nor tokenizer.model; copy one of them there"
    )


def _chat_template(settings: dict[str, Any], folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _refuse_turn(message: str) -> NoReturn:
    raise CheckpointError(f"the chat template refuses the prompt: {message}")
