"""The episodes of two_ranks_worker.py: modules that compare turns, and those that a prompt with skills teaches."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import lightning as L

from lightning_modules.algorithms.episode_grpo import EpisodeGRPO, GiGPO
from lightning_modules.algorithms.sdar import RLSD, SDAR, SkillSD
from rollout.skills.bandit import UCB
from rollout.trajectory import StopReason, Trajectory
from tests.lightning_modules.algorithms.episode_helpers import TASKS, EpisodeData, episodes, skills

OF_EACH = 4  # trajectories of a task, and so of a rank


class Training(NamedTuple):
    """What is trained, and on what."""

    name: str
    rows: Callable[[], list[Trajectory]]  # of all ranks
    module: L.LightningModule
    data: Callable[[list[Trajectory]], object]  # for ``helpers.fit``, of a rank's share of them


class Case(NamedTuple):
    window: int | None
    failed: Sequence[int]  # places of the trajectories, 0 to 7, that failed by infrastructure
    kind: type[L.LightningModule]
    options: dict[str, object]


def cases(teacher: str) -> dict[str, Case]:
    """By name. A window of 1 makes a row of every turn, so that the ranks have unequal numbers of rows.

    Weights of what teaches are far above the published ones, for a wrong scale of them to be seen.
    """
    reference = {"reference": teacher, "kl_coef": 0.1}
    charged = {"invalid_coef": 0.1}
    gate = {"skills": skills(UCB()), "skills_coef": 0.5, "centred": True, "clip_signal": True}
    jsd = {"skills": skills(), "skills_coef": 0.5, "signal": "jsd", "jsd_beta": 0.3, "gap_clamp": 2.0}
    return {
        "episode_grpo": Case(1, [6], EpisodeGRPO, {"group_statistics": "rows", **charged, **reference}),
        "gigpo": Case(1, [6], GiGPO, {"group_statistics": "trajectories", "turn_norm": "mean_std_norm", **charged}),
        "sdar": Case(1, [6], SDAR, {**gate, **charged, **reference}),
        "sdar_jsd": Case(1, [], SDAR, {**jsd, **charged, "teacher_weights": "fixed"}),
        "skill_sd": Case(None, [6], SkillSD, {"skills": skills(), "skills_coef": 0.5, **charged}),
        "rlsd": Case(1, [6], RLSD, {"skills": skills(), "skills_coef": 1.0, **charged}),
        "idle_rank": Case(1, range(4, 8), RLSD, {"skills": skills(), "skills_coef": 1.0, **charged}),
    }


def played(folder: str, case: Case) -> tuple[list[Trajectory], object]:
    """Two tasks with four episodes each, and the protocol that wrote their prompts."""
    whole, protocol = episodes(folder, case.window, OF_EACH, TASKS[:2])
    changes = {"stop_reason": StopReason.INFRASTRUCTURE, "reward": None}
    return [t.replace(**changes) if i in case.failed else t for i, t in enumerate(whole)], protocol


def episode_trainings(model: str, teacher: str, plain: type, **options: object) -> Iterator[Training]:
    """``plain``: the optimiser, a class to inherit ``configure_optimizers`` from. ``options``: of every module."""
    for name, case in cases(teacher).items():
        whole, protocol = played(model, case)
        kind = type(f"{case.kind.__name__}With{plain.__name__}", (plain, case.kind), {})
        data = partial(EpisodeData, protocol=protocol)
        yield Training(name, whole.copy, kind(model, **(options | case.options)), data)
