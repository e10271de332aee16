# SPDX-License-Identifier: Apache-2.0
"""Tensors that become a module's parameters as they are, without a weight loader and without a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_h3_plugin.errors import LoadError
from vllm_h3_plugin.host.linear_method import stored


def adopt(
    module: torch.nn.Module, params: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
) -> dict[str, torch.nn.Parameter]:
    """Put tensors in the place of a module's parameters, with the attributes of those. Copies nothing.

    Raises:
        LoadError: a tensor has another shape or element type than the parameter.
    """
    adopted = {}
    for name, view in views.items():
        old, new = params[name], stored(params[name], view)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise LoadError(
                f"{name} is {old.dtype} {list(old.shape)}", why=f"the base has {new.dtype} {list(new.shape)}"
            )
        parameter = torch.nn.Parameter(new, requires_grad=False)
        parameter.__dict__.update(old.__dict__)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, parameter)
        adopted[name] = parameter
    return adopted
