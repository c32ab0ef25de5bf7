# SPDX-License-Identifier: Apache-2.0
"""The code of a random attention module, as the author of a model would have written it."""

from __future__ import annotations

from tests.graph.spec import FOLDED, Site, Spec


def source(spec: Spec) -> str:
    """The ``forward`` of a specification.

    Its arguments are ``x [B, n, columns]``; ``cache``, a TieredCache or the past of each attention,
    ``(keys, values)`` or None; and ``position``, the number of tokens of earlier calls. It returns
    outputs ``[B, n, Hq * Dv]``, new pasts, and probabilities that are returned, each as a list with
    one entry for each attention.
    """
    lines = ["def forward(self, x, cache, position):", "size, n = x.shape[0], x.shape[1]"]
    start = 0
    for number, site in enumerate(spec.sites):
        for name, heads, width in zip(
            "qkv", (site.heads, site.kv_heads, site.kv_heads), site.widths, strict=True
        ):
            columns = f"x[..., {start}:{start + width}]"
            lines.append(
                f"{name} = {columns}.view(size, n, {heads}, {width // heads}).transpose(1, 2)"
            )
            start += width
        lines += _Writer(spec, site, number).lines
    outs, pasts, weights = (
        ", ".join(f"{name}{i}" for i in range(len(spec.sites)))
        for name in ("out", "past", "weights")
    )
    lines.append(f"return [{outs}], [{pasts}], [{weights}]")
    return "\n    ".join(lines) + "\n"


class _Writer:
    """Writes one attention."""

    def __init__(self, spec: Spec, site: Site, number: int) -> None:
        self.spec, self.site, self.number = spec, site, number
        self.lines: list[str] = []
        self.add = self.lines.append
        self.grow()
        self.change()
        self.repeat()
        if site.anchor == "sdpa":
            self.sdpa()
        else:
            self.eager()
        if site.foreign == "past read elsewhere":
            self.add("out = out + old[0].mean()")
        self.add(f"out{number} = out.transpose(1, 2).reshape(size, n, -1)")
        returned = site.foreign == "weights returned" and site.anchor == "eager"
        self.add(f"weights{number} = {'weights' if returned else None}")

    def grow(self) -> None:
        """All keys and values, and the new past."""
        site, past = self.site, f"past{self.number}"
        if self.spec.cache == "tiered":
            self.add(f"k, v = cache.update(k, v, {self.number})")
            self.add(f"{past} = None")
            self.add("total = k.shape[2]")
            return
        self.add(f"old, new = cache[{self.number}], (k, v)")
        join = {
            "list": "k, v = torch.cat([old[0], k], dim=-2), torch.cat([old[1], v], dim=-2)",
            "tuple": "k, v = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)",
            "concat": "k = torch.concat((old[0], k), dim=2); v = torch.concat((old[1], v), dim=2)",
        }[site.join]
        if site.start == "none":
            self.add("if old is not None:")
            self.add("    " + join)
        else:
            if site.start == "tensor":
                self.add("if old is None:")
                self.add("    old = [torch.tensor([], dtype=x.dtype) for _ in range(2)]")
            elif site.start == "empty":
                self.add("if old is None:")
                self.add("    old = k.new_empty((size, k.shape[1], 0, k.shape[3])), v[:, :, :0]"
                         ".new_zeros((size, v.shape[1], 0, v.shape[3]))")  # fmt: skip
            self.add(join)
        if site.foreign == "cache not returned":
            self.add(f"{past} = new")
        elif site.keep:
            last = site.window - 1
            self.add(f"{past} = k[:, :, -{last}:, :], v[:, :, -{last}:, :]")
        else:
            self.add(f"{past} = k, v")
        self.add("total = k.shape[2]")

    def change(self) -> None:
        """What stands between the cache and the products."""
        narrow = "torch.float16" if self.spec.dtype != "float16" else "torch.bfloat16"
        changes = {
            "keys reversed": "k = k.flip(2)",
            "values reversed": "v = v.flip(2)",
            "values rolled": "v = v.roll(1, 2)",
            "values scrambled": "v = v.transpose(-1, -2).reshape(v.shape)",
            "values scaled": "v = v * 2.0",
            "keys narrowed": f"k = k.to({narrow}).to(x.dtype)",
            "keys shifted": "k = k + 0.5",
            "values are keys": "v = k",
        }
        if self.site.foreign in changes:
            self.add(changes[self.site.foreign])
        if self.site.scale == "split":
            self.add("k = k * 0.5")

    def repeat(self) -> None:
        """A head of keys and values for each query head."""
        site = self.site
        kv, group = site.kv_heads, site.group
        forms = {
            "expand": "[:, :, None, :, :].expand(size, {kv}, {group}, total, {width})"
            ".reshape(size, {heads}, total, {width})",
            "unsqueeze": ".unsqueeze(2).expand(-1, -1, {group}, -1, -1).flatten(1, 2)",
            "interleave": ".repeat_interleave({group}, dim=1)",
            "tile": ".repeat(1, {group}, 1, 1)",
            "tile by expand": "[:, None].expand(size, {group}, {kv}, total, {width})"
            ".reshape(size, {heads}, total, {width})",
        }
        form = site.repeat
        if site.foreign == "heads tiled":
            form = "tile by expand" if form == "expand" else "tile"
        elif group == 1 or form in ("broadcast", "enable_gqa"):
            return
        for name, width in (("k", site.head_dim_k), ("v", site.head_dim_v)):
            if form == "torch":
                self.add(f"{name} = torch.repeat_interleave({name}, {group}, 1).contiguous()")
            else:
                values = {"kv": kv, "group": group, "width": width, "heads": site.heads}
                self.add(f"{name} = {name}{forms[form].format(**values)}")

    # ---------------------------------------------------------- masks and biases

    def visible(self) -> bool:
        """Write ``seen``, ``[n, total]`` or ``[B|1, Hq|1, n, total]``; False if all is seen."""
        site = self.site
        rows = "rows = torch.arange(n)[:, None] + (total - n)"
        columns = "columns = torch.arange(total)[None, :]"
        per_head = f"torch.arange({site.heads})[:, None, None]"
        foreign = {
            "sees the next key": "seen = columns <= rows + 1",
            "chunked": "seen = (columns <= rows) & (columns // 4 == rows // 4)",
            "window on the wrong side":
                "seen = (columns <= rows) & ((columns < rows - 3) | (columns == rows))",
            "late keys per head": f"seen = columns > {per_head} - 2",
            "late keys per head and causal":
                f"seen = (columns <= rows) & ((columns > {per_head} - 1) | (columns == rows))",
        }  # fmt: skip
        forms = {
            "le": "seen = columns <= rows",
            "ge": "seen = rows >= columns",
            "not gt": "seen = ~(columns > rows)",
            "tril": "seen = torch.ones(n, total, dtype=torch.bool).tril(total - n)",
            "arange": "seen = torch.arange(total).view(1, 1, 1, -1)"
            " <= torch.arange(total - n, total).view(1, 1, -1, 1)",
            "buffer": f"seen = self.table{self.number}[..., total - n : total, :total]",
        }
        if site.foreign in foreign:
            self.lines += [rows, columns, foreign[site.foreign]]
        elif site.visible in ("causal", "window"):
            if site.spelling in ("le", "ge", "not gt") or site.window:
                self.lines += [rows, columns]
            self.add(forms[site.spelling])
        elif site.visible != "none":
            self.add(forms["buffer"])
        elif not site.padding:
            return False
        if site.window and site.foreign not in foreign:
            self.add(f"seen = seen & (columns > rows - {site.window})")
        if site.padding:
            pad = f"self.pad{self.number}[:, None, None, :total]"
            if site.keep or site.spelling == "arange":  # as transformers indexes it
                first = f"position + {site.stored} + n - total" if site.keep else "0"
                self.add(f"keys = torch.arange(total) + ({first})")
                self.add("batch = torch.arange(size)[:, None, None, None]")
                pad = f"self.pad{self.number}[batch, keys[None, None, None, :]]"
            alone = site.visible == "none" and site.foreign not in foreign
            self.add(f"seen = {pad}" if alone else f"seen = seen & {pad}")
        if site.foreign == "mask negated":
            self.add("seen = ~seen")
        return True

    def bias(self) -> None:
        """Write ``bias``."""
        i, form = self.number, self.site.bias
        slopes = f"self.slopes{i}[:, None, None]"
        self.add({
            "": "bias = None",
            "alibi": f"bias = {slopes} * (torch.arange(total)"
            " - torch.arange(total - n, total)[:, None])",
            "alibi of keys": f"bias = {slopes} * torch.arange(total)",
            "keys": f"bias = self.bias{i}[..., :total]",
        }.get(form, f"bias = self.bias{i}[..., total - n : total, :total]"))  # fmt: skip

    # ---------------------------------------------------------- one call

    def sdpa(self) -> None:
        """``scaled_dot_product_attention``."""
        site, options = self.site, []
        given = {
            "into q": "1.0", "split": "1", "int": "2", "none": "1.0", "default": "",
            "attribute": f"self.scale{self.number}",
        }.get(site.scale, repr(site.factor))  # fmt: skip
        given = {"scale negative": "-0.2", "scale zero": "0.0"}.get(site.foreign, given)
        if site.scale in ("into q", "split"):
            self.add(f"q = q * {site.factor * (2 if site.scale == 'split' else 1)}")
        if given:
            options.append(f"scale={given}")
        if site.repeat == "enable_gqa":
            options.append("enable_gqa=True")
        if site.foreign == "dropout":
            options.append("dropout_p=0.3")
        if site.foreign == "is_causal with a past":
            options.append("is_causal=True")
        elif site.apply == "is_causal":
            # SDPA takes no symbol, which `n > 1` is where n is one.
            options.append("is_causal=True if n > 1 else False")
        else:
            masked = self.visible()
            if site.bias:
                self.bias()
            low = "-math.inf" if site.hidden == "-inf" else "torch.finfo(x.dtype).min"
            if masked and site.bias and site.bias_first:
                self.add(f"mask = bias.masked_fill(~seen, {low})")
            elif masked and (site.bias or site.apply == "float"):
                self.add(f"mask = torch.where(seen, q.new_zeros(()), q.new_full((), {low}))")
                if site.bias:
                    self.add("mask = mask + bias")
            elif masked or site.bias:
                self.add(f"mask = {'seen' if masked else 'bias'}")
            if masked or site.bias:
                options.append("attn_mask=mask")
        arguments = ", ".join(["q", "k", "v", *options])
        self.add(f"out = F.scaled_dot_product_attention({arguments})")

    # ---------------------------------------------------------- two products around a softmax

    def eager(self) -> None:
        """Score product, scale, softcap, bias, mask, softmax and product with V, in turn."""
        site = self.site
        if site.bias:
            self.bias()
        if site.scale in ("into q", "split"):
            self.add(f"q = q * {site.factor * (2 if site.scale == 'split' else 1)}")
        if site.precision == "operands":
            self.add("q, k = q.float(), k.float()")
        if site.foreign == "late write":
            self.add("q = q * 1.0")
        self.scores()
        if site.foreign == "late write":
            self.add("q.add_(1.0)")
        if site.precision == "scores":
            self.add("scores = scores.float()")
        if not site.mask_first:
            self.scale()
            self.softcap()
        apart = site.bias and site.product != "baddbmm"
        if apart and site.bias_first:
            self.add("scores = scores + bias")
        self.mask()
        if apart and not site.bias_first:
            in_place = site.apply == "fill_" and site.precision in ("", "dtype", "late")
            self.add(f"scores = {'scores.add_(bias)' if in_place else 'scores + bias'}")
        if site.mask_first:
            self.scale()
        self.disturb()
        self.weights()
        self.out()

    def scores(self) -> None:
        """The product of queries and keys, ``[B, Hq, n, total]``."""
        site = self.site
        product = site.product
        if product == "einsum":
            self.add('scores = torch.einsum("bhqd,bhkd->bhqk", q, k)')
            return
        if product in FOLDED:
            self.add(f"q, k = q.reshape(size * {site.heads}, n, -1), k.flatten(0, 1)")
        turned = {
            "mT": "k.mT", "transpose": "k.transpose(-1, -2)", "swapaxes": "k.swapaxes(-2, -1)",
            "permute": "k.transpose(1, 2)" if product in FOLDED else "k.permute(0, 1, 3, 2)",
        }[site.transpose]  # fmt: skip
        if product == "baddbmm":
            self.add(f"bias = bias.expand(size, {site.heads}, -1, -1)"
                     f".reshape(size * {site.heads}, -1, total)")  # fmt: skip
            beta = 0.5
            if site.foreign == "bias of no weight":  # whatever it holds is then ignored
                self.add("bias = bias * math.nan")
                beta = 0
            call = f"torch.baddbmm(bias, q, {turned}, beta={beta}, alpha={site.factor})"
        elif product == "@":
            call = f"q @ {turned}"
        else:
            call = f"torch.{'bmm' if product == 'bmm' else 'matmul'}(q, {turned})"
        self.add(f"scores = {call}")
        if product in FOLDED:
            self.add(f"scores = scores.view(size, {site.heads}, n, total)")

    def scale(self) -> None:
        """The scores times their scale, unless a product has it already."""
        factor = self.site.factor
        call = {
            "default": f"scores / math.sqrt({self.site.head_dim_k})",
            "times": f"scores * {factor}",
            "attribute": f"scores * self.scale{self.number}",
            "left": f"{factor} * scores",
            "divided": f"torch.div(scores, {1 / factor})",
            "int": "scores * 2",
            "in place": f"scores.mul_({factor})",
            "twice": f"(scores / 8.0).mul({8 * factor})",
        }.get(self.site.scale, "")
        foreign = {
            "scale negative": "scores * -0.2",
            "scale zero": "scores * 0.0",
            "scale by a tensor": "scores * scores.new_tensor(0.25)",
        }
        call = foreign.get(self.site.foreign, call)
        if self.site.scale == "assigned" and self.site.foreign not in foreign:
            self.add(f"scores *= {factor}")
        elif call:
            self.add(f"scores = {call}")

    def softcap(self) -> None:
        """The scores within the softcap."""
        site, cap = self.site, self.site.softcap
        if site.foreign == "softcap by data":
            self.add("scores = torch.tanh(scores / scores.abs().amax()) * 5.0")
        elif site.foreign == "softcap of one head":
            self.add("scores = torch.cat([scores[:, :1].tanh(), scores[:, 1:]], dim=1)")
        elif cap and site.softcap_form == "steps":
            self.lines += [f"scores = scores / {cap}", "scores = torch.tanh(scores)",
                           f"scores = scores * {cap}"]  # fmt: skip
        elif cap and site.softcap_form == "left":
            self.add(f"scores = {cap} * torch.tanh(scores / {cap})")
        elif cap:
            self.add(f"scores = scores.div_({cap}).tanh().mul_({cap})")
        if site.foreign == "run-time scale behind":
            self.add("scores = scores * self.late")

    def mask(self) -> None:
        """The scores with hidden keys lowered."""
        site = self.site
        if site.apply == "hidden":
            table = f"self.hidden{self.number}[..., total - n : total, :total]"
            low = "-math.inf" if site.hidden == "-inf" else "torch.finfo(scores.dtype).min"
            self.add(f"scores = torch.masked_fill(scores, {table}, {low})")
            return
        if not self.visible():
            return
        low = "-math.inf" if site.hidden == "-inf" else "torch.finfo(scores.dtype).min"
        calls = {
            "fill": f"scores.masked_fill(~seen, {low})",
            "fill_": f"scores.masked_fill_(seen.logical_not(), {low})",
            "where": f"torch.where(seen, scores, {low})",
            "where hidden": "torch.where(~seen, torch.full((), "
            f"{low}, dtype=scores.dtype), scores)",
            "buffer == 0": f"scores.masked_fill(seen == 0, {low})",
            "add": "scores + mask",
            "add left": "mask + scores",
            "add_": "scores.add_(mask)",
        }
        if site.apply.startswith("add"):
            self.add("zero, low = (torch.full((), value, dtype=scores.dtype)"
                     f" for value in (0.0, {low}))")  # fmt: skip
            self.add("mask = torch.where(seen, zero, low)")
        self.add(f"scores = {calls[site.apply]}")

    def disturb(self) -> None:
        """Foreign pieces between mask and softmax."""
        narrow = "torch.float16" if self.spec.dtype == "float32" else "x.dtype"
        changes = {
            "sin": "torch.sin(scores)",
            "bent by sin": "scores + 0.1 * torch.sin(scores)",
            "number added": "scores + 1.0",
            "scores narrowed": f"scores.float().to({narrow}).to(scores.dtype)",
            "maximum of queries": "scores - scores.amax(-2, keepdim=True)",
            "maximum of keys": "scores - scores.amax(-1, keepdim=True)",
            "clamped": "scores.clamp(min=-1.0)",
            "mean added": "scores + scores.mean(-1, keepdim=True)",
        }
        if self.site.foreign in changes:
            self.add(f"scores = {changes[self.site.foreign]}")

    def weights(self) -> None:
        """The softmax, in which sinks may take part, in the dtype of the values."""
        site = self.site
        front = site.foreign == "sinks in front"
        if site.sinks:
            self.add(f"sinks = self.sinks{self.number}.reshape(1, -1, 1, 1)"
                     ".expand(size, -1, n, -1)")  # fmt: skip
            self.add(f"scores = torch.cat([{'sinks, scores' if front else 'scores, sinks'}], -1)")
        if site.sinks == "max":
            self.add("scores = scores - scores.max(dim=-1, keepdim=True).values")
        elif site.sinks == "amax":
            self.add("scores = scores - torch.amax(scores, -1, keepdim=True)")
        dim = {"softmax of queries": -2, "softmax of heads": 1}.get(site.foreign, -1)
        if site.precision == "dtype":
            call = f"F.softmax(scores, dim={dim}, dtype=torch.float32)"
        elif site.precision == "late":
            call = f"torch.softmax(scores.float(), dim={dim})"
        else:
            call = {
                "F": f"F.softmax(scores, dim={dim})",
                "torch": f"torch.softmax(scores, {dim})",
                "method": f"scores.softmax(dim={dim})",
            }[site.softmax]
        self.add(f"weights = {call}")
        if site.sinks:
            self.add(f"weights = weights[..., {'1:' if front else ':-1'}]")
        changes = {
            "weights squared": "weights * weights",
            "weights bent": "weights + 0.1 * torch.sin(weights)",
            "weights scaled": "weights * 2.0",
            "weights clamped": "weights.clamp(max=0.4)",
            "softmax twice": "weights.softmax(-1)",
        }
        if site.foreign in changes:
            self.add(f"weights = {changes[site.foreign]}")
        if site.foreign == "not cast back":
            self.add("weights, v = weights.float(), v.float()")
        elif site.precision:
            self.add("weights = weights.to(v.dtype)")
        if site.dropout:
            self.add("weights = F.dropout(weights, p=0.4, training=self.training)")
        if site.foreign == "dropout":
            self.add("weights = F.dropout(weights, p=0.3, training=True)")

    def out(self) -> None:
        """The product of probabilities and values, ``[B, Hq, n, Dv]``."""
        site = self.site
        if site.product == "einsum":
            self.add('out = torch.einsum("bhqk,bhkd->bhqd", weights, v)')
        elif site.product in FOLDED:
            folded = f"size * {site.heads}"
            product = "torch.matmul" if site.product == "3-d matmul" else "torch.bmm"
            self.add(f"flat = weights.reshape({folded}, n, total)")
            self.add(f"out = {product}(flat, v.reshape({folded}, total, {site.head_dim_v}))")
            self.add(f"out = out.view(size, {site.heads}, n, {site.head_dim_v})")
        else:
            self.add(f"out = {'weights @ v' if site.product == '@' else 'weights.matmul(v)'}")
