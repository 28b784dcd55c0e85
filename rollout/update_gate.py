"""Who may begin while new weights wait: an update comes between prompt groups, and every group has one version."""

from __future__ import annotations

import asyncio


class UpdateGate:
    """Groups pass in any number; an update waits until all that have begun are done, and nobody begins meanwhile.

    The unit is the prompt's group and not the trajectory: its members are compared with each other, a branch goes on
    where its parent was, and a sampler may wait in one trajectory for another of the same group. Belongs to one event
    loop.
    """

    def __init__(self) -> None:
        self._running = 0
        self._updates = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()

    def group(self) -> GroupPass:
        return GroupPass(self)

    def update(self) -> Update:
        return Update(self)

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()

    def close(self) -> None:
        """An update waits: no other group begins until `reopen`."""
        self._updates += 1
        self._open.clear()

    def reopen(self) -> None:
        """That update is done, or given up."""
        self._updates -= 1
        if not self._updates:
            self._open.set()

    async def opened(self) -> None:
        """Wait until no update waits."""
        await self._open.wait()

    def enter(self) -> bool:
        """Let a group begin; False while an update waits."""
        if self._updates:
            return False
        self._running += 1
        self._idle.clear()
        return True

    def leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()


class GroupPass:
    """One group's way through the gate, as a context manager around all it does."""

    def __init__(self, gate: UpdateGate) -> None:
        self._gate, self._begun = gate, False

    async def opened(self) -> None:
        """Wait until the group may begin; at once if it has begun."""
        if not self._begun:
            await self._gate.opened()

    def begin(self) -> bool:
        """Begin, unless an update waits. True if the group has begun, now or before."""
        self._begun = self._begun or self._gate.enter()
        return self._begun

    def __enter__(self) -> GroupPass:
        return self

    def __exit__(self, *error: object) -> None:
        if self._begun:
            self._gate.leave()


class Update:
    """One update's hold on the gate. Either method may be called at any time, any number of times."""

    def __init__(self, gate: UpdateGate) -> None:
        self._gate, self._closed = gate, False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._gate.close()

    def reopen(self) -> None:
        if self._closed:
            self._closed = False
            self._gate.reopen()
