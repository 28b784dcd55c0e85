"""Slots are handed out by priority, given back whatever happens, and can be left for a while."""

import asyncio

import pytest

from rollout.loop.prompt_group import Slots


def test_by_priority_then_by_arrival():
    async def main():
        slots, order = Slots(1), []

        async def hold(name, priority):
            async with slots.take(priority):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(*(hold(n, p) for n, p in [("first", 9), ("c", 2), ("a", 0), ("d", 2), ("b", 1)]))
        assert order == ["first", "a", "b", "c", "d"]

    asyncio.run(main())


def test_never_more_than_there_are_and_all_come_back():
    async def main():
        slots, inside, peak = Slots(3), 0, 0

        async def hold(i):
            nonlocal inside, peak
            async with slots.take(i % 4):
                inside += 1
                peak = max(peak, inside)
                await asyncio.sleep(0.001 * (i % 3))
                inside -= 1
                if i % 5 == 0:
                    raise RuntimeError("a fault inside")

        tasks = [asyncio.create_task(hold(i)) for i in range(40)]
        await asyncio.sleep(0.002)
        for task in tasks[::7]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert peak == 3
        async with slots.take(0), slots.take(0), slots.take(0):  # all three are free again
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(slots.acquire(0), 0.001)

    asyncio.run(main())


def test_cancelled_in_the_moment_of_being_let_in():
    async def main():
        slots = Slots(1)
        await slots.acquire(0)
        waiting = asyncio.create_task(slots.acquire(0))
        await asyncio.sleep(0)
        slots.release()  # hands the slot over
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(slots.acquire(0), 1)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_place_left_is_anothers_until_the_work_is_done(fails):
    async def main():
        slots, order = Slots(1), []
        done = asyncio.Event()

        async def work():
            await done.wait()
            if fails:
                raise RuntimeError("work failed")

        async def leaver():
            async with slots.take(0) as slot:
                order.append("leaves")
                await slot.released_during(work())
                order.append("is back")

        async def other():
            async with slots.take(1):
                order.append("is in")
                done.set()
                await asyncio.sleep(0.001)
                order.append("goes")

        await asyncio.gather(leaver(), other(), return_exceptions=True)
        assert order == ["leaves", "is in", "goes"] + ["is back"] * (not fails)
        await asyncio.wait_for(slots.acquire(0), 1)

    asyncio.run(main())
