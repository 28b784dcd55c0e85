"""Exact continuation: 8 iterations straight against k iterations, a crash, and the rest from the checkpoint."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.training.checkpoint_files import find_checkpoint, settle_checkpoints, size_of
from callbacks.training.resume import IterationCheckpoint, derived_seed
from common.digests import DigestError, list_path
from common.files import DiskFullError

BATCHES = 4  # an epoch
ROWS = torch.arange(BATCHES * 2 * 3, dtype=torch.float32).reshape(-1, 3) / 10


class Crash(RuntimeError):
    pass


class ResumableLoader:
    """Yields the rows in order, knows its position (counted before a batch is handed out)."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        start, self.position = self.position % BATCHES, self.position % BATCHES
        for i in range(start, BATCHES):
            self.position = i + 1
            yield [ROWS[2 * i : 2 * i + 2]]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Noisy(L.LightningModule):
    """Manual optimisation, two optimiser steps an iteration, and noise from all three global generators."""

    def __init__(self, shuffle: bool = False, crash_at: int | None = None, crash_in_validation: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.automatic_optimization = False
        self.shuffle = shuffle
        self.crash_at, self.crash_in_validation = crash_at, crash_in_validation
        self.seen: list[tuple[int, float]] = []
        self.validated: list[tuple[int, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

    def train_dataloader(self) -> Any:
        if self.shuffle:
            return DataLoader(TensorDataset(ROWS), batch_size=2, shuffle=True)
        return ResumableLoader()

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(ROWS), batch_size=8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.total_batch_idx == self.crash_at:
            raise Crash

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.seen.append((batch_idx, float(x.sum())))
        optimizer = self.optimizers()
        for _ in range(2):
            noise = torch.randn_like(x) + random.random() + np.random.rand()
            loss = (self.layer(x + noise) ** 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()
        self.log("train/loss", loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        iteration = self.trainer.fit_loop.total_batch_idx + 1
        if batch_idx == 0:
            if iteration == self.crash_in_validation:
                raise Crash
            self.validated.append((iteration, float(self.layer.weight.sum())))
        random.random()  # a validation that draws must not shift the training
        # best at iteration 4
        self.log("val/acc", 1.0 / (1 + abs(iteration - 4)), batch_size=1)


def run(trainer_for, folder, module: Noisy, resume: bool = False, **options: Any) -> tuple[Noisy, L.Trainer]:
    L.seed_everything(1, verbose=False)
    checkpoint = IterationCheckpoint(options.pop("every", 1))
    options = {"max_epochs": 2, "val_check_interval": 2} | options
    trainer = trainer_for([checkpoint], default_root_dir=str(folder), **options)
    path = find_checkpoint(folder)
    assert not resume or path is not None
    trainer.fit(module, ckpt_path=str(path) if resume else None)
    return module, trainer


def weights(module: L.LightningModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def names_in(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def saved(*iterations: int) -> list[str]:
    """Files of these checkpoints, each with its digest."""
    return [f"iteration-{n:08d}.ckpt{suffix}" for n in iterations for suffix in ("", ".sha256")]


def damage(path, at: float) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 16
    path.write_bytes(content)


@pytest.fixture
def straight(trainer_for, tmp_path):
    module, trainer = run(trainer_for, tmp_path / "straight", Noisy())
    assert len(module.seen) == 8 and [i for i, _ in module.validated] == [2, 4, 6, 8]
    assert trainer.global_step == 16
    return module


def test_resume_after_every_iteration_ends_with_the_same_weights(trainer_for, tmp_path, straight):
    for k in (1, 3, 4, 7):
        folder = tmp_path / f"crash{k}"
        with pytest.raises(Crash):
            run(trainer_for, folder, Noisy(crash_at=k))
        rest, trainer = run(trainer_for, folder, Noisy(), resume=True)
        assert rest.seen == straight.seen[k:], f"repeated or skipped a batch after a crash in iteration {k + 1}"
        assert rest.validated == [v for v in straight.validated if v[0] > k]
        assert torch.equal(weights(rest), weights(straight)), f"crash in iteration {k + 1}"
        assert trainer.global_step == 16


@pytest.mark.parametrize(
    "options",
    [{"limit_val_batches": 0}, {"val_check_interval": 1.0, "max_epochs": -1, "max_steps": 16}],
    ids=str,
)
@pytest.mark.slow
def test_resume_with_other_loops(trainer_for, tmp_path, options):
    """No validation, validation at the end of epochs, and a limit in steps instead of epochs."""
    whole, _ = run(trainer_for, tmp_path / "whole", Noisy(), **options)
    for k in (3, 4, 7):
        folder = tmp_path / f"crash{k}"
        with pytest.raises(Crash):
            run(trainer_for, folder, Noisy(crash_at=k), **options)
        rest, trainer = run(trainer_for, folder, Noisy(), resume=True, **options)
        assert rest.seen == whole.seen[k:] and rest.validated == [v for v in whole.validated if v[0] > k]
        assert torch.equal(weights(rest), weights(whole)), f"crash in iteration {k + 1}"


def test_a_crash_inside_validation_repeats_its_iteration_and_the_validation(trainer_for, tmp_path, straight):
    folder = tmp_path / "crash"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_in_validation=4))
    assert find_checkpoint(folder).resolve().name == "iteration-00000003.ckpt"
    rest, _ = run(trainer_for, folder, Noisy(), resume=True)
    assert rest.seen == straight.seen[3:] and rest.validated == straight.validated[1:]
    assert torch.equal(weights(rest), weights(straight))


def test_epoch_boundary_with_a_shuffling_loader(trainer_for, tmp_path):
    whole, _ = run(trainer_for, tmp_path / "whole", Noisy(shuffle=True))
    assert whole.seen[:4] != whole.seen[4:]
    folder = tmp_path / "crash"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(shuffle=True, crash_at=4))
    rest, _ = run(trainer_for, folder, Noisy(shuffle=True), resume=True)
    assert rest.seen == whole.seen[4:] and torch.equal(weights(rest), weights(whole))


def test_finished_run_resumes_to_nothing_and_keeps_last_and_best(trainer_for, tmp_path):
    folder = tmp_path / "done"
    module, _ = run(trainer_for, folder, Noisy())
    assert names_in(folder) == ["best.ckpt", *saved(4, 7, 8), "last.ckpt"], "the best one, and the two newest"
    assert find_checkpoint(folder, "best").resolve().name == "iteration-00000004.ckpt"
    assert find_checkpoint(folder, "last").resolve().name == "iteration-00000008.ckpt"
    again, _ = run(trainer_for, folder, Noisy(), resume=True)
    assert again.seen == [] and torch.equal(weights(again), weights(module))


def test_no_room_says_so_and_leaves_the_previous_checkpoint(trainer_for, tmp_path, straight, file_limit):
    folder = tmp_path / "full"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_at=2))
    file_limit(2000)
    with pytest.raises(DiskFullError, match="iteration-00000002.ckpt, is intact.*the same command again"):
        run(trainer_for, folder, Noisy(), resume=True)
    file_limit()
    assert names_in(folder) == ["best.ckpt", *saved(1, 2), "last.ckpt"]
    rest, _ = run(trainer_for, folder, Noisy(), resume=True)
    assert torch.equal(weights(rest), weights(straight))


@pytest.mark.parametrize("how", ["bit", "gone", "digest"])
def test_from_the_checkpoint_before_a_damaged_one_the_weights_are_the_same(trainer_for, tmp_path, straight, how):
    folder = tmp_path / how
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_at=5))
    last = find_checkpoint(folder).resolve()
    assert settle_checkpoints(folder) == [] and last.name == "iteration-00000005.ckpt"
    damaged = list_path(last) if how == "digest" else last
    if how in ("bit", "digest"):
        damage(damaged, 0.4)
    else:
        last.unlink()
    [line] = settle_checkpoints(folder)
    what = "is missing" if how == "gone" else "set aside as *.bad"
    assert last.name in line and what in line and "iteration-00000004.ckpt is used instead" in line
    assert ("iteration-00000005.ckpt.bad" in names_in(folder)) == (how != "gone")
    rest, _ = run(trainer_for, folder, Noisy(), resume=True)
    assert rest.seen == straight.seen[4:] and torch.equal(weights(rest), weights(straight))
    assert settle_checkpoints(folder) == []


LINKS = {  # what became of last.ckpt, or of the checkpoints: the iteration to continue from
    "missing": ("rm last.ckpt", 5),
    "both missing": ("rm last.ckpt best.ckpt", 5),
    "dangling": ("ln -sfn iteration-00000099.ckpt last.ckpt", 5),
    "a loop": ("ln -sfn last.ckpt last.ckpt", 5),
    "killed before it was moved": ("ln -sfn iteration-00000004.ckpt last.ckpt", 5),
    "a damaged one": ("truncate -s -1 iteration-00000005.ckpt", 4),
    "missing, and a damaged one": ("rm last.ckpt; truncate -s 9 iteration-00000005.ckpt", 4),
    "missing, and a damaged list": ("rm last.ckpt; truncate -s -1 iteration-00000005.ckpt.sha256", 4),
    "a text, as on a disk without links": ("rm last.ckpt; echo iteration-00000004.ckpt > last.ckpt", 5),
    "a copy, as of tools that follow links": ("cp --remove-destination iteration-00000005.ckpt last.ckpt", 5),
    "one was renamed": ("mv iteration-00000005.ckpt mine.ckpt", 4),
    "half a checkpoint": ("touch .iteration-00000006.ckpt.tmp iteration-00000006.ckpt.sha256", 5),
    "only a copy called last": ("rm last.ckpt; cp iteration-00000005.ckpt last.ckpt; rm iteration-*", None),
    "a link to another name": (
        "mv iteration-00000005.ckpt mine.ckpt; ln -sfn mine.ckpt last.ckpt; rm iteration-*",
        None,
    ),
}


def test_a_resume_looks_at_the_checkpoints_not_at_the_link(trainer_for, tmp_path, straight):
    with pytest.raises(Crash):
        run(trainer_for, tmp_path / "crash", Noisy(crash_at=5))
    for name, (command, iteration) in LINKS.items():
        folder = shutil.copytree(tmp_path / "crash", tmp_path / name, symlinks=True)
        subprocess.run(command, shell=True, check=True, cwd=folder / "checkpoints")
        before = {path.stat().st_size for path in (folder / "checkpoints").iterdir() if path.exists()}
        lines = settle_checkpoints(folder)
        found = find_checkpoint(folder)
        assert found.name == (f"iteration-{iteration:08d}.ckpt" if iteration else "last.ckpt"), name
        assert settle_checkpoints(folder) == [] and find_checkpoint(folder) == found, lines
        assert found.resolve() == (folder / "checkpoints" / "last.ckpt").resolve(), name
        assert {path.stat().st_size for path in (folder / "checkpoints").iterdir() if path.exists()} >= before
    for name in ("missing", "only a copy called last", "a text, as on a disk without links"):
        rest, _ = run(trainer_for, tmp_path / name, Noisy(), resume=True)
        assert rest.seen == straight.seen[5:] and torch.equal(weights(rest), weights(straight))


@pytest.mark.parametrize(
    "command",
    [
        "mv iteration-00000001.ckpt mine.ckpt",
        "rm iteration-*",
    ],
)
def test_what_cannot_be_used_is_refused_and_left(trainer_for, tmp_path, command):
    with pytest.raises(Crash):
        run(trainer_for, tmp_path, Noisy(crash_at=1))
    subprocess.run(command, shell=True, check=True, cwd=tmp_path / "checkpoints")
    before = names_in(tmp_path)
    with pytest.raises(
        DigestError, match=r"no checkpoint can be used: .*expected iteration-<8 digits>.*from the beginning"
    ):
        settle_checkpoints(tmp_path)
    assert names_in(tmp_path) == before


def test_the_best_checkpoint_is_kept_without_its_link_and_other_names_are_never_removed(trainer_for, tmp_path):
    with pytest.raises(Crash):
        run(trainer_for, tmp_path, Noisy(crash_at=5))
    folder = tmp_path / "checkpoints"
    (folder / "best.ckpt").unlink()
    shutil.copy(folder / "iteration-00000004.ckpt", folder / "iteration-mine.ckpt")
    shutil.copy(folder / "iteration-00000004.ckpt", folder / "iteration-00000099.ckpt")  # newer than the run will be
    with pytest.raises(ValueError, match=r"00000099.ckpt holds iteration 4: it was renamed"):
        run(trainer_for, tmp_path, Noisy(), resume=True)
    (folder / "iteration-00000099.ckpt").rename(folder / "99.ckpt")
    run(trainer_for, tmp_path, Noisy(), resume=True)
    assert names_in(tmp_path) == ["99.ckpt", "best.ckpt", *saved(4, 7, 8), "iteration-mine.ckpt", "last.ckpt"]
    assert find_checkpoint(tmp_path, "best").resolve().name == "iteration-00000004.ckpt"


def test_checkpoints_exchanged_with_their_lists_are_not_continued_from(trainer_for, tmp_path):
    with pytest.raises(Crash):
        run(trainer_for, tmp_path, Noisy(crash_at=6))
    for n in ("", ".sha256"):
        a, b = (tmp_path / "checkpoints" / f"iteration-0000000{i}.ckpt{n}" for i in (5, 6))
        a.rename(tmp_path / "a")
        b.rename(a)
        (tmp_path / "a").rename(b)
    lines = settle_checkpoints(tmp_path)
    assert len(lines) == 2 and all("was renamed or replaced; set aside" in line for line in lines), lines
    assert find_checkpoint(tmp_path).name == "iteration-00000004.ckpt"


def test_where_no_checkpoint_is_whole_all_stay_and_the_best_is_no_worse(trainer_for, tmp_path):
    folder = tmp_path / "bad"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_at=6))
    before = names_in(folder)
    assert before == ["best.ckpt", *saved(4, 5, 6), "last.ckpt"]
    for n in (5, 6):
        damage(folder / "checkpoints" / f"iteration-{n:08d}.ckpt", 0.9)
    shutil.copytree(folder, tmp_path / "all", symlinks=True)
    assert len(settle_checkpoints(folder)) == 2 and find_checkpoint(folder).resolve().name == saved(4)[0]
    damage(tmp_path / "all" / "checkpoints" / saved(4)[0], 0.1)
    with pytest.raises(
        DigestError, match=r"no checkpoint can be used: .*00000006.*00000005.*00000004.*from the beginning"
    ):
        settle_checkpoints(tmp_path / "all")
    assert names_in(tmp_path / "all") == before


def test_the_older_of_two_makes_way_where_there_is_no_room_for_a_third(trainer_for, tmp_path, monkeypatch):
    folder = tmp_path / "small"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_at=3), limit_val_batches=0)
    checkpoints, size = folder / "checkpoints", size_of(find_checkpoint(folder))
    assert names_in(folder) == [*saved(2, 3), "last.ckpt"]
    room = 2.5

    def statvfs(path):
        there = sum(size_of(file) for file in checkpoints.glob("iteration-*.ckpt"))
        return SimpleNamespace(f_bavail=int(room * size) - there, f_frsize=1, f_blocks=0, f_bfree=0)

    monkeypatch.setattr("os.statvfs", statvfs)
    IterationCheckpoint()._check_room(checkpoints / "iteration-00000004.ckpt")
    assert names_in(folder) == [*saved(3), "last.ckpt"]
    room = 1.5
    with pytest.raises(DiskFullError, match=r"iteration-00000003\.ckpt, is intact"):
        IterationCheckpoint()._check_room(checkpoints / "iteration-00000004.ckpt")
    assert names_in(folder) == [*saved(3), "last.ckpt"]


def test_a_checkpoint_of_other_ranks_goes_on_with_new_generators_that_are_always_the_same(
    trainer_for, tmp_path, straight, caplog
):
    folder = tmp_path / "ranks"
    with pytest.raises(Crash):
        run(trainer_for, folder, Noisy(crash_at=1))
    path = find_checkpoint(folder)
    content = torch.load(path, weights_only=True)  # plain types only: readable without executing code
    key = next(k for k in content["callbacks"] if k.startswith("IterationCheckpoint"))
    states = content["callbacks"][key]["rng"] = content["callbacks"][key]["rng"] * 2
    assert len({derived_seed(states, rank, ranks) for ranks in (1, 3) for rank in range(ranks)}) == 4

    def resumed(name):
        shutil.copytree(folder, tmp_path / name, symlinks=True)
        torch.save(content, find_checkpoint(tmp_path / name).resolve())
        rest, _ = run(trainer_for, tmp_path / name, Noisy(), resume=True)
        return rest

    one, two = resumed("one"), resumed("two")
    assert [r.getMessage() for r in caplog.records if "written by 2 ranks, this run has 1" in r.getMessage()]
    assert one.seen == straight.seen[1:], "the data goes on where it was"
    assert torch.equal(weights(one), weights(two)) and not torch.equal(weights(one), weights(straight))
