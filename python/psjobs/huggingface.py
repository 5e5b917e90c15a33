"""Hugging Face's Trainer as a trainer of a job: `from psjobs.huggingface import Trainer` instead of transformers'."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import psjobs

# accelerate would take these for the place in a process group of torch.distributed, and wait for its other members.
if "PSJOB_NAME" in os.environ:
    for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(_name, None)


class Trainer(transformers.Trainer):
    """transformers' Trainer, whose model is attached to the job and whose batches are this trainer's share.

    Optimizer and learning-rate schedule are the job's; of `TrainingArguments` only which parameters have no weight decay
    counts, and a warning says what to set to have the rest. What the Trainer logs as numbers, as `loss`, is reported to the
    job. `job` is its place. A script that is alone trains as with transformers' own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.job = psjobs.join()
        self._is_attached = False
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Attaches the model, the first time."""
        if not self._is_attached:
            model = self.model if model is None else model
            if model is None:
                raise psjobs.InputError("the Trainer has no model; give it one")
            _, self.optimizer = self.job.attach(model, super().create_optimizer(model))
            self._is_attached = True
        assert self.optimizer is not None
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """In a job, a schedule that changes nothing: the job has its own."""
        if self.job.alone:
            return super().create_scheduler(num_training_steps, optimizer)
        if not isinstance(self.lr_scheduler, _Unchanged):
            if self.lr_scheduler is not None:
                warnings.warn("psjobs: the Trainer's schedule has no effect; set spec.training.schedule", stacklevel=2)
            self.lr_scheduler = _Unchanged(optimizer or self.create_optimizer())
        return self.lr_scheduler

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Begins where the job is: transformers would stop at an epoch that has no batches left."""
        epochs, batches = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        if self.job.alone:
            return epochs, batches
        self.create_optimizer()
        accumulate = self.args.gradient_accumulation_steps
        # In this call: an earlier one has planned its own steps.
        done = min(max(0, self.job._resume - self.job._planned // accumulate), max_steps)
        self.state.global_step = done
        epochs = num_train_epochs if done == max_steps else done // num_update_steps_per_epoch
        self.job._planned += epochs * num_update_steps_per_epoch * accumulate
        return epochs, 0

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        accumulate = self.args.gradient_accumulation_steps
        return self.job.sampler(dataset, self._train_batch_size, accumulate=accumulate)

    def get_train_dataloader(self) -> Any:
        """Warns of data that trainers cannot share out."""
        if not self.job.alone and isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            text = "the training data have no length, so every trainer reads all of them, and again from the start when restarted"
            warnings.warn(f"psjobs: {text}; give them a length, or split them by job.trainer", stacklevel=2)
        return super().get_train_dataloader()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own, in trainer 0: the model is the same in all."""
        if self.job.trainer == 0:
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.job.trainer == 0:
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Reports what is logged."""
        self.job.report({name: value for name, value in logs.items() if isinstance(value, int | float)})
        super().log(logs, *args, **kwargs)


class _Unchanged(LambdaLR):
    """Shows the learning rate that the optimizer has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda _: 1.0)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]
