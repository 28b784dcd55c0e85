"""Collation and micro-batches."""

import random

import pytest
import torch

from lightning_modules.batch import collate, micro_batches
from tests.lightning_modules.helpers import make_trajectories, make_trajectory


def test_collate_is_aligned_with_positions():
    rng = random.Random(0)
    rows = [make_trajectory(rng, 0, spans=[2, 3, 1]), make_trajectory(rng, 1, spans=[4])]
    batch = collate(rows)
    for i, t in enumerate(rows):
        p, n = len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)
        assert batch.input_ids[i, :n].tolist() == [*t.prompt_ids, *t.response_ids]
        assert batch.mask[i].tolist()[:n] == [0] * p + list(t.loss_mask)
        assert batch.response_mask[i].nonzero()[:, 0].tolist() == list(range(p, n))
        assert batch.mask[i, n:].sum() == batch.input_ids[i, n:].sum() == 0
        assert batch.sampler_logprobs[i, p:n].tolist() == pytest.approx(list(t.logprobs))


def test_a_token_equal_to_the_pad_id_is_still_trained():
    row = make_trajectory(random.Random(0), 0, spans=[3])
    row = row.replace(response_ids=(5, 6, 0))
    assert collate([row]).mask.sum() == 3


def test_empty_and_missing_prompt():
    batch = collate([])
    assert batch.input_ids.shape == (0, 1)
    stand_in = batch.rows([], 1)
    assert stand_in.input_ids.tolist() == [[0]] and stand_in.mask.sum() == 0
    row = make_trajectory(random.Random(0), 0).replace(prompt_ids=())
    with pytest.raises(ValueError, match="0/0 has no prompt ids"):
        collate([row])


def test_rows_keep_their_values_and_drop_the_padding():
    batch = collate(make_trajectories(4))
    index = [2, 0]
    length = int(batch.lengths[index].max())
    part = batch.rows(index, length)
    assert torch.equal(part.mask, batch.mask[index][:, :length])
    assert part.input_ids.shape == (2, length)
    assert torch.equal(part.lengths, batch.lengths[index])


def test_micro_batches_partition_within_the_budget():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(30)]
    groups = micro_batches(lengths, range(30), 100)
    assert sorted(i for g in groups for i in g) == list(range(30))
    assert all(len(g) * max(lengths[i] for i in g) <= 100 for g in groups)
    assert micro_batches([500, 3], [0, 1], 100) == [[1], [0]]  # too long for the budget: alone
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch is 0"):
        micro_batches([1], [0], 0)
