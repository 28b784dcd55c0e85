"""Fixtures that several tests of algorithms share."""

import pytest
import torch

from lightning_modules.training import optimisation


@pytest.fixture
def gradients(monkeypatch):
    """Every optimiser step's gradient of the policy, before it is clipped."""
    seen, clip = [], optimisation.clip_gradients

    def record(module, *args):
        seen.append(torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()]))
        return clip(module, *args)

    monkeypatch.setattr(optimisation, "clip_gradients", record)
    return seen
