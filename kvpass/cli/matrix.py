# SPDX-License-Identifier: Apache-2.0
"""One cell of ``kvpass models``: a tiny model decoded with and without kvpass, and compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import kvpass
from kvpass.errors import KVPassWarning, UnsupportedError
from kvpass.explanation import Explanation
from kvpass.graph.report import GraphReport, SiteReport, observed
from model_zoo.architectures import (
    ARCHITECTURES,
    SOURCE_TOKENS,
    VOCABULARY,
    Architecture,
    Cache,
    Cell,
    load_transformers,
)

BATCH = 2
PROMPT_TOKENS = 10
# Tiers so small that a run of 32 tokens uses both.
TIERS: dict[str, Any] = {
    "block_size": 32,
    "hot": "32KiB",
    "resident_tokens": 32,
    "heat_interval": 8,
}
_SEED = 1
_LONGEST_REASON = 600


@dataclass(frozen=True)
class Refused:
    """An attention that is left as it was; ``site`` is empty where a whole run failed."""

    site: str
    reason: str


@dataclass(frozen=True)
class Result:
    """What kvpass did with one architecture, cache form and attention implementation.

    Attributes:
        architecture: name of the architecture.
        cache: dynamic, tiered or static.
        attention: sdpa, eager or flex.
        sites: attentions in the compiled graphs, each counted once.
        rewritten: those that were rewritten in every graph they occur in.
        refused: the others, each with its first reason.
        tokens_equal: whether greedy tokens are those of the uncompiled model.
        max_logit_diff: largest absolute difference of the logits, up to the first different token;
            None where there are no finite logits to compare.
        unseen: attention modules for which no graph had an attention that was recognised.
    """

    architecture: str
    cache: str
    attention: str
    sites: int
    rewritten: int
    refused: tuple[Refused, ...]
    tokens_equal: bool
    max_logit_diff: float | None
    unseen: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without ``unseen``, which is for people."""
        values = asdict(self)
        del values["unseen"]
        return values


@dataclass
class Decoded:
    """Greedy tokens of a run, each ``[B]``, and the logits ``[B, V]`` they were chosen from."""

    tokens: list[Tensor]
    logits: list[Tensor]


def run_cell(cell: Cell, steps: int, inner: str = "eager") -> Result:
    """Decode with and without kvpass.

    Args:
        cell: what to run.
        steps: tokens after the one that the prompt gives.
        inner: compiler of the rest of the graph.

    Raises:
        UnsupportedError: transformers itself cannot build or run the model uncompiled.
        CheckpointError: transformers is not installed.
    """
    load_transformers()
    architecture = ARCHITECTURES[cell.architecture]
    limit = max(PROMPT_TOKENS + steps, SOURCE_TOKENS)
    try:
        model = architecture.build(cell.attention)
        inputs = model_inputs(architecture, model)
        plain: Cache = "static" if cell.cache == "static" else "dynamic"
        # transformers compiles flex_attention by itself otherwise.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            expected = decode(model, make_cache(architecture, model, plain, limit), inputs, steps)
    except Exception as error:  # whatever transformers raises is the answer for this cell
        raise UnsupportedError(
            f"{cell.architecture} with {cell.cache} cache and {cell.attention} attention does not "
            f"run in transformers itself: {in_words(error)}"
        ) from error
    if not all(bool(step.isfinite().all()) for step in expected.logits):
        raise UnsupportedError(f"{cell.architecture}: the uncompiled model gives no finite logits")
    reports: list[GraphReport] = []
    got: Decoded | None = None
    failure = ""
    torch._dynamo.reset()
    try:
        # Past the limit Dynamo runs a model uncompiled, without a word in the reports.
        with (
            observed(reports.append),
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
            warnings.catch_warnings(),
        ):
            # Small tiers and attentions that are left alone are asked for here.
            warnings.simplefilter("ignore", KVPassWarning)
            cache = make_cache(architecture, model, cell.cache, limit)
            options = {"inner": inner, **TIERS}
            compiled = torch.compile(model, backend=kvpass.backend, options=options)
            got = decode(compiled, cache, inputs, steps)
    except Exception as error:  # reported as the result of the cell
        failure = in_words(error)
    finally:
        torch._dynamo.reset()
    equal, difference = compare(got, expected) if got is not None else (False, None)
    return summary(cell, reports, attention_modules(model), failure, equal, difference)


def summary(
    cell: Cell,
    reports: Iterable[GraphReport],
    modules: Collection[str],
    failure: str,
    equal: bool,
    difference: float | None,
) -> Result:
    """The result of a run from the reports of all its graphs.

    Args:
        cell: what was run.
        reports: one a graph.
        modules: paths of the model's attention modules.
        failure: the error that ended the run, which has then rewritten nothing; or empty.
        equal: whether the tokens were those expected.
        difference: largest difference of the logits.
    """
    sites = decoder_sites(reports, modules)
    refused = [Refused(site.module, site.reason) for site in sites if not site.rewritten]
    rewritten = len(sites) - len(refused)
    if failure:
        refused.insert(0, Refused("", failure))
        rewritten = 0
    seen = {site.module for site in sites}
    unseen = tuple(name for name in modules if name not in seen)
    key = (cell.architecture, cell.cache, cell.attention)
    return Result(*key, len(sites), rewritten, tuple(refused), equal, difference, unseen)


def decoder_sites(reports: Iterable[GraphReport], modules: Collection[str]) -> list[SiteReport]:
    """Each attention once, as refused where any graph refuses it, without those of an encoder."""
    whole = tuple(
        GraphReport(tuple(full for site in report.sites for full in _located(site, modules)))
        for report in reports
    )
    return [
        site
        for site in Explanation(whole).sites
        if not (site.form == "none" and _in_encoder(site.module))
    ]


def _located(site: SiteReport, modules: Collection[str]) -> list[SiteReport]:
    """The site under its path from the model; one report a module where that is ambiguous.

    After a graph break a graph is compiled for an inner module, and paths begin there.
    """
    if site.module in modules:
        return [site]
    names = [name for name in modules if name.endswith(f".{site.module}")]
    return [replace(site, module=name) for name in names] or [site]


def attention_modules(model: nn.Module) -> list[str]:
    """Paths of a model's attention modules, without those of an encoder."""
    named = [(n, m) for n, m in model.named_modules() if "Attention" in type(m).__name__]
    inner = [n for n, _ in named if not any(other.startswith(f"{n}.") for other, _ in named)]
    return [name for name in inner if not _in_encoder(name)]


def _in_encoder(path: str) -> bool:
    return "encoder" in path.split(".")


def model_inputs(architecture: Architecture, model: Any) -> dict[str, Any]:
    """The prompt ``[B, 10]``, and what a cross attention sees, from a fixed seed.

    An encoder is run here, uncompiled.
    """
    generator = torch.Generator().manual_seed(_SEED)
    prompt = torch.randint(3, VOCABULARY, (BATCH, PROMPT_TOKENS), generator=generator)
    if architecture.kind == "decoder":
        return {"input_ids": prompt}
    config = model.config
    if architecture.kind == "cross":
        states = torch.randn(BATCH, SOURCE_TOKENS, config.hidden_size, generator=generator)
        return {"input_ids": prompt, "cross_attention_states": states}
    if model.main_input_name == "input_features":
        # The encoder of Whisper halves the length.
        shape = (BATCH, config.num_mel_bins, 2 * SOURCE_TOKENS)
        source: Tensor = torch.randn(shape, generator=generator)
    else:
        source = torch.randint(3, VOCABULARY, (BATCH, SOURCE_TOKENS), generator=generator)
    with torch.no_grad():
        encoded = model.get_encoder()(source)
    return {"decoder_input_ids": prompt, "encoder_outputs": encoded}


def make_cache(architecture: Architecture, model: Any, kind: Cache, tokens: int) -> Any:
    """An empty cache for ``tokens`` tokens of a model."""
    transformers = load_transformers()

    def make() -> Any:
        if kind == "tiered":
            return kvpass.TieredCache(model.config, tokens, **TIERS)
        if kind == "static":
            return transformers.StaticCache(config=model.config, max_cache_len=tokens)
        return transformers.DynamicCache(config=model.config)

    if architecture.kind == "encoder-decoder":
        return transformers.EncoderDecoderCache(make(), make())
    return make()


def decode(model: Callable[..., Any], cache: Any, inputs: dict[str, Any], steps: int) -> Decoded:
    """Greedy decoding by direct calls: the prompt, and ``steps`` single tokens."""
    given = dict(inputs)
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    with torch.no_grad():
        for _ in range(steps + 1):
            last = model(**given, past_key_values=cache, use_cache=True).logits[:, -1]
            logits.append(last.clone())
            tokens.append(last.argmax(-1))
            given[name] = tokens[-1][:, None]
            given.pop("cross_attention_states", None)  # cached by the prompt
    return Decoded(tokens, logits)


def compare(got: Decoded, expected: Decoded) -> tuple[bool, float | None]:
    """Whether all tokens are equal, and the largest difference of the logits.

    After the first different token two runs see different inputs, so later logits do not count.
    """
    largest = 0.0
    pairs = zip(got.tokens, expected.tokens, got.logits, expected.logits, strict=True)
    for token, token_expected, logits, logits_expected in pairs:
        difference = float((logits - logits_expected).abs().max())
        if not math.isfinite(difference):
            return False, None
        largest = max(largest, difference)
        if not torch.equal(token, token_expected):
            return False, largest
    return True, largest


def in_words(error: BaseException) -> str:
    """Type and message of an error on one line, without the advice compilers append."""
    message = str(error).strip().split("\n\n")[0]
    words = f"{type(error).__name__}: {' '.join(message.split())}"
    return words if len(words) <= _LONGEST_REASON else words[:_LONGEST_REASON] + " ..."
