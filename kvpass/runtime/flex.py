# SPDX-License-Identifier: Apache-2.0
"""flex_attention of KV handles: it has no schema, so that handles cannot dispatch it themselves."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.flex_attention import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_any, tree_map_only

from kvpass.runtime.handle import KVHandle


def _dense(args: Any) -> Any:
    return tree_map_only(KVHandle, lambda handle: handle.clone(), args)


@flex_attention.py_impl(KVHandle)
def _flex_of_handles(*args: Any) -> Any:
    return flex_attention(*_dense(args))


_fake: Any = flex_attention.python_key_table.pop(FakeTensorMode, None)


def _flex_traced(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    """As for other tensors, once handles among the arguments are replaced by such.

    Torch asks the classes of arguments in their order, and would stop at the query's.
    """
    if tree_any(lambda item: isinstance(item, KVHandle), args):
        with mode:
            args = _dense(args)
    return _fake(mode, *args, **kwargs)


if _fake is not None:
    flex_attention.py_impl(FakeTensorMode)(_flex_traced)
