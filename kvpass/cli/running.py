# SPDX-License-Identifier: Apache-2.0
"""What the commands share: load a model, decode with and without kvpass, measure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvpass
import model_zoo
from kvpass.config import Config, Written
from kvpass.errors import CheckpointError, ConfigError
from kvpass.metrics.page import anonymous_memory


@dataclass
class Run:
    """Tokens of one greedy decoding, and how long they took.

    Attributes:
        tokens: ``[m]`` new token ids.
        logits: ``[m, V]`` logits they were chosen from, when they were asked for.
        seconds: time of each token; the first one includes the prompt.
        memory: anonymous memory of the process in bytes, at the start and the top of decoding.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)

    @property
    def tokens_a_second(self) -> float:
        """Decoding speed: median over the steps after the first ones, which compile."""
        steps = sorted(self.seconds[3:] or self.seconds[1:] or self.seconds)
        return 1.0 / steps[len(steps) // 2] if steps else 0.0


def decode(
    step: Callable[[Tensor], Tensor],
    prompt: Tensor,
    count: int,
    *,
    stop: frozenset[int] = frozenset(),
    keep_logits: bool = False,
    on_token: Callable[[int], None] = lambda token: None,
) -> Run:
    """Greedy decoding.

    Args:
        step: logits ``[1, V]`` after the given tokens ``[1, n]``; keeps its own cache.
        prompt: ``[1, n]``.
        count: new tokens at most.
        stop: token ids that end the text.
        keep_logits: keep the logits of every step.
        on_token: called with each new token.
    """
    run = Run()
    base = top = 0
    tokens = prompt
    with torch.no_grad():
        for i in range(count):
            begin = time.perf_counter()
            logits = step(tokens)
            token = int(logits[0].argmax())
            run.seconds.append(time.perf_counter() - begin)
            run.tokens.append(token)
            if keep_logits:
                run.logits.append(logits[0].float().cpu())
            on_token(token)
            # The first steps compile; what a compiler keeps is not the cache's.
            if i == min(2, count - 1):
                base = top = anonymous_memory()
            elif i > 2:
                top = max(top, anonymous_memory())
            if token in stop:
                break
            tokens = torch.tensor([[token]], device=prompt.device)
    run.memory = (base, top)
    return run


def check_options(**flags: str | None) -> None:
    """Refuse flags that are options of kvpass, and variables, before anything slow is done.

    Args:
        **flags: values by the option, which is the flag's name too; None: not given.

    Raises:
        ConfigError: a value does not fit; the message names the flag or the variable.
    """
    options: dict[str, Any] = {name: Written(f"--{name}", flags[name]) for name in flags}
    Config.load(**options)


def load(model: str, device: str = "cpu") -> model_zoo.LoadedModel:
    """The checkpoint that ``--model`` names, fp32.

    Raises:
        ConfigError: it is neither a folder nor a known name.
        CheckpointError: it cannot be fetched or loaded.
    """
    known = model_zoo.available()
    if model not in known and not Path(model).is_dir():
        raise ConfigError(
            f"--model {model!r} is neither a folder nor a known name; known names: "
            f"{', '.join(known)}"
        )
    if model in known or (Path(model) / "config.json").is_file():
        say(f"loading {model}")
    return model_zoo.load(model, device=device)


def own_step(decoder: Callable[..., Tensor], cache: Any) -> Callable[[Tensor], Tensor]:
    """A step of model_zoo's decoder."""
    return lambda tokens: decoder(tokens, cache=cache, last_only=True)[:, -1]


def transformers_step(model: Any, cache: Any) -> Callable[[Tensor], Tensor]:
    """A step of a transformers model."""
    return lambda tokens: model(
        input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
    ).logits[:, -1]


def load_transformers(path: str) -> Any:
    """Transformers' own model of a checkpoint folder, fp32.

    Raises:
        CheckpointError: transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise CheckpointError('transformers is not installed: pip install "kvpass[hf]"') from error
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def compiled(module: Any, inner: str | None) -> Any:
    """The module through kvpass.backend; without ``inner``, with the environment's."""
    options: dict[str, Any] = {} if inner is None else {"inner": inner}
    return torch.compile(module, backend=kvpass.backend, options=options)


@contextmanager
def metrics(port: int | None) -> Iterator[None]:
    """Serve metrics while something runs, and say where; without a port nothing is served.

    Raises:
        ConfigError: it is no port.
        MetricsError: it cannot be listened on.
    """
    if port is None:
        yield
        return
    with kvpass.serve_metrics(port) as server:
        print(f"metrics: {server.url}", file=sys.stderr, flush=True)
        yield


def say(message: str) -> None:
    """A line on stderr, before something that takes long."""
    print(f"{message} ...", file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over tokens on stderr; yields what to call with each token."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda token: bar.advance(task)
