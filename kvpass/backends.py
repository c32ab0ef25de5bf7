# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend: find attentions, rewrite them, compile the rest, run steps.

``model.compile(backend=kvpass.backend)`` or ``torch.compile(model, backend="kvpass")``; both
accept ``options={...}`` with any key of :class:`kvpass.Config`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

import kvpass.latent_ops  # defines ops that graphs call
import kvpass.ops  # likewise
import kvpass.runtime.flex  # teaches flex_attention about handles
import kvpass.source_ops  # noqa: F401  # likewise
from kvpass.config import Config
from kvpass.graph.emit import example
from kvpass.graph.family import family_of
from kvpass.graph.find import find_sites
from kvpass.graph.flex import erase_unused, spell_out
from kvpass.graph.inputs import fix_numbers, follow_writes, give_memory, is_number
from kvpass.graph.kv import is_update
from kvpass.graph.legality import graph_refusal
from kvpass.graph.plan import Plan
from kvpass.graph.prelude import GrowsWithLength, cut
from kvpass.graph.report import (
    GraphReport,
    completed,
    is_observed,
    observe,
    report_graph,
    text_of,
)
from kvpass.graph.rewrite import keep_effects, rewrite
from kvpass.graph.stage import stage_ahead
from kvpass.runtime.locks import fork_safe_lock
from kvpass.runtime.manager import Manager
from kvpass.runtime.table import normalize
from kvpass.step import RewrittenGraph, with_memory
from kvpass.step.replay import Capture, CudaCapture, Replayer
from kvpass.tuning import ORIGIN, stages
from kvpass.warn import warn_user

Graphs = bool | Literal["auto"]

_managers: dict[tuple[Config, torch.device], Manager] = {}
_lock = fork_safe_lock()
_warned: set[str] = set()


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo.

    Args:
        gm: the graph; left as it is.
        example_inputs: its inputs.
        mode: of ``torch.compile``; all capture decode steps into CUDA graphs, unless
            ``cuda_graphs`` says otherwise, and ``"reduce-overhead"`` says which steps cannot be
            captured. ``"max-autotune"`` tunes nothing, with a warning.
        options: keys of :class:`kvpass.Config`.
        **kwargs: refused, so that a misspelt argument does not pass in silence.

    Returns:
        A callable that runs the graph.

    Raises:
        ConfigError: an option is unknown or out of range.
        TypeError: an unknown keyword argument.
    """
    if kwargs:
        raise TypeError(f"kvpass.backend got unknown arguments {sorted(kwargs)}; use options={{}}")
    config = Config.load(origin=ORIGIN, **dict(options or {}))
    graphs: Graphs = config.cuda_graphs
    if graphs == "auto" and mode == "reduce-overhead":
        graphs = True
    if mode not in (None, "default", "reduce-overhead"):
        _warn_once(f"mode={mode!r}: kvpass tunes nothing by trial, as with the default mode")
    graph = _copy(gm.graph)  # Dynamo still reads the graph it gave
    fix_numbers(graph, [_source(node) for node in gm.graph.nodes if node.op == "placeholder"])
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    numbers = {
        node: value for node, value in zip(inputs, example_inputs, strict=True) if is_number(node)
    }
    follow_writes(graph)
    result = find_sites(graph, spell_out(graph, gm), gm)
    refusal = graph_refusal(gm) if result.sites else None
    report = report_graph(graph, result, refusal)
    before = text_of(gm)
    if refusal is not None or not result.sites:
        observe(completed(report, (), before, before))
    if refusal is not None:
        _warn_once(f"attention is not rewritten: {refusal}")
    if refusal is not None or not result.sites:
        erase_unused(graph)
        extra = keep_effects(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        dense = [placeholders.index(node) for node in give_memory(graph)]
        if refusal is not None and any(is_update(node) for node in graph.nodes):
            # A compiler would trace a backward of the cache, which has none; eager only needs it
            # when somebody calls backward().
            config = config.merge(inner="eager")
        examples = list(example_inputs)
        for index in dense:
            examples[index] = placeholders[index].meta["example_value"]
        whole = compile_inner(_module(gm, graph), examples, config)
        if dense:
            reasons = sorted({refused.reason for refused in result.refusals})
            _warn_once(f"static buffers get their memory back: {'; '.join(reasons)}")
            return lambda *args: _without_last(whole(*with_memory(args, dense)), extra)
        return whole if not extra else lambda *args: _without_last(whole(*args), extra)
    family = family_of(result.sites)
    known = all(site.source.form == "tiered" for site in result.sites)  # each cache has its own
    tile = None if known else config.family(family).tile
    plan = rewrite(graph, result.sites, result.entry, config.memory.block_size, tile)
    if stages(config) and all(shape.device.type == "cuda" for shape in plan.shapes):
        stage_ahead(graph)
    plan.family = family
    for probe in plan.probes:
        probe.run = _module(gm, probe.graph).forward
    for part in (part for check in plan.tables for part in check.parts):
        part.run = _module(gm, part.graph).forward
    after = text_of(_module(gm, graph))
    observe(completed(report, plan.gone, before, after, _growth(graph, plan)))
    inner, repeats = _compile_step(gm, graph, plan, config, graphs, numbers)
    plain = _module(gm, _copy(gm.graph)).forward if _may_need_it(plan) else inner
    return RewrittenGraph(plan, inner, config, manager_for, plain, repeats=repeats)


def _compile_step(
    gm: fx.GraphModule,
    graph: fx.Graph,
    plan: Plan,
    config: Config,
    graphs: Graphs,
    numbers: Mapping[fx.Node, Any],
) -> tuple[Callable[..., Any], Callable[[], str]]:
    """Compile a rewritten graph; with ``graphs``, so that its decode steps are captured.

    Where they were asked for, what cannot be captured is said once.

    Args:
        gm: holds the parameters.
        graph: the rewritten graph.
        plan: what it needs.
        config: the configuration.
        graphs: whether to capture decode steps.
        numbers: inputs that are numbers of the host, as they came: an example without its value is
            none to a compiler.

    Returns:
        What runs it, and what names that which grows with the sequence in it.
    """
    devices = {shape.device for shape in plan.shapes}
    capture = capture_for(*devices) if graphs and len(devices) == 1 else None
    prelude = None
    if capture is not None and plan.is_decode and not plan.begins:
        try:
            prelude = cut(graph, plan.batch_symbols, *devices)
        except GrowsWithLength as reason:
            if graphs is True:
                _warn_once(f"decode steps run without a CUDA graph, which is slower: {reason}")
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    examples = [numbers[node] if node in numbers else example(node) for node in inputs]
    inner = compile_inner(_module(gm, graph), examples, config)
    if prelude is None or capture is None:
        return inner, lambda: _repeated(graph, plan)
    early = None if prelude.graph is None else _module(gm, prelude.graph).forward
    return Replayer(prelude, early, inner, capture), prelude.repeated


def _repeated(graph: fx.Graph, plan: Plan) -> str:
    """What a replay of a rewritten graph would repeat although it differs from step to step."""
    try:
        # The number of new tokens is one that the capture fixes.
        fixed = set(plan.batch_symbols).union(
            *(getattr(shape.tokens, "free_symbols", ()) for shape in plan.shapes)
        )
        return cut(_copy(graph), fixed, plan.shapes[0].device).repeated()
    except GrowsWithLength as reason:
        return str(reason)


def capture_for(device: torch.device) -> Capture | None:
    """What captures decode steps on a device; None where there is nothing like it."""
    return CudaCapture(device) if device.type == "cuda" and torch.version.hip is None else None


def _growth(graph: fx.Graph, plan: Plan) -> str | None:
    """What keeps a decode step from being captured, for who asks; None of other graphs."""
    if not is_observed() or not plan.is_decode:
        return None
    try:
        cut(_copy(graph), plan.batch_symbols, plan.shapes[0].device)
    except GrowsWithLength as reason:
        return str(reason)
    return ""


def _may_need_it(plan: Plan) -> bool:
    """Whether a call may come that only the graph before rewriting can serve."""
    return bool(plan.assumed or plan.tables) or any(
        site.buffer is not None or (site.shape.keep and site.shape.mask_offset is not None)
        for family in plan.functional
        for site in family
    )


def _source(node: fx.Node) -> object:
    """Where Dynamo found an input, as far as this release says so."""
    return getattr(node, "_dynamo_source", None) or getattr(
        node.meta.get("grapharg"), "source", None
    )


def _without_last(outputs: Any, extra: int) -> Any:
    return outputs if not extra else type(outputs)(list(outputs)[: len(outputs) - extra])


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, values)
    old = next(node for node in reversed(graph.nodes) if node.op == "output")
    copy.output(result).meta = dict(old.meta)
    return copy


def _module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Parameters and constants of ``gm`` with another graph; only now is its code written."""
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module


def manager_for(config: Config, device: torch.device) -> Manager:
    """The manager shared by the functional caches of one configuration on one device."""
    key = (config, normalize(device))
    with _lock:
        if key not in _managers or not _managers[key].usable:
            _managers[key] = Manager(config, device)
        return _managers[key]


def compile_inner(gm: fx.GraphModule, inputs: list[Any], config: Config) -> Callable[..., Any]:
    """Compile a graph with the inner compiler that the configuration names."""
    name = resolve_inner(config.inner, any(map(_on_gpu, inputs)))
    if config.inner == "auto" and name == "aot_eager":
        _warn_once(
            "no C++ compiler was found, so the rest of the model runs uncompiled (aot_eager): "
            "install g++ or clang++"
        )
    if name == "eager":
        return gm.forward
    if name == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        compiled: Callable[..., Any] = aot_eager(gm, inputs)
        return compiled
    from torch._inductor.compile_fx import compile_fx

    result: Any = compile_fx(gm, inputs)
    return result


def resolve_inner(inner: str, gpu: bool) -> str:
    """Return what the option ``inner`` becomes: ``auto`` is Inductor, or aot_eager without C++.

    Args:
        inner: value of the option.
        gpu: whether the model is on a GPU, where Inductor needs no C++ compiler.
    """
    if inner != "auto":
        return inner
    return "inductor" if gpu or _has_compiler() else "aot_eager"


def _on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _has_compiler() -> bool:
    from torch._inductor import config as inductor_config

    candidates: Any = inductor_config.cpp.cxx
    names = [c for c in (candidates if isinstance(candidates, tuple) else (candidates,)) if c]
    return any(shutil.which(str(name)) for name in (*names, "g++", "clang++"))


def _warn_once(message: str) -> None:
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    warn_user(f"kvpass: {message}")


__all__ = ["GraphReport", "backend", "compile_inner", "manager_for"]
