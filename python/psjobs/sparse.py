"""Embeddings whose rows lie in the servers' sparse tables: as many as there are 64-bit keys, and memory for those only that
have been trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import nn

from psjobs._native import InputError
from psjobs.buffers import floats, integers

Rows = tuple[int, "memoryview[int]", "memoryview[float]"]
"""Gradients of rows: the table, its keys, and a row for each."""

TableArguments = tuple[str, int, float, int, int]
"""Name, width, bound of the first values, rows at most, and steps after which an unused row goes."""


class Puller(Protocol):
    """Where the rows of keys come from: the session, or tables in this process."""

    def pull(self, table: int, keys: memoryview[int], rows: memoryview[float], /) -> bool:
        """Writes the rows of `keys` to `rows`; false if the step under way does not count any more."""


class SparseModule(nn.Module):
    """What both modules have: a table, and the rows that a step has read."""

    def __init__(
        self, embedding_dim: int, *, bound: float | None = None, max_rows: int = 0, idle_steps: int = 0
    ) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.bound = embedding_dim**-0.5 if bound is None else bound
        self.max_rows, self.idle_steps = max_rows, idle_steps
        self._table = -1
        self._puller: Puller | None = None
        # Keys and rows that backward() has reached since the last step, by the identity of the rows.
        self._reached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Keys, ascending, and rows that came with the last step.
        self._fetched: tuple[torch.Tensor, torch.Tensor] | None = None
        self._listed: _ListedRows | None = None

    def extra_repr(self) -> str:
        """The arguments, as modules show them."""
        return f"{self.embedding_dim}, bound={self.bound:g}, max_rows={self.max_rows}, idle_steps={self.idle_steps}"

    def rows(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the keys that are there, f32 `[n, embedding_dim]`, and the place of each key's row, in the shape of
        `keys`.

        Raises InputError if the keys are no integers, or the model is not attached yet.
        """
        if keys.dtype not in (torch.int64, torch.int32):
            raise InputError(f"keys are int64, these are {keys.dtype}; convert them with .long()")
        if self._puller is None:
            raise InputError("the model of this module is not attached yet, so it has no rows; call job.attach(model) first")
        unique, places = torch.unique(keys.detach().cpu().long(), return_inverse=True)
        is_trained = torch.is_grad_enabled()
        rows = self._take_fetched(unique) if is_trained else None
        if rows is None:
            rows = torch.zeros(len(unique), self.embedding_dim)
            if len(unique):
                self._puller.pull(self._table, integers(unique), floats(rows))
        rows = rows.to(keys.device)
        if is_trained:
            rows.requires_grad_()
            reached = self._reached

            def reach(rows: torch.Tensor) -> None:
                if self._listed is not None and id(rows) not in reached:
                    self._listed.add(rows)
                reached[id(rows)] = unique, rows

            rows.register_post_accumulate_grad_hook(reach)  # type: ignore[no-untyped-call]
        return rows, places.to(keys.device)

    def forget(self) -> None:
        """Forgets the gradients of rows. A forward pass whose backward() comes later is not affected."""
        for _, rows in self._reached.values():
            rows.grad = None
        self._reached.clear()

    def _take_fetched(self, unique: torch.Tensor) -> torch.Tensor | None:
        """A copy of the rows of these keys, if all of them came with the last step."""
        if self._fetched is None or not len(self._fetched[0]):
            return None
        keys, rows = self._fetched
        places = torch.searchsorted(keys, unique).clamp_(max=len(keys) - 1)
        return rows[places] if torch.equal(keys[places], unique) else None


class Embedding(SparseModule):
    """As `torch.nn.Embedding`, whose rows lie in a table of the job's servers, by 64-bit keys of any value.

    A row begins with values drawn evenly from `-bound` to `bound`, by default 1/sqrt(`embedding_dim`), and takes memory
    from its first gradient on. With `max_rows` the rows that were used longest ago go when there are more, with
    `idle_steps` those unused for so many steps; they begin anew when their keys come again. The servers train rows with the
    job's optimizer, as far as it is the rule of each row by itself.
    """

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of `keys`, int64 of any shape: f32 of that shape and `embedding_dim`."""
        rows, places = self.rows(keys)
        return nn.functional.embedding(places, rows)


class EmbeddingBag(SparseModule):
    """As `torch.nn.EmbeddingBag`, whose rows lie in a table of the job's servers. Its other arguments are those of
    `Embedding`."""

    def __init__(
        self,
        embedding_dim: int,
        mode: Literal["sum", "mean", "max"] = "mean",
        *,
        bound: float | None = None,
        max_rows: int = 0,
        idle_steps: int = 0,
    ) -> None:
        super().__init__(embedding_dim, bound=bound, max_rows=max_rows, idle_steps=idle_steps)
        self.mode = mode

    def forward(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum, mean or maximum of each bag's rows, f32 `[bags, embedding_dim]`: `keys` are int64 `[bags, length]`, or
        `[n]` with the `offsets` at which bags begin."""
        rows, places = self.rows(keys)
        return nn.functional.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights
        )


class _ListedRows:
    """Lists rows whose gradients backward() has computed among an optimizer's parameters until its step: a GradScaler divides
    their gradients by its scale, and leaves the step out if one is not finite."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._listed: list[torch.Tensor] = optimizer.param_groups[0]["params"]
        self._parameters = len(self._listed)
        self._is_in_step = False
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)

    def add(self, rows: torch.Tensor) -> None:
        """Lists these; within a step it is the optimizer that looks, which does not train them."""
        if not self._is_in_step:
            self._listed.append(rows)

    def clear(self) -> None:
        """Lists no rows."""
        self._is_in_step = False
        del self._listed[self._parameters :]

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        has_rows = len(self._listed) > self._parameters
        self.clear()
        if has_rows and getattr(optimizer, "grad_scale", None) is not None:
            text = "the GradScaler leaves gradients to a fused optimizer, which does not have those of the sparse modules' rows"
            raise InputError(f"{text}; make the optimizer with fused=False")
        self._is_in_step = True

    def _end_step(self, *_: object) -> None:
        self._is_in_step = False


class SparseModules:
    """All sparse modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        found = {module: name for name, module in model.named_modules() if isinstance(module, SparseModule)}
        self._modules = list(found)
        # By table: the keys that the next step will read.
        self._next: list[tuple[int, torch.Tensor]] = []
        self._listed: _ListedRows | None = None
        self.tables: list[TableArguments] = [
            (name or "rows", module.embedding_dim, module.bound, module.max_rows, module.idle_steps)
            for module, name in found.items()
        ]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def read_from(self, puller: Puller) -> None:
        """Lets the modules read from their tables, which are in the order of `tables`."""
        for table, module in enumerate(self._modules):
            module._table, module._puller = table, puller

    def list_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Lets a GradScaler find the gradients of rows at this optimizer, which the script steps; returns it."""
        if self._modules:
            self._listed = _ListedRows(optimizer)
        for module in self._modules:
            module._listed = self._listed
        return optimizer

    def will_read(self, keys: Mapping[SparseModule, torch.Tensor]) -> None:
        """Has the rows of these keys come with the next step, for the one after it.

        Raises InputError for a module that is not in the model.
        """
        for module in keys:
            if module not in self._modules:
                raise InputError("keys= names a module that is no sparse module of the attached model")
        self._next = [(module._table, torch.unique(of.detach().cpu().long())) for module, of in keys.items()]

    def wanted(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Table, keys and room for the rows that come with this step."""
        wanted, self._next = self._next, []
        return [(table, keys, torch.zeros(len(keys), self._modules[table].embedding_dim)) for table, keys in wanted if len(keys)]

    def fetched(self, rows: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Takes the rows that came with a step; those from before are forgotten."""
        for module in self._modules:
            module._fetched = None
        for table, keys, values in rows:
            self._modules[table]._fetched = keys, values

    def gradients(self, scale: float = 1.0) -> list[Rows]:
        """The gradients of rows that backward() has computed since the last step, times `scale`; they are forgotten here."""
        self._unlist()
        given: list[Rows] = []
        for module in self._modules:
            parts = [(keys, rows.grad) for keys, rows in module._reached.values() if rows.grad is not None]
            module.forget()
            if parts:
                keys = torch.cat([keys for keys, _ in parts])
                values = torch.cat([gradient.detach().to("cpu", torch.float32) for _, gradient in parts]) * scale
                given.append((module._table, integers(keys), floats(values)))
        return given

    def discard(self) -> None:
        """Forgets the gradients of rows since the last step."""
        self._unlist()
        for module in self._modules:
            module.forget()

    def _unlist(self) -> None:
        if self._listed is not None:
            self._listed.clear()
