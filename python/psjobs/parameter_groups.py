"""Parameter groups: parameters that the servers train with another learning rate or weight decay than the job's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from psjobs._native import Environment, InputError


class Group(NamedTuple):
    """What the servers do otherwise with a parameter."""

    factor: float = 1.0
    """Factor on the job's learning rate."""
    weight_decay: float | None = None
    """Replaces the job's weight decay."""


Named = Iterable[tuple[str, torch.nn.Parameter]]


def of_job(named: Named, environment: Environment) -> list[Group]:
    """The group of each parameter by `spec.training.optimizer.groups`: the first whose pattern matches its name."""
    return [Group(*environment.parameter_group(name)) for name, _ in named]


def of_script(named: Named, optimizer: torch.optim.Optimizer) -> list[Group]:
    """The group of each parameter by the script's optimizer. Where all its groups have one learning rate or one weight
    decay, the job's counts. A parameter that the optimizer does not have stays as it is, and a warning names it.

    Raises InputError if the optimizer has parameters that the model does not have: nothing would train them.
    """
    named = list(named)
    known = {id(tensor) for _, tensor in named}
    others = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in known]
    if others:
        shapes = ", ".join(str(list(other.shape)) for other in others[:8])
        raise InputError(
            f"the optimizer has {len(others)} parameters that the model does not have, of shapes {shapes}; attach one module "
            "that holds all that is to be trained, as torch.nn.ModuleList does"
        )
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    base = optimizer.defaults.get("lr") if len(set(rates)) > 1 else None
    groups: dict[int, Group] = {}
    for rate, decay, group in zip(rates, decays, optimizer.param_groups, strict=True):
        own = Group(float(rate) / base if base else 1.0, decay if len(set(decays)) > 1 else None)
        groups |= {id(parameter): own for parameter in group["params"]}
    left_out = [name for name, tensor in named if id(tensor) not in groups]
    if left_out:
        warnings.warn(f"psjobs: the optimizer does not have {', '.join(left_out)}, so they stay as they are", stacklevel=3)
    return [groups.get(id(tensor), Group(0.0)) for _, tensor in named]


def settings(named: Named, groups: list[Group], rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """`param_groups` of torch: the parameters of each group, with `factor`, `lr` and `weight_decay`."""
    parameters: dict[Group, list[torch.nn.Parameter]] = {}
    for (_, tensor), group in zip(named, groups, strict=True):
        parameters.setdefault(group, []).append(tensor)

    def setting(group: Group, of_group: list[torch.nn.Parameter]) -> dict[str, Any]:
        decay = weight_decay if group.weight_decay is None else group.weight_decay
        return {"params": of_group, "factor": group.factor, "lr": rate * group.factor, "weight_decay": decay}

    return [setting(group, of_group) for group, of_group in parameters.items()]
