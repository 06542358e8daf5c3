"""Spectra of matrices in metrics.jsonl, at every so-many-th step (optim/spectra.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from models.transformer import Transformer
from optim.spectra import Spectra
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.looking import looked_at
from trainer.metrics import Reporter


class SpectraLog:
    """Writes a row `{"step": ..., "spectra": {parameter: ...}}` for a step that is due and makes an update."""

    def __init__(self, config: TrainingConfig, engine: Engine, reporter: Reporter):
        self._every, self._split_heads = config.log.spectra_every, config.optim.split_heads
        self._engine, self._reporter = engine, reporter
        self._spectra: Spectra | None = None  # until the first one is due

    def around(self, step: int) -> AbstractContextManager[None]:
        """The context that all ranks make the update of a step in."""
        return self._watch(step) if self._every and step % self._every == 0 else nullcontext()

    @contextmanager
    def _watch(self, step: int) -> Iterator[None]:
        if self._spectra is None:
            model = self._engine.model
            assert isinstance(model, Transformer)
            self._spectra = Spectra(self._engine.optimizer, model.parameter_roles(), self._split_heads)
        spectra = self._spectra

        def after() -> None:
            self._reporter.row({"step": step, "spectra": spectra.after()})

        with looked_at(self._engine, spectra.before, after):
            yield
