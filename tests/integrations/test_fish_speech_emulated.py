"""fish-speech's model in bf16 with the emulated kernels: teacher-forced logits against an unmodified float32 run."""

import pytest
from integrations import fish
from integrations.fish import needs_fish_speech

import cute_kernels
from cute_kernels.integrations.fish_speech import use_active_attention
from cute_kernels.ops.dispatch import KERNELS

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass", reason="needs the CuTe DSL")
pytestmark = [needs_fish_speech, pytest.mark.full]


# sm_103a runs sm_100a's kernels.
ARCHS = [
    pytest.param(arch, id=arch, marks=[pytest.mark.nightly] if arch == "sm_103a" else [])
    for family, arch in sorted(KERNELS)
    if family == "active_attention"
]
SMALL = dict(n_layer=2, n_fast_layer=1)


@pytest.mark.parametrize("arch", ARCHS)
def test_two_steps_in_bf16(arch):
    """A prefill and two decode steps, codebook layers included: no more than twice the unmodified bf16 model's error."""
    from cute_kernels.emulator import emulate

    tokens = fish.prompt(22)
    exact = fish.forced(fish.make_model(torch.bfloat16, **SMALL).float(), tokens, 20, 2)
    theirs = fish.forced(fish.make_model(torch.bfloat16, **SMALL), tokens, 20, 2)
    model = use_active_attention(fish.make_model(torch.bfloat16, **SMALL))
    with emulate(arch) as e:
        ours = fish.forced(model, tokens, 20, 2)
        assert cute_kernels.last_backend().startswith(arch)
    assert e.hazards == []
    # Two slow layers and, for every codebook, a fast one: one launch each, in each of the three passes.
    assert len(e.launches) == 3 * (2 + fish.CODEBOOKS)
    for name in ("slow", "fast"):
        want = getattr(exact, name)
        error, allowed = ((getattr(x, name) - want).abs() for x in (ours, theirs))
        assert error.max() <= 2 * allowed.max(), (name, float(error.max()), float(allowed.max()))
        assert error.pow(2).mean().sqrt() <= 2 * allowed.pow(2).mean().sqrt(), name
