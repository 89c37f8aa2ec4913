"""A pretended device: its tensors lie in the CPU's memory, but may meet the CPU's tensors only where a GPU's may.

with Elsewhere():
    run(torch.device("cuda"))            # raises where a tensor was left behind
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("cuda", 0)
OWN = torch.device("meta")  # as which torch itself sees it
aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}  # by indices of either device


# torch asks for the device of another tensor in these, and SDPA for a mask's
LIKE = {aten.scalar_tensor.default, aten._to_copy.default, aten.ones.default}


class There(Tensor):
    """A tensor of that device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        wrapper: There = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=OWN,
        )  # fmt: skip
        wrapper.inner = inner
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


class Made(TorchFunctionMode):
    """Tensors that torch makes of Python's numbers, for which it calls no operator that it would ask others about."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.tensor, torch.as_tensor) or kwargs.get("device") != DEVICE:
            return function(*args, **kwargs)
        return function(*args, **kwargs | {"device": None}).to(DEVICE)


class Elsewhere(TorchDispatchMode):
    """Calls that ask for the device get it."""

    def __enter__(self) -> Elsewhere:
        self._rest = ExitStack()
        self._rest.enter_context(mock.patch.object(torch.cuda, "_lazy_init"))
        self._rest.enter_context(Made())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._rest.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    arguments, form = tree_flatten((args, kwargs))
    there = {id(x.inner): x for x in arguments if isinstance(x, There)}
    here = [x for x in arguments if isinstance(x, Tensor) and not isinstance(x, There) and x.dim()]
    indexed = function in INDEXED and isinstance(arguments[0], There)
    if there and here and not (indexed or function is aten.copy_.default):
        shapes = [tuple(x.shape) for x in (*there.values(), *here)]
        raise AssertionError(f"{function}: tensors on two devices, {shapes}")
    asked = kwargs.get("device")
    like = asked == OWN and function in LIKE
    is_there = (
        asked == DEVICE or like or (bool(there) and asked in (None, OWN) and not any(arguments[0] is x for x in here))
    )
    inner = [x.inner if isinstance(x, There) else x for x in arguments]
    args, kwargs = tree_unflatten(
        [torch.device("cpu") if isinstance(x, torch.device) and is_there else x for x in inner], form
    )
    if not is_there:
        return function(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():  # a tensor of such a mode could be no parameter
        result = function(*args, **kwargs)
        return tree_map(lambda x: there.get(id(x), There(x)) if isinstance(x, Tensor) else x, result)
