"""Launches that overlap wait for the ones before them.

The emulator runs launches one after the other and would not notice if they did not.
"""

import re
from dataclasses import replace

import pytest

from cufa import jit
from cufa.device import Device
from cufa.plan import make_plan
from cufa.problem import Features, Problem

H200 = Device.of("sm_90a")
FORWARD = Problem("forward", "bfloat16", 4, 2048, 2048, 16, 16, 128, 128)
BACKWARD = replace(FORWARD, direction="backward")
DECODING = Problem("forward", "bfloat16", 1, 1, 65536, 32, 8, 128, 128)
LATENT = Problem("forward", "bfloat16", 4, 128, 16384, 1, 1, 576, 512)
MASK = Features(mask=(1, 1, 2048, 2048))
USED = Features(seqused_k=True)

CASES = {
    "parts of keys": DECODING,
    "shares of keys": replace(DECODING, batch=8, features=USED),
    "parts of latents": replace(LATENT, batch=1),
    "shares of latents": replace(LATENT, batch=16, features=USED),
    "tiles of a mask": replace(FORWARD, features=MASK),
    "float32": replace(FORWARD, dtype="float32"),
    "backward": BACKWARD,
    "backward of wide heads": replace(BACKWARD, head_dim=256, value_dim=256),
    "backward of few heads": replace(BACKWARD, batch=1, heads=4, kv_heads=1, seqlen_q=512),
    "backward in float32": replace(BACKWARD, dtype="float32"),
}


def entries_of(ptx):
    """The code of each entry, by name."""
    return dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry |\Z)", ptx, re.DOTALL))


@pytest.mark.parametrize("name", CASES)
def test_a_launch_that_overlaps_waits(name):
    plan = make_plan(CASES[name], H200)
    overlapping = [launch.entry for launch in plan.launches if launch.overlaps]
    code = entries_of(jit.ptx(plan.variant))
    assert overlapping
    for entry in overlapping:
        assert "griddepcontrol.wait" in code[entry], entry
