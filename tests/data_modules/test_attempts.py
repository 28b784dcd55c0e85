"""Several attempts at each test question."""

from __future__ import annotations

import pytest

from data_modules.evaluation_data import EvaluationData
from data_modules.loading.decoding import Decoding
from tests.data_modules.toys import Recorder, trainer

SAMPLED = Decoding(temperature=0.6, top_p=0.95)


@pytest.fixture
def tested(make_system, question_file, tmp_path):
    """``tested(**options) -> (batches by dataloader, requests)``, all after one test of three questions."""
    path = question_file("test", ["right", "wrong", "right"])

    def run(validate=False, **options):
        system = make_system()
        system.sampler = options.pop("sampler", system.sampler)
        data = EvaluationData(
            system, [path], [path], eval_sampling=SAMPLED, seed=4, diagnostic_prompts=["closed_book"], **options
        )
        module = Recorder()
        one = trainer(tmp_path)
        (one.validate if validate else one.test)(module, datamodule=data, verbose=False)
        return module.val_batches if validate else module.test_batches, system.engine.requests

    return run


def test_the_search_loop_takes_every_attempt_and_probes_take_one(tested):
    batches, requests = tested(attempts=3, eval_batch=2)
    found = [(index, [(t.task.id, t.index) for t in batch]) for index, batch in batches]
    assert found == [
        (0, [("q0", 0), ("q0", 1), ("q0", 2), ("q1", 0), ("q1", 1), ("q1", 2)]),
        (0, [("q2", 0), ("q2", 1), ("q2", 2)]),
        (1, [("q0", 0), ("q1", 0)]), (1, [("q2", 0)]),
    ]  # fmt: skip
    assert len({r.sampling.seed for r in requests}) == len(requests) == 12, "every request has a seed of its own"


def test_more_attempts_and_other_batches_leave_the_first_ones_as_they_were(tested):
    def seeds(**options):
        batches, requests = tested(**options)
        asked = {tuple(r.token_ids): [] for r in requests}
        for r in requests:
            asked[tuple(r.token_ids)].append(r.sampling.seed)
        return asked

    one, two, three = seeds(attempts=1), seeds(attempts=2), seeds(attempts=3, eval_batch=1)
    assert one.keys() == two.keys() == three.keys() and len(one) == 3
    for prompt in one:  # the last of each is the closed-book probe
        assert [len(s[prompt]) for s in (one, two, three)] == [2, 3, 4]
        assert set(one[prompt]) < set(two[prompt]) < set(three[prompt])


def test_attempts_never_branch(tested):
    """Whatever the training's sampler does with a group, it is never given one of several attempts."""

    class Branching:
        async def sample(self, group, n):
            first = await group.run(0)
            return [first, *[await group.run(index, start=first, at=1) for index in range(1, n)]]

    batches, requests = tested(attempts=4, sampler=Branching())
    made = [t for _, batch in batches for t in batch]
    assert len(made) == len(requests) == 3 * 4 + 3 and not any(t.fork for t in made)
