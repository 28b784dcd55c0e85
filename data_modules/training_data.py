"""Base class of data modules that train: one resumable train loader, whose position is in the checkpoint."""

from __future__ import annotations

from typing import Any

from data_modules.evaluation_data import EvaluationData
from data_modules.loading.loaders import TrainLoader


class TrainingData(EvaluationData):
    """Base class of data modules with training batches. Subclasses create the train loader ``self._loader`` in
    ``setup("fit")``.
    """

    _loader: TrainLoader | None = None

    def train_dataloader(self) -> TrainLoader:
        if self._loader is None:
            raise RuntimeError(f"{type(self).__name__}.train_dataloader() was called before setup('fit')")
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else {"train": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the train loader's position. Raises ValueError if it was saved over other data (see
        ``TrainLoader``)."""
        # Without a loader a checkpoint is being tested: there is nothing to continue.
        if self._loader is not None and "train" in state_dict:
            self._loader.load_state_dict(state_dict["train"])
