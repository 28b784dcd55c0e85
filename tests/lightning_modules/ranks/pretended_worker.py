"""Started by test_pretended_device.py: ``python pretended_worker.py MODEL TEACHER [NAME ...]``, the trainings of
two_ranks_worker.py (all, or those named) with models on a device that is not the host."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from tests import pretended_device
from tests.lightning_modules.ranks import two_ranks_worker

if __name__ == "__main__":
    model, teacher, *names = sys.argv[1:]
    places = set()

    def look(module, inputs):
        places.update(parameter.device for parameter in module.parameters(recurse=False))

    torch.nn.modules.module.register_module_forward_pre_hook(look)
    options = {"strategy": pretended_device.strategy, "accelerator": "auto"}
    with pretended_device.Pretending():
        done = two_ranks_worker.run(model, teacher, lambda rows: rows, names, **options)
    assert set(names) <= done.keys() and places == {pretended_device.DEVICE}, (done.keys(), places)
