# SPDX-License-Identifier: Apache-2.0
"""Keys and values projected from cached latents: what is read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
from kvpass.graph.report import GraphReport, observed
from kvpass.graph.site import FindResult
from tests.graph.recorder import find

B, H, N, P = 2, 4, 3, 5
LATENT, ROTARY, NOPE, VALUES = 32, 16, 24, 40
Q = torch.randn(B, H, N, NOPE + ROTARY)
C, R = torch.randn(B, 1, N, LATENT), torch.randn(B, 1, N, ROTARY)
PC, PR = torch.randn(B, 1, P, LATENT), torch.randn(B, 1, P, ROTARY)
WEIGHT = torch.randn(H * (NOPE + VALUES), LATENT) * LATENT**-0.5
Make = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def project(c: Tensor, weight: Tensor) -> Tensor:
    return F.linear(c, weight).view(c.shape[0], c.shape[2], H, -1).transpose(1, 2)


def by_cat(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    keys = torch.cat([kv[..., :NOPE], r.expand(-1, H, -1, -1)], dim=-1)
    return keys, kv[..., NOPE:]


def by_copies(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    k, values = torch.split(kv, [NOPE, VALUES], dim=-1)
    keys = kv.new_empty(*kv.shape[:-1], NOPE + ROTARY)
    keys[..., :NOPE].copy_(k)
    keys[..., NOPE:].copy_(r.expand(-1, H, -1, -1))
    return keys, values


def by_copies_in_the_other_order(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    k, values = kv.split([NOPE, VALUES], -1)
    keys = torch.empty(*kv.shape[:-1], NOPE + ROTARY)
    keys[:, :, :, NOPE:].copy_(r.expand(B, H, r.shape[2], ROTARY))
    keys[:, :, :, :NOPE].copy_(k)
    return keys, values


def by_assignment(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    keys = kv.new_empty(*kv.shape[:-1], NOPE + ROTARY)
    keys[..., :NOPE] = kv[..., :-VALUES]
    keys[..., NOPE:] = r.expand(-1, H, -1, -1)
    return keys, kv[..., -VALUES:]


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, keys, values, mask)


def eager(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = q @ keys.transpose(2, 3) * 0.2
    mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(
        keys.shape[2] - q.shape[2] + 1
    )
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ values


def step_of(make: Make, attention: Callable[..., Tensor] = sdpa) -> Callable[..., tuple]:
    def step(q: Tensor, c: Tensor, r: Tensor, pc: Tensor, pr: Tensor, weight: Tensor) -> tuple:
        latents, rotary = torch.cat([pc, c], dim=2), torch.cat([pr, r], dim=2)
        return attention(q, *make(latents, rotary, weight)), latents, rotary

    return step


class Layer(torch.nn.Module):
    """A layer whose query, latents and rotary keys are of one input."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHT)
        self.step = step_of(make, eager)

    def forward(self, x: Tensor, pc: Tensor, pr: Tensor) -> tuple:
        q, c, r = x.split([H * (NOPE + ROTARY), LATENT, ROTARY], dim=-1)
        q = q.view(*x.shape[:2], H, -1).transpose(1, 2)
        return self.step(q, c.unsqueeze(1), r.unsqueeze(1), pc, pr, self.weight)


def found(make: Make, attention: Callable[..., Tensor] = sdpa) -> FindResult:
    return find(step_of(make, attention), Q, C, R, PC, PR, WEIGHT)


@pytest.mark.parametrize("attention", [sdpa, eager])
@pytest.mark.parametrize("make", [by_cat, by_copies, by_copies_in_the_other_order, by_assignment])
def test_latents_are_read(make: Make, attention: Callable[..., Tensor]) -> None:
    result = found(make, attention)
    assert result.refusals == []
    (site,) = result.sites
    assert site.latent is not None
    assert (site.latent.heads, site.latent.nope) == (H, NOPE)
    assert site.form == "functional latents"
    assert site.mask.causal and not site.mask.terms
    assert site.source.k_new is not None and site.source.k_new.name.startswith("l_c_")


COMPILED = [
    (make, inner, dynamic)
    for make in (by_cat, by_copies)
    for inner in ("eager", "aot_eager")
    for dynamic in (None, True)
]


@pytest.mark.parametrize(("make", "inner", "dynamic"), [*COMPILED, (by_copies, "inductor", None)])
def test_steps_equal_the_uncompiled_ones(make: Make, inner: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    step = Layer(make)
    options = {"inner": inner, "block_size": 32, "hot": "64KiB"}
    compiled = torch.compile(step, backend=kvpass.backend, options=options, dynamic=dynamic)
    reports: list[GraphReport] = []
    plain = kept = (PC[:, :, :0], PR[:, :, :0])
    with torch.no_grad(), observed(reports.append):
        for n in (40, 3, *(1,) * 5):
            x = torch.randn(B, n, H * (NOPE + ROTARY) + LATENT + ROTARY)
            expected, *plain = step(x, *plain)
            got, *kept = compiled(x, *kept)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert all(report.rewritten == 1 for report in reports)
    assert len(reports) <= 3
    torch.testing.assert_close(kept[0] + 0, plain[0])
    torch.testing.assert_close(kept[1] + 0, plain[1])


def with_bias(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.ones(weight.shape[0])
    kv = F.linear(c, weight, bias).view(c.shape[0], c.shape[2], H, -1).transpose(1, 2)
    return torch.cat([kv[..., :NOPE], r.expand(-1, H, -1, -1)], dim=-1), kv[..., NOPE:]


def swapped(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    return torch.cat([kv[..., VALUES:], r.expand(-1, H, -1, -1)], dim=-1), kv[..., :VALUES]


def overlapping(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    return torch.cat([kv[..., :NOPE], r.expand(-1, H, -1, -1)], dim=-1), kv[..., NOPE - 8 :]


def of_two_projections(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    keys, _ = by_cat(c, r, weight)
    return keys, project(c, weight * 2)[..., NOPE:]


def changed(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    keys = torch.cat([kv[..., :NOPE].relu(), r.expand(-1, H, -1, -1)], dim=-1)
    return keys, kv[..., NOPE:]


def turned_after_the_cache(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return by_cat(c, r.flip(-1), weight)


def half_filled(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    kv = project(c, weight)
    keys = kv.new_zeros(*kv.shape[:-1], NOPE + ROTARY)
    keys[..., :NOPE].copy_(kv[..., :NOPE])
    keys[..., NOPE + 8 :].copy_(r[..., 8:].expand(-1, H, -1, -1))
    return keys, kv[..., NOPE:]


def written_again(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = by_copies(c, r, weight)
    keys.mul_(2)
    return keys, values


def broadcast(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens get the first one's rotary key."""
    kv = project(c, weight)
    keys = kv.new_empty(*kv.shape[:-1], NOPE + ROTARY)
    keys[..., :NOPE].copy_(kv[..., :NOPE])
    keys[..., NOPE:].copy_(r[:, :, :1])
    return keys, kv[..., NOPE:]


def weight_changed_in_place(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.clone()
    made = by_cat(c, r, weight)
    weight.zero_()
    return made


def also_read(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = by_cat(c, r, weight)
    return keys, values + keys.sum() * 0


FOREIGN = [
    *(with_bias, swapped, overlapping, of_two_projections, changed, turned_after_the_cache),
    *(half_filled, written_again, broadcast, weight_changed_in_place, also_read),
]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda f: f.__name__)
def test_what_is_not_understood_is_left_alone(make: Make) -> None:
    """Refused with a reason, and bit-equal."""
    result = found(make)
    assert result.sites == []
    assert len(result.refusals) == 1
    assert result.refusals[0].reason
    torch._dynamo.reset()
    compiled = torch.compile(step_of(make), backend=kvpass.backend, options={"inner": "eager"})
    with torch.no_grad():
        got = compiled(Q, C, R, PC, PR, WEIGHT)
        expected = step_of(make)(Q, C, R, PC, PR, WEIGHT)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((520, 16, 24, 40), "latents of 520 channels"),
        ((32, 8, 24, 40), "rotary keys of 8 channels"),
    ],
)
def test_sizes_that_no_kernel_has(sizes: tuple[int, ...], words: str) -> None:
    latent, rotary, nope, values = sizes

    def make(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        kv = project(c, weight)
        return torch.cat([kv[..., :nope], r.expand(-1, H, -1, -1)], -1), kv[..., nope:]

    result = find(
        step_of(make), torch.randn(B, H, N, nope + rotary), torch.randn(B, 1, N, latent),
        torch.randn(B, 1, N, rotary), torch.randn(B, 1, P, latent), torch.randn(B, 1, P, rotary),
        torch.randn(H * (nope + values), latent),
    )  # fmt: skip
    assert result.sites == []
    assert words in result.refusals[0].reason


def test_dtypes_must_agree() -> None:
    def make(c: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = by_cat(c.bfloat16(), r.bfloat16(), weight.bfloat16())
        return keys.float(), values.float()

    assert found(make).sites == []
