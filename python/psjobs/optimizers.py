"""Optimizers that a script gets from `Job.attach`: one that asks the servers, or torch's own for a script that is alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from psjobs._native import Environment, InputError
from psjobs.parameter_groups import of_job, settings

if TYPE_CHECKING:
    from psjobs.job import Job
    from psjobs.overlap import Overlap
    from psjobs.parameters import Parameters


class ServerOptimizer(torch.optim.Optimizer):
    """Sends gradients to the servers, which run the job's optimizer, and takes the parameters that come back.

    The first backward() after `step` begins new gradients, so a loop needs no `zero_grad`; without `step` they add up, as
    ever. `lr` in its parameter groups shows the job's learning rate; what a script writes there, as a schedule does,
    changes nothing and is warned of.
    """

    def __init__(
        self,
        job: Job,
        parameters: Parameters,
        overlap: Overlap,
        learning_rate: Callable[[int], float],
        missing_is_error: bool,
        groups: list[dict[str, Any]],
    ) -> None:
        super().__init__(groups, _momentum(json.loads(job._environment.optimizer)))
        self._shown = [group["lr"] for group in self.param_groups]
        self._job, self._parameters, self._overlap = job, parameters, overlap
        self._learning_rate, self._missing_is_error = learning_rate, missing_is_error
        self._is_warned_of_rates = False
        # Parameters that a warning has named.
        self._named: set[str] = set()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step: gradients go up, parameters come back.

        Raises InputError if no gradient was computed, or one is missing and that is an error, and Error if the servers
        refuse, which they do for a gradient that is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_rates()
        self._parameters.check_frozen()
        self._parameters.check_memory()
        self._check_missing()
        self._overlap.end_step()
        if self._job._exchanges is not None:
            self._job._exchanges.exchange()
        else:
            self._job._exchange(self._parameters)
            self._parameters.take()
        self._parameters.end_step()
        self._overlap.begin_step()
        self._show_rates()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients.

        Raises InputError if gradients of this step have left for the servers.
        """
        self._overlap.discard()
        self._parameters.discard()
        self._job._discard_rows()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InputError once the model is attached: the servers have the parameters of then."""
        if hasattr(self, "_shown"):
            text = "a job trains the parameters that required a gradient when the model was attached, and takes no others"
            raise InputError(f"{text}; attach the model with all that is to be trained")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads nothing, as the state is the servers', and warns if there is a state. accelerate loads what `state_dict`
        gives, which has none."""
        if state_dict.get("state"):
            text = "the optimizer's state is with the servers, so what the script loads is ignored"
            warnings.warn(f"psjobs: {text}; checkpoints of the job (spec.checkpoint) have it", stacklevel=2)

    def _show_rates(self) -> None:
        rate = self._learning_rate(self._job.step)
        for group in self.param_groups:
            group["lr"] = rate * group["factor"]
        self._shown = [group["lr"] for group in self.param_groups]

    def _check_rates(self) -> None:
        """Warns once of a learning rate that the script has set, as its schedule does."""
        rates = ((group["lr"], shown) for group, shown in zip(self.param_groups, self._shown, strict=True))
        changed = next(((own, jobs) for own, jobs in rates if own != jobs), None)
        if changed is not None and not self._is_warned_of_rates:
            self._is_warned_of_rates = True
            own, jobs = changed
            text = f"the script sets a learning rate of {own:g}, the job's counts, {jobs:g} in step {self._job.step}"
            warnings.warn(f"psjobs: {text}; a schedule is set by spec.training.schedule", stacklevel=4)

    def _check_missing(self) -> None:
        """Says which parameters backward() has not reached in this step."""
        if all(self._overlap.counts):
            return
        counted = zip(self._parameters.all, self._overlap.counts, strict=True)
        missing = [parameter.name for parameter, count in counted if count == 0 and not parameter.has_gradient]
        if not missing:
            return
        if len(missing) == len(self._parameters.all):
            raise InputError("opt.step() was called before any gradient was computed; call loss.backward() first")
        text = f"no gradient reached {', '.join(missing)} in step {self._job.step}"
        if self._missing_is_error:
            raise InputError(
                f"{text}; freeze what the loss does not depend on (requires_grad_(False)), or let it count as zero by "
                'job.attach(..., missing="zero")'
            )
        if not self._named.issuperset(missing):
            self._named.update(missing)
            warnings.warn(f"psjobs: {text}, so it counts as zero; freeze what the loss does not depend on", stacklevel=3)


def _momentum(rule: dict[str, Any]) -> dict[str, Any]:
    """The settings of the job's rule that schedules of torch look for, as OneCycleLR."""
    match rule["type"]:
        case "SGD" | "RMSprop":
            return {"momentum": rule["momentum"]}
        case "Adam" | "AdamW":
            return {"betas": (rule["beta1"], rule["beta2"])}
    return {}


def rule_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """`spec.training.optimizer` of torch's own optimizer; none for what servers do not have. What its parameter groups
    differ in is that of its defaults."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    group = dict(optimizer.defaults)
    for name in group:
        values = [group.get("initial_lr", group.get(name)) if name == "lr" else group.get(name) for group in optimizer.param_groups]
        if all(value == values[0] for value in values):
            group[name] = values[0]
    kind = type(optimizer).__name__
    if kind == "Adam" and group.get("decoupled_weight_decay"):
        kind = "AdamW"
    rule: dict[str, Any] = {"type": kind, "learningRate": float(group.get("lr", 0.0))}
    match rule["type"]:
        case "SGD" if not group["dampening"]:
            rule |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        case "Adam" | "AdamW":
            beta1, beta2 = group["betas"]
            rule |= {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"], "amsgrad": group["amsgrad"]}
        case "Adagrad":
            rule |= {"learningRateDecay": group["lr_decay"], "initialAccumulator": group["initial_accumulator_value"]}
            rule |= {"epsilon": group["eps"]}
        case "RMSprop":
            rule |= {"alpha": group["alpha"], "epsilon": group["eps"], "momentum": group["momentum"]}
            rule |= {"centered": group["centered"]}
        case _:
            return None
    return rule | {"weightDecay": group["weight_decay"]}


def compare(optimizer: torch.optim.Optimizer, environment: Environment) -> None:
    """Warns where the script's own optimizer is not the job's, which counts, and says how to make it so.

    Raises InputError for one that maximizes.
    """
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise InputError("servers minimize, and the optimizer was made with maximize=True; leave it out, and negate the loss")
    job: dict[str, Any] = json.loads(environment.optimizer)
    own = rule_of(optimizer)
    if own is None:
        text = f"servers have no {type(optimizer).__name__} with these arguments; the job's optimizer is {job['type']}"
        warnings.warn(f"psjobs: {text} with a learning rate of {job['learningRate']}", stacklevel=4)
        return
    apart = ("params", "lr", "initial_lr", "weight_decay")
    others = [{k: v for k, v in group.items() if k not in apart} for group in optimizer.param_groups]
    if any(other != others[0] for other in others):
        text = "a job's parameter groups differ in learning rate and weight decay only, those of the script in more"
        warnings.warn(f"psjobs: {text}; the optimizer's own arguments count for all", stacklevel=4)
    if any(_differs(value, job.get(name)) for name, value in own.items()):
        said = {name: value for name, value in own.items() if name in ("type", "learningRate") or value}
        text = f"the script's optimizer is not the job's, which counts: {job['type']} with a learning rate of "
        text += f"{job['learningRate']}; to have the script's, set spec.training.optimizer, or psjobs run --set "
        warnings.warn(f"psjobs: {text}'training.optimizer={json.dumps(said)}'", stacklevel=4)


def _differs(own: object, jobs: object) -> bool:
    if isinstance(own, float | int) and isinstance(jobs, float | int):
        return abs(own - jobs) > 1e-9 * abs(own)
    return own != jobs


def counted(optimizer: torch.optim.Optimizer, job: Job) -> torch.optim.Optimizer:
    """The script's own optimizer, whose steps the job counts."""
    optimizer.register_step_post_hook(lambda *_: job._did_step())
    return optimizer


def alone(
    parameters: Parameters, environment: Environment, job: Job, is_counted: bool = True
) -> torch.optim.Optimizer:
    """torch's own optimizer of the job's rule, with its parameter groups and its schedule. The job counts its steps, if
    they are not counted elsewhere.

    Raises InputError for FTRL, which torch does not have.
    """
    rule: dict[str, Any] = json.loads(environment.optimizer)
    kind, decay, epsilon = rule["type"], rule["weightDecay"], rule["epsilon"]
    rate, betas = environment.learning_rate(0), (rule["beta1"], rule["beta2"])
    groups = settings(parameters.named, of_job(parameters.named, environment), rate, decay)
    optimizer: torch.optim.Optimizer
    if kind == "SGD":
        momentum, nesterov = rule["momentum"], rule["nesterov"]
        optimizer = torch.optim.SGD(groups, rate, momentum, weight_decay=decay, nesterov=nesterov)
    elif kind == "Adam":
        optimizer = torch.optim.Adam(groups, rate, betas, epsilon, decay, rule["amsgrad"])
    elif kind == "AdamW":
        optimizer = torch.optim.AdamW(groups, rate, betas, epsilon, decay, rule["amsgrad"])
    elif kind == "Adagrad":
        start = rule["initialAccumulator"]
        optimizer = torch.optim.Adagrad(groups, rate, rule["learningRateDecay"], decay, start, epsilon)
    elif kind == "RMSprop":
        alpha, momentum = rule["alpha"], rule["momentum"]
        optimizer = torch.optim.RMSprop(groups, rate, alpha, epsilon, decay, momentum, rule["centered"])
    else:
        raise InputError(f"torch has no optimizer {kind}, which only a job's servers have; take another one, or a job without local")

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = environment.learning_rate(job.step) * group["factor"]

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.zero_grad()
        if is_counted:
            job._did_step()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer
