"""Which segments of shared memory `make chaos` counts as left behind."""

from __future__ import annotations

import os
import random
import string
import subprocess

from tests.chaos.__main__ import of_others

FORMS = (
    "compact-agents-weights-{}-4026531836-a1b2c3_4.safetensors",
    "torch_{}_3174286341_0",
    "sem.loky-{}-7cf6ca2v",
    "joblib_memmapping_folder_{}_b6e1_4f4c",
    "__KMP_REGISTERED_LIB_{}_0",
)


def test_a_segment_is_of_others_only_where_its_name_has_a_living_process():
    dead = subprocess.Popen(["true"])
    dead.wait()
    for form in FORMS:
        assert of_others(form.format(os.getpid())) and not of_others(form.format(dead.pid))
        assert not of_others(form.format("")) and not of_others(f"x{form.format(os.getpid())}")
    draw = random.Random(0)
    letters = string.ascii_lowercase + string.digits + "_"
    for _ in range(500):  # their digits are no process, though most are the number of one
        name = "".join(draw.choices(letters, k=8))
        assert not any(of_others(form.format(name)) for form in ("psm_{}", "sem.mp-{}", "nccl-{}", "1-{}", "pymp-{}"))
    assert not of_others(f"psm_{os.getpid()}")
    assert not of_others(f"compact-agents-weights-{dead.pid}-{os.getpid()}-x.safetensors")
