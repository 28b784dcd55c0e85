"""Supervised data module: batches of saved trajectories, such as demonstrations of a teacher."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError, expand, shown, spread
from data_modules.evaluation_data import as_list
from data_modules.loading.loaders import TrainLoader, fingerprint, permutation
from data_modules.training_data import TrainingData
from rollout.storage import load_trajectories
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import StopReason, Trajectory, split_turns

logger = logging.getLogger(__name__)


def append_eos(trajectory: Trajectory, eos_id: int) -> Trajectory:
    """Return the trajectory with an EOS after its final answer, as part of the last turn (mask 1, log-prob 0.0).

    Search-R1's sequences end at ``</answer>`` without EOS, so a model trained on them does not learn to stop
    (docs/algorithms/kd.md). The rest is not tokenised again. Trajectories without a final answer, or with a sampled
    EOS at the end, are returned unchanged.
    """
    if trajectory.stop_reason is not StopReason.ANSWER or trajectory.response_ids[-1] == eos_id:
        return trajectory
    end = len(trajectory.response_ids)
    last = dataclasses.replace(trajectory.turns[-1], end=end + 1, observation_end=end + 1)
    return trajectory.replace(
        response_ids=(*trajectory.response_ids, eos_id),
        loss_mask=(*trajectory.loss_mask, 1),
        logprobs=(*trajectory.logprobs, 0.0),
        turns=(*trajectory.turns[:-1], last),
    )


def length_of(trajectory: Trajectory) -> int:
    """Return the number of prompt and response tokens of a trajectory."""
    return len(trajectory.prompt_ids) + len(trajectory.response_ids)


class BatchPlan:
    """Plans which trajectories form which training batch. The plan depends only on the number of the pass, and every
    pass has the same number of batches.

    A pass is a permutation of all trajectories, cut at equal shares of trajectories (``batch_size``) or of tokens
    (``batch_tokens``). Every trajectory is used, and no batch is empty.

    Args:
        lengths: tokens of each trajectory.
        seed: of the order.
        batch_size: at most this many trajectories per batch.
        batch_tokens: about this many tokens per batch (on average at least), and at least the longest trajectory.
        bucket_batches: k > 1 sorts the permutation by length within runs of k batches and shuffles the batches. Batches
            of similar lengths need less padding and are a little less random.

    Raises:
        ValueError: not exactly one of batch_size and batch_tokens, or one that does not fit.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        bucket_batches: int = 0,
    ) -> None:
        if (batch_size is None) == (batch_tokens is None):
            raise ValueError("give exactly one of batch_size (trajectories) and batch_tokens (tokens per batch)")
        if any(size is not None and size < 1 for size in (batch_size, batch_tokens)) or bucket_batches < 0:
            raise ValueError(
                f"batch_size is {batch_size}, batch_tokens {batch_tokens}, bucket_batches {bucket_batches}; expected "
                "at least 1, and for bucket_batches at least 0"
            )
        if batch_tokens is not None and max(lengths) > batch_tokens:
            raise ValueError(
                f"batch_tokens is {batch_tokens}, but the longest trajectory has {max(lengths)} tokens; raise it or "
                "set max_tokens"
            )
        self._lengths = lengths
        self._seed = seed
        self._weights = [1] * len(lengths) if batch_tokens is None else list(lengths)
        self._bucket_batches = bucket_batches
        if batch_size is not None:
            self.batches = -(-len(lengths) // batch_size)
        else:
            self.batches = max(1, sum(lengths) // batch_tokens)  # type: ignore[operator]  # one of them is given

    def of_pass(self, number: int) -> list[list[int]]:
        """Return the trajectory indices of each batch in pass ``number``."""
        order = permutation(len(self._lengths), derive_seed(self._seed, "order", number))
        if self._bucket_batches > 1:
            run = self._bucket_batches * -(-len(order) // self.batches)
            runs = [order[i : i + run] for i in range(0, len(order), run)]
            order = [i for part in runs for i in sorted(part, key=self._lengths.__getitem__)]
        batches = self._cut(order)
        if self._bucket_batches > 1:
            batches = [batches[i] for i in permutation(len(batches), derive_seed(self._seed, "batches", number))]
        return batches

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        # A trajectory belongs to the share in which it begins. Shares are at least as wide as any trajectory is long
        # (or hold whole trajectories), so that none stays empty.
        total, before = sum(self._weights), 0
        batches: list[list[int]] = [[] for _ in range(self.batches)]
        for i in order:
            batches[before * self.batches // total].append(i)
            before += self._weights[i]
        return batches


class SupervisedDataModule(TrainingData):
    """Data module that yields batches of saved trajectories as ``list[Trajectory]``; validation and test roll out.

    Trajectories with a prompt per turn are split into rows (``split_turns``), and sizes count rows. A batch is one
    optimiser step over all ranks; rank r holds its trajectories r, r + world, ... (which may be none). The order
    depends on the seed and the pass only, and the position is in the checkpoint.

    Args:
        trajectories: parquet files written by rollout.storage, or folders of them.
        batch_size: at most this many trajectories per batch; or
        batch_tokens: about this many tokens per batch, over all ranks.
        bucket_batches: see ``BatchPlan``.
        append_eos: add an EOS after final answers, so that the model learns to stop.
        tokenizer: Hugging Face folder that defines the EOS; by default the rollout system's.
        max_tokens: leave out trajectories with more tokens, prompt included. Prompts that fill the ``max_length`` of
            ``rollouts`` are always left out. The log counts them and names the first.
        max_train: use at most this many trajectories, evenly spaced over the files.
        held_out: keep this many of them, evenly spaced, out of training; every validation logs their losses
            (``val/ce`` and so on).
        evaluation: see ``EvaluationData``.

    Raises (on ``setup``):
        DatasetError: no file, a file without trajectories, or none left after the filters.
        ValueError: batch settings that do not fit.
    """

    def __init__(
        self,
        trajectories: Sequence[str],
        batch_size: PositiveInt | None = None,
        batch_tokens: PositiveInt | None = None,
        bucket_batches: NonNegativeInt = 0,
        append_eos: bool = True,
        tokenizer: str | None = None,
        max_tokens: PositiveInt | None = None,
        max_train: PositiveInt | None = None,
        held_out: NonNegativeInt = 0,
        **evaluation: Any,
    ) -> None:
        super().__init__(**evaluation)
        if (batch_size is None) == (batch_tokens is None):
            raise ValueError("give exactly one of batch_size (trajectories) and batch_tokens (tokens per batch)")
        if append_eos and tokenizer is None and self.rollouts is None:
            raise ValueError("append_eos needs the EOS: give `tokenizer` or `rollouts`, or set append_eos: false")
        self.trajectory_files = as_list("trajectories", trajectories)
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.bucket_batches = bucket_batches
        self.append_eos = append_eos
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.max_train = max_train
        self.held_out = held_out
        self._how_sampled = ""  # nothing is; subclasses
        self._held_out: list[Trajectory] = []
        self.report: dict[str, int] = {}  # how many trajectories of the files were kept or left out
        self._trajectories: list[Trajectory] = []
        self._plan: BatchPlan | None = None
        self._batches: tuple[int, list[list[int]]] = (-1, [])  # (pass, its batches)

    @property
    def held_out_rows(self) -> list[Trajectory]:
        """This rank's share of the held-out trajectories; empty before ``setup``."""
        return self._held_out[self.rank :: self.world_size]

    @property
    def training_rows(self) -> list[Trajectory]:
        """All trajectories of all ranks, for training and held out; empty before ``setup``. With a prompt per turn,
        each turn is one.
        """
        return [*self._trajectories, *self._held_out]

    def setup(self, stage: str) -> None:
        if stage == "fit" and self._loader is None:
            self._trajectories = self._load()
            lengths = [length_of(t) for t in self._trajectories]
            self._plan = BatchPlan(lengths, self.seed, self.batch_size, self.batch_tokens, self.bucket_batches)
            settings = (self.batch_size, self.batch_tokens, self.bucket_batches, self.seed)
            data = fingerprint([(t.group, t.index, length_of(t)) for t in self._trajectories], settings)
            self._loader = TrainLoader(self._plan.batches, self._batch, data, self._how_sampled)
        super().setup(stage)

    # ------------------------------------------------------------------------------------------------------------

    def _load(self) -> list[Trajectory]:
        found = [t for path in expand(self.trajectory_files) for t in load_trajectories(path)]
        usable = [t for t in found if t.trainable]
        eos = self._eos_id() if self.append_eos else None
        taken = [t if eos is None else append_eos(t, eos) for t in spread(usable, self.max_train)]
        apart = set(spread(range(len(taken)), self.held_out)) if self.held_out else set()
        # turns, if every turn has a separate prompt
        rows = [row for i, t in enumerate(taken) if i not in apart for row in split_turns(t)]
        kept = self._short(rows)
        self._held_out = self._short(row for i in sorted(apart) for row in split_turns(taken[i]))
        self.report = {
            "found": len(found),
            "unusable": len(found) - len(usable),
            "beyond_max_train": len(usable) - len(taken),
            **({"held_out": len(apart)} if apart else {}),
            "too_long": len(rows) - len(kept),
            "kept": len(kept),
            "tokens": sum(map(length_of, kept)),
        }
        if self.rank == 0:
            if long := [row.task.id for row in rows if not self._fits(row)]:
                why = f"longer than max_tokens ({self.max_tokens}) or with a prompt of max_length ({self._max_length})"
                logger.warning(
                    "%s: %d of %d trajectories are left out: %s; id %s",
                    ", ".join(self.trajectory_files), len(long), len(rows), why, shown(long),
                )  # fmt: skip
            logger.info("training trajectories: %s", ", ".join(f"{k} {v}" for k, v in self.report.items()))
        if not kept or (apart and not self._held_out):
            raise DatasetError(
                f"{', '.join(self.trajectory_files)}: no trajectory left to {'validate' if kept else 'train'} on ("
                + ", ".join(f"{k} {v}" for k, v in self.report.items())
                + "); see max_tokens and max_train, or generate more"
            )
        return kept

    def _short(self, rows: Iterable[Trajectory]) -> list[Trajectory]:
        return [row for row in rows if self._fits(row)]

    @property
    def _max_length(self) -> int | None:
        return None if self.rollouts is None else self.rollouts.budgets.max_length

    def _fits(self, row: Trajectory) -> bool:
        short = self.max_tokens is None or length_of(row) <= self.max_tokens
        return short and (self._max_length is None or len(row.prompt_ids) < self._max_length)

    def _eos_id(self) -> int:
        if self.tokenizer is None:
            return self.rollouts.protocol.stop_token_ids[0]  # type: ignore[union-attr]  # checked in __init__
        return load_tokenizer(self.tokenizer).eos_token_id

    def _batch(self, position: int) -> list[Trajectory]:
        return self._rows(position)[self.rank :: self.world_size]

    def _rows(self, position: int) -> list[Trajectory]:
        """Return all trajectories of the batch at ``position`` (from 0), those of other ranks included."""
        number, index = divmod(position, self._plan.batches)  # type: ignore[union-attr]  # made in setup
        if self._batches[0] != number:
            self._batches = (number, self._plan.of_pass(number))  # type: ignore[union-attr]
        return [self._trajectories[i] for i in self._batches[1][index]]
