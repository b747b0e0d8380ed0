"""From tensors to a call by address: the words of a layout, and on which device a call runs."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.jit import Target
from cute_kernels.kernels import launching

DEVICE = SimpleNamespace(type="cuda", index=1)


def test_layout_block():
    t = torch.empty(4, 1, 6)[:, :, ::2]
    assert list(launching.layout_block(t, None, ((5,), (2,)))) == [4, 1, 3, 6, 0, 2, 5, 2]
    assert list(launching.layout_block(t, single=8)) == [4, 1, 3, 6, 8, 2]


@pytest.mark.parametrize("devices,current,switches", [(1, 0, []), (2, 1, []), (2, 0, [1])])
def test_the_device_is_changed_where_it_has_to_be(monkeypatch, devices, current, switches):
    changed, ran = [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: changed.append(index) or nullcontext())
    run = launching.ready(lambda *args: ran.append(args), DEVICE, Target("sm_90a", 132))
    run(1, None)
    assert ran == [(1, None)] and changed == switches


def test_an_emulator_is_told_of_the_memory():
    noted = []
    backend = SimpleNamespace(note_memory=noted.append)
    t = torch.empty(3)
    run = launching.ready(lambda *args: None, torch.device("cpu"), Target("sm_90a", 132, backend=backend))
    run(t, None, 5)
    assert len(noted) == 1 and noted[0] is t


def test_by_address_places_sizes_and_strides():
    """A kernel of one thread reads through dynamic strides and a 32-bit size what a block of words says."""
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute
    from cutlass import Float32

    from cute_kernels.emulator import emulate
    from cute_kernels.kernels.by_address import by_address

    @cute.kernel
    def copy(x: cute.Tensor, out: cute.Tensor, scale: Float32):
        for i in cutlass.range(x.shape[0], unroll=1):
            out[i] = x[i, x.shape[1] - 1] * scale

    @cute.jit
    def host(x: cute.Tensor, absent: cute.Tensor | None, out: cute.Tensor, scale: Float32, stream):
        copy(x, out, scale).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    def fake(rank):
        sizes, strides = (tuple(f() for _ in range(rank)) for f in (cute.sym_int, cute.sym_int64))
        return cute.runtime.make_fake_tensor(Float32, sizes, strides, assumed_align=4)

    x, out = torch.arange(60.0).view(3, 4, 5)[..., 1].t(), torch.zeros(8)[::2]  # sizes (4, 3), strides (5, 20); stride 2
    block = launching.layout_block(x, None, out)
    function, arguments = by_address(host, (fake(2), None, fake(1), Float32(1.0), cute.runtime.make_fake_stream()))
    with emulate("sm_90a"):
        compiled = cute.compile(function, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx")
        compiled(ctypes.addressof(block), x.data_ptr(), out.data_ptr(), 2.0, launching.stream_pointer(0))
    assert torch.equal(out, 2 * x[:, -1])
