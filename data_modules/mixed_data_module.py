"""Distillation data module that mixes saved trajectories with fresh ones of the student."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from common.ranges import PositiveInt
from common.ranks import gather_lists
from common.seeds import derive_seed
from data_modules.loading.decoding import UNCHANGED, Decoding
from data_modules.loading.failure_guard import FailureGuard
from data_modules.loading.loaders import fingerprint
from data_modules.loading.mixing import Mixing, Source
from data_modules.supervised_data_module import SupervisedDataModule, append_eos
from rollout.storage import from_row, to_row
from rollout.system import RolloutSystem
from rollout.trajectory import Trajectory, split_turns


class MixedDataModule(SupervisedDataModule):
    """Data module for distillation: each batch has saved trajectories, or some that the student has sampled, as
    ``mixing`` decides. The student samples fresh ones for the questions of the saved batch; kept ones are the latest of
    these.

    The student's trajectories are scored for the log, and get an EOS after final answers like the saved ones
    (``append_eos``), so that a divergence from a teacher includes whether to stop. Decisions and draws depend on the
    seed and the step only. The kept trajectories are in the checkpoint, so that a resumed run continues exactly.

    Args:
        trajectories: parquet files written by rollout.storage, or folders of them; the student rolls out their tasks.
        rollouts: samples the student's trajectories, and evaluates.
        mixing: ``OnPolicyShare`` (GKD), ``AdaptiveOffPolicy`` (DistiLLM), or your own.
        train_sampling: decoding of the student's trajectories.
        max_consecutive_failures: training stops after this many consecutive fresh batches above
            ``max_infrastructure_failures``.
        supervised: see ``SupervisedDataModule``.

    Raises:
        ValueError: ``mixing`` follows a loss on held-out trajectories, but none are held out or validation is off.
    """

    samples_student = True

    def __init__(
        self,
        trajectories: Sequence[str],
        rollouts: RolloutSystem,
        mixing: Mixing,
        train_sampling: Decoding = UNCHANGED,
        max_consecutive_failures: PositiveInt = 3,
        **supervised: Any,
    ) -> None:
        super().__init__(trajectories, rollouts=rollouts, **supervised)
        if mixing.follows is not None and not (self.held_out and self.files["val"]):
            raise ValueError(
                f"{type(mixing).__name__} follows the loss on held-out trajectories, found held_out {self.held_out} "
                f"and {len(self.files['val'])} val_files; give both"
            )
        self.mixing, self.train_sampling = mixing, train_sampling
        self._how_sampled = fingerprint(type(mixing).__name__, sorted(vars(mixing).items()), train_sampling)
        self.just_sampled = False  # whether the last batch was rolled out for its step
        self.sampled: list[Trajectory] = []  # this rank's share of those rolled out for the last such batch
        self.batch_metrics: dict[str, float] = {}  # of the last batch, for the log
        self._kept: deque[Trajectory] = deque(maxlen=mixing.capacity)
        self._guard = FailureGuard(self.max_infrastructure_failures, max_consecutive_failures)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.start_rollouts()

    @property
    def samples_next(self) -> bool:
        """Whether the student must sample the next batch, which needs the current weights in the engine."""
        return self._loader is not None and self._source(self._loader.position) == "fresh"

    def validated(self, losses: Mapping[str, float]) -> None:
        """Tell ``mixing`` the loss on held-out trajectories to which it adapts. ``losses`` has these losses by name."""
        if self.mixing.follows is not None:
            self.mixing.validated(losses[self.mixing.follows])

    def state_dict(self) -> dict[str, Any]:
        own = {"kept": [to_row(t) for t in self._kept], "mixing": self.mixing.state_dict()}
        return super().state_dict() | (own if self._loader is not None else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._loader is not None:
            self._kept.extend(from_row(row) for row in state_dict["kept"])
            self.mixing.load_state_dict(state_dict["mixing"])

    # ------------------------------------------------------------------------------------------------------------

    def _source(self, position: int) -> Source:
        draw = random.Random(derive_seed(self.seed, "source", position)).random()
        total = getattr(self.trainer, "estimated_stepping_batches", float("inf"))
        return self.mixing.source(draw, position + 1, total, len(self._kept))

    def _rows(self, position: int) -> list[Trajectory]:
        saved = super()._rows(position)
        source = self._source(position)
        rows, reward = saved, {}
        self.just_sampled = source == "fresh"
        if source == "fresh":
            sampled = self._sample(position, saved)
            self.sampled = sampled[self.rank :: self.world_size]
            rows = self._short(row for t in sampled for row in split_turns(t))
            self._kept.extend(rows)
            scores = [t.reward.total for t in sampled if t.reward is not None]
            reward = {"data/fresh_reward": sum(scores) / len(scores)} if scores else {}
        elif source == "kept":
            drawn = random.Random(derive_seed(self.seed, "kept", position))
            rows = drawn.sample(list(self._kept), min(len(saved), len(self._kept)))
        shares = {f"data/{name}": float(name == source) for name in ("fresh", "kept")}
        self.batch_metrics = {**shares, **reward, **self.mixing.metrics()}
        return rows

    def _sample(self, position: int, saved: Sequence[Trajectory]) -> list[Trajectory]:
        """Return one new trajectory of the student for each saved one, of all ranks, without infrastructure
        failures."""
        tasks = list({(t.group, t.index): t.task for t in saved}.values())
        place = {name: k for k, name in enumerate(dict.fromkeys(task.id for task in tasks))}
        found = self.rollouts.rollout(  # type: ignore[union-attr]  # required in __init__
            # A question's tasks go to one rank, which gives them different seeds.
            [task for task in tasks if place[task.id] % self.world_size == self.rank],
            n=1,
            sampling=self.train_sampling.params,
            seed=derive_seed(self.seed, "fresh", position),
        )
        self.rollouts.sleep()  # type: ignore[union-attr]
        self._guard.check(found, f"training step {position + 1}", self.rollouts.failures)  # type: ignore[union-attr]
        eos = self._eos_id() if self.append_eos else None
        usable = [t for t in gather_lists(found) if t.trainable]
        return [t if eos is None else append_eos(t, eos) for t in usable]
