# SPDX-License-Identifier: Apache-2.0
"""Attention over cached latents on a CPU: multi-head latent attention (arXiv:2405.04434).

Keys and values of all heads are projections of one latent vector a token. Either they are made of
the latents block by block ("expanded"), or the projection is moved to the query and the output
("absorbed"), so that the latents themselves are keys and values of one head. Which takes fewer
products depends on shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.cpu_extend import Made, extend
from kvpass.cpu_ops import decode, masks_of
from kvpass.cpu_scores import Scoring
from kvpass.runtime import readahead
from kvpass.runtime.batch import Batch


def absorbs(queries: int, latent: int, rotary: int, keys: int, values: int) -> bool:
    """Whether absorbed attention takes no more products than expanded, for each cached token.

    Args:
        queries: n.
        latent: channels of a latent, L.
        rotary: channels of a rotary key, R.
        keys: channels of a key without the rotary ones, Dn.
        values: channels of a value, Dv.
    """
    absorbed = queries * (2 * latent + rotary)
    expanded = queries * (keys + rotary + values) + latent * (keys + values)
    return absorbed <= expanded


def attend_latent(
    batch: Batch,
    layer: int,
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    """Attention of n queries over all stored tokens and the m new ones.

    Args:
        batch: B sequences of latents as keys and rotary keys as values, of one head; the new tokens
            are appended already, but not counted yet.
        layer: index of the layer.
        q: ``[B, Hq, n, Dn + R]``, any strides.
        key_weight: ``[Hq, Dn, L]``: the first channels of a key are its product with the latent.
        value_weight: ``[Hq, Dv, L]``: a value is its product with the latent.
        k_new: ``[B, 1, m, L]``, the new latents.
        v_new: ``[B, 1, m, R]``, the new rotary keys.
        scale: factor of the scores.
        causal: query i sees positions up to ``stored + i``; needs m = n.
        kv_mask: bool ``[B, >= stored + m]``, False = never seen.
        bias: ``[B|1, Hq|1, n, >= stored + m]``, bool (False = not seen) or float (added).
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and masks; 0 = none.
        window: as in :func:`kvpass.cpu_ops.attend`.
        tile: likewise.

    Returns:
        ``[B, n, Hq, Dv]`` contiguous, in the dtype of q; 0 where a query sees no key.
    """
    size, heads, tokens, _ = q.shape
    wk, wv = key_weight.float(), value_weight.float()
    (_, nope, latent), rotary, width = wk.shape, v_new.shape[3], wv.shape[1]
    if window >= batch.lengths[layer] + k_new.shape[2]:
        window = 0  # it covers everything
    scoring = Scoring(scale, causal, softcap, window, None)
    out = torch.empty((size, tokens, heads, width), dtype=q.dtype, device=q.device)
    if tokens == 1:
        readahead.ask_for_later_layer(batch, layer)
    absorbed = tokens == 1 or absorbs(tokens, latent, rotary, nope, width)

    def expanded(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        c, r = c.float(), r.float()
        keys = torch.cat((c @ wk.transpose(1, 2), r.expand(heads, -1, -1)), -1)
        return keys, c @ wv.transpose(1, 2)

    for sequence, (mask, extra) in enumerate(masks_of(size, kv_mask, bias)):
        row = batch.blocks[layer][sequence]
        c_new, r_new = k_new[sequence], v_new[sequence]
        if not absorbed:
            k, v = expanded(c_new, r_new)
            made = Made(heads, expanded)
            extend(batch, layer, row, q[sequence].float(), k, v, scoring, mask, extra,
                   out[sequence], made, tile)  # fmt: skip
            continue
        # [Hq, n, L + R]
        query = q[sequence].float()
        query = torch.cat((query[..., :nope] @ wk, query[..., nope:]), -1)
        sums = query.new_empty(tokens, heads, latent)
        if tokens == 1:
            new = k_new.shape[2]
            decode(batch, layer, sequence, row, new, query, scoring, mask, extra, sums, latent=True)
        else:
            k, v = _joined(c_new, r_new)
            extend(batch, layer, row, query, k, v, scoring, mask, extra, sums, Made(1, _joined),
                   tile)  # fmt: skip
        out[sequence].copy_((sums.transpose(0, 1) @ wv.transpose(1, 2)).transpose(0, 1))
    return out


def _joined(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the one head of absorbed attention."""
    c = c.float()
    return torch.cat((c, r.float()), -1), c
