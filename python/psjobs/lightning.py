"""A Lightning module as a trainer of a job: `Trainer(strategy=psjobs.lightning.Strategy())`."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

import psjobs


class Strategy(SingleDeviceStrategy):
    """Trains the module's parameters on the job's servers, with this trainer's share of the training data.

    Optimizer and learning-rate schedule are the job's; of what `configure_optimizers` returns the parameter groups count, and
    a warning says what to set to have the rest. Metrics that the module logs are reported to the job at the end of each
    epoch. `job` is its place. A script that is alone trains as without the strategy. Without a `device` it is the first
    of the Trainer's accelerator: a GPU where there is one.
    """

    strategy_name = "psjobs"

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(device=device or "cpu", **kwargs)
        self._is_device_given = device is not None
        self.job = psjobs.join()

    @property
    def root_device(self) -> torch.device:
        """The device of the module and its batches."""
        accelerator = self.accelerator
        if self._is_device_given or accelerator is None:
            return self._root_device
        first: torch.device = accelerator.get_parallel_devices(accelerator.parse_devices(1))[0]
        return first

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        """Attaches the module."""
        if trainer.lightning_module is None:
            raise psjobs.InputError("the strategy has no module; give one to trainer.fit")
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            count = len(self.optimizers)
            raise psjobs.InputError(f"a job has one optimizer, configure_optimizers returns {count}; return one")
        _, optimizer = self.job.attach(trainer.lightning_module, self.optimizers[0])
        self.optimizers = [optimizer]
        # A process that was started again goes on with the steps that are left of `max_steps`.
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = self.job._resume
        if not self.job.alone and self.lr_scheduler_configs:
            warnings.warn("psjobs: the module's learning-rate schedule has no effect; set spec.training.schedule", stacklevel=2)
            self.lr_scheduler_configs = []

    def process_dataloader(self, dataloader: object) -> object:
        """Shares out the data that is trained on, in the job's order; what is validated or tested on stays whole."""
        module = self.lightning_module
        if self.job.alone or module is None or not module.trainer.training:
            return super().process_dataloader(dataloader)
        if isinstance(dataloader, DataLoader) and dataloader.batch_size is not None:
            known = (SequentialSampler, RandomSampler, SubsetRandomSampler, DistributedSampler)
            if isinstance(dataloader.sampler, known):
                return self.job.share(dataloader, accumulate=module.trainer.accumulate_grad_batches)
        text = "the job cannot share out this training data, so every trainer reads all of it"
        advice = "give the strategy a DataLoader without a sampler of its own, or split the data by strategy.job.trainer"
        warnings.warn(f"psjobs: {text}; {advice}", stacklevel=2)
        return super().process_dataloader(dataloader)

    def on_train_end(self) -> None:
        """Reports the metrics of the last epoch."""
        module = self.lightning_module
        if module is not None:
            logged = module.trainer.callback_metrics
            self.job.report({name: float(value) for name, value in logged.items()})
        super().on_train_end()
