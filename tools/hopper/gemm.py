"""wgmma in a TMA ring: every major, swizzle and format, A from registers, B multicast in a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator import TensorMap
from cute_kernels.emulator.datapath import formats

from .case import SPAN, Case, kernel, tma_load, wait

# Only these names differ between the formats of the operands: (TMA's element type, bytes, K of one wgmma).
OPERANDS = {"bf16": ("bf16", 2, 16), "f16": ("f16", 2, 16), "tf32": ("f32", 4, 8), "e4m3": ("u8", 1, 32), "e5m2": ("u8", 1, 32)}


@dataclass
class Operand:
    """How one operand of a GEMM lies in shared memory: 128 bytes of K to a stage, in boxes of the swizzle's width."""

    extent: int  # rows of A (64), columns of B
    fmt: str
    major: str  # "K" or "MN": the contiguous axis
    swizzle: str

    def __post_init__(self) -> None:
        self.tma, self.size, self.k = OPERANDS[self.fmt]
        self.bk = 128 // self.size
        self.span = SPAN[self.swizzle]
        self.inner = self.span // self.size
        self.boxes = self.bk // self.inner if self.major == "K" else self.extent // self.inner
        self.rows = self.extent if self.major == "K" else self.bk
        self.box_bytes = self.rows * self.span
        self.bytes = self.boxes * self.box_bytes

    def start(self, step: int) -> int:
        """Byte offset of one instruction's operand: 32 bytes of K on."""
        if self.major == "MN":
            return step * self.k * self.span
        at = 32 * step
        return at // self.span * self.box_bytes + at % self.span

    def descriptor(self) -> int:
        """The constant part: strides (PTX ISA, "Strides": K-major and MN-major canonical layouts) and swizzle."""
        eight = 8 * self.span
        if self.swizzle == "none":
            lbo, sbo = (self.box_bytes, eight) if self.major == "K" else (eight, self.box_bytes)
        else:
            lbo, sbo = (16, eight) if self.major == "K" else (self.box_bytes, eight)
        code = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[self.swizzle]
        return (lbo >> 4) << 16 | (sbo >> 4) << 32 | code << 62

    def tensor_map(self, array: np.ndarray, parts: int = 1) -> TensorMap:
        return TensorMap.tiled(array, box=(self.rows // parts, self.inner), swizzle=self.swizzle, dtype=self.tma)


def encode(fmt: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(stored, float64 value) of x in an operand format."""
    if fmt == "tf32":  # the low 13 bits are not read
        raw = x.astype(np.float32).view(np.uint32)
        return raw.view(np.float32), (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    raw = np.ascontiguousarray(formats.encode(fmt, x.astype(np.float32)))
    raw = raw.reshape(x.shape).view(np.uint8 if OPERANDS[fmt][1] == 1 else np.uint16)
    return raw, decode(fmt, raw)


def decode(fmt: str, raw: np.ndarray) -> np.ndarray:
    """float64 values, by NumPy's own arithmetic on the fields rather than by the emulator's tables."""
    if fmt == "f16":
        return raw.view(np.float16).astype(np.float64)
    if fmt == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt]
    sign = np.where(raw & 0x80, -1.0, 1.0)
    e, f = (raw & 0x7F) >> bits, (raw & ((1 << bits) - 1)) / (1 << bits)
    return sign * np.where(e == 0, f * 2.0 ** (1 - bias), (1 + f) * 2.0 ** (e.astype(np.float64) - bias))


def gemm(
    fmt: str = "bf16", a_major: str = "K", b_major: str = "K", a_swizzle: str = "128B", b_swizzle: str = "128B", n: int = 64,
    m_rows: int = 100, n_cols: int = 120, k: int = 200, stages: int = 3, a_regs: bool = False, cluster: int = 1, seed: int = 0,
) -> Case:  # fmt: skip
    """C [m_rows, n_cols] = A B, float32 accumulation, 64 x n to a CTA, ragged edges by TMA's zero fill. Warps 0-3 multiply, warp 4
    loads. With `a_regs` A is read from an unswizzled tile into registers. With a cluster of 2, each CTA loads half of the columns
    of B for both (multicast), so a slot is free when the consumers of both CTAs have left it."""
    rng = np.random.default_rng([seed, n, k])
    a, b = Operand(64, fmt, a_major, a_swizzle), Operand(n, fmt, b_major, b_swizzle)
    bk, steps = b.bk, 128 // 32
    pad = 16 // a.size
    up = lambda v: -(-v // pad) * pad  # noqa: E731  (row pitches are multiples of 16 bytes)
    stored_a, value_a = encode(fmt, rng.standard_normal((m_rows, k)))
    stored_b, value_b = encode(fmt, rng.standard_normal((n_cols, k)))

    def lay(stored: np.ndarray, major: str) -> tuple[np.ndarray, np.ndarray]:
        view = stored if major == "K" else stored.T
        whole = np.zeros((view.shape[0], up(view.shape[1])), view.dtype)
        whole[:, : view.shape[1]] = view
        return whole, whole[:, : view.shape[1]]

    (array_a, view_a), (array_b, view_b) = lay(stored_a, a_major), lay(stored_b, b_major)
    if a_regs:
        assert a_major == "K"
        map_a = TensorMap.tiled(view_a, box=(64, bk), swizzle="none", dtype=a.tma)
        a_bytes = 64 * 128
    else:
        map_a, a_bytes = a.tensor_map(view_a), a.bytes
    map_b = b.tensor_map(view_b, cluster)
    assert cluster == 1 or b_major == "K"
    out = np.zeros((m_rows, n_cols), np.float32)
    blocks = -(-k // bk)
    stage = a_bytes + b.bytes
    assert stage % 1024 == 0 and n_cols % 2 == 0
    bars = stages * stage

    loads = []
    for j in range(1 if a_regs else a.boxes):
        k_at, m_at = (j * a.inner, 0) if a_major == "K" else (0, j * a.inner)
        loads += [f"    add.u32 %t, %at, {j * a.box_bytes};", f"    add.u32 %u, %k0, {k_at};", f"    add.u32 %w, %m0, {m_at};"]
        loads.append(tma_load(2, "%t", "%ma", "%u, %w" if a_major == "K" else "%w, %u", "%bar"))
    for j in range(b.boxes):
        k_at, n_at = (j * b.inner, 0) if b_major == "K" else (0, j * b.inner)
        loads += [f"    add.u32 %t, %at, {a_bytes + j * b.box_bytes};", f"    add.u32 %u, %k0, {k_at};"]
        loads.append(f"    add.u32 %w, %n0, {n_at};")
        if cluster > 1:  # this CTA's share of the rows, to every CTA
            loads.append(f"    mad.lo.u32 %t, %rank, {b.box_bytes // cluster}, %t;")
            loads.append(f"    mad.lo.u32 %w, %rank, {n // cluster}, %w;")
        mask = "%mask" if cluster > 1 else ""
        loads.append(tma_load(2, "%t", "%mb", "%u, %w" if b_major == "K" else "%w, %u", "%bar", mask))

    products = []
    d = "{" + ", ".join(f"%d{i}" for i in range(n // 2)) + "}"
    if a_regs:
        for i in range(steps):
            for r, extra in enumerate((0, 8 * 128, 16, 8 * 128 + 16)):
                products.append(f"    ld.shared.b32 %a{4 * i + r}, [%frag+{32 * i + extra}];")
    products.append("    wgmma.fence.sync.aligned;")
    transposes = fmt in ("bf16", "f16")
    for i in range(steps):
        tail = ", 1, 1"
        if transposes:
            tail += f", {int(b_major == 'MN')}" if a_regs else f", {int(a_major == 'MN')}, {int(b_major == 'MN')}"
        left = "{" + ", ".join(f"%a{4 * i + r}" for r in range(4)) + "}" if a_regs else "%da"
        if not a_regs:
            products.append(f"    add.u64 %da, %desc_a, {a.start(i) >> 4};")
        products.append(f"    add.u64 %db, %desc_b, {b.start(i) >> 4};")
        types = f"f32.{fmt}.{fmt}"
        products.append(
            f"    wgmma.mma_async.sync.aligned.m64n{n}k{b.k}.{types} {d}, {left}, %db, {'%more' if i == 0 else '%always'}{tail};"
        )
    products += ["    wgmma.commit_group.sync.aligned;", "    wgmma.wait_group.sync.aligned 0;"]

    stores = []
    for j in range(n // 8):
        for h in range(2):
            stores.append(f"""    add.u32 %t, %n0, {8 * j};
    add.u32 %t, %t, %col;
    add.u32 %u, %row, {8 * h};
    setp.lt.u32 %p, %u, {m_rows};
    setp.lt.and.u32 %p, %t, {n_cols}, %p;
    mad.lo.u32 %t, %u, {n_cols}, %t;
    mul.wide.u32 %wide, %t, 4;
    add.u64 %wide, %out, %wide;
    @%p st.global.v2.f32 [%wide], {{%d{4 * j + 2 * h}, %d{4 * j + 2 * h + 1}}};""")
    if cluster > 1:
        free = "\n".join(
            f"    mapa.shared::cluster.u32 %t, %bar, {r};\n"
            f"    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%t+{8 * stages}];"
            for r in range(cluster)
        )
        sync = "    barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;"
        scope = ".acquire.cluster"
    else:
        free, sync, scope = f"    mbarrier.arrive.shared::cta.b64 _, [%bar+{8 * stages}];", "    bar.sync 0;", ""
    turn = f"""    add.u32 %slot, %slot, 1;
    setp.eq.u32 %p, %slot, {stages};
    @%p xor.b32 %par, %par, 1;
    @%p mov.u32 %slot, 0;
    add.u32 %k, %k, 1;"""
    new = "\n"
    body = f"""
    mov.u32 %me, %tid.x;
    mov.u32 %base, smem;
    add.u32 %bars, %base, {bars};
    mov.u32 %m0, %ctaid.x;
    shl.b32 %m0, %m0, 6;
    mov.u32 %n0, %ctaid.y;
    mul.lo.u32 %n0, %n0, {n};
    mov.u32 %rank, %cluster_ctarank;
    mov.u16 %mask, {(1 << cluster) - 1};
    mov.u64 %ma, map_a;
    cvta.param.u64 %ma, %ma;
    mov.u64 %mb, map_b;
    cvta.param.u64 %mb, %mb;
    ld.param.u64 %out, [out];
    setp.ne.u32 %p, %me, 0;
    @%p bra INITIALISED;
{new.join(f"    mbarrier.init.shared::cta.b64 [%bars+{8 * i}], 1;" for i in range(stages))}
{new.join(f"    mbarrier.init.shared::cta.b64 [%bars+{8 * (stages + i)}], {128 * cluster};" for i in range(stages))}
    fence.mbarrier_init.release.cluster;
INITIALISED:
{sync}
    mov.u32 %k, 0;
    mov.u32 %slot, 0;
    setp.ge.u32 %p, %me, 128;
    @%p bra PRODUCER;

    // Consumers. Thread t holds rows 16 (t / 32) + t / 4 % 8 and 8 on, columns 2 (t % 4) and 1 on, of every 8 columns.
    mov.u32 %par, 0;
    setp.eq.u32 %always, %k, %k;
    and.b32 %col, %me, 3;
    shr.u32 %row, %me, 5;
    shl.b32 %row, %row, 4;
    shr.u32 %t, %me, 2;
    and.b32 %t, %t, 7;
    add.u32 %row, %row, %t;
    shl.b32 %t, %col, 2;
    mad.lo.u32 %frag0, %row, 128, %t;
    shl.b32 %col, %col, 1;
    add.u32 %row, %row, %m0;
STEP:
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
{wait("FULL", "%bar", "%par", scope)}
    mad.lo.u32 %at, %slot, {stage}, %base;
    add.u32 %frag, %at, %frag0;
    shr.u32 %t, %at, 4;
    and.b32 %t, %t, 0x3fff;
    cvt.u64.u32 %wide, %t;
    or.b64 %desc_a, %wide, {a.descriptor():#x};
    add.u32 %t, %at, {a_bytes};
    shr.u32 %t, %t, 4;
    and.b32 %t, %t, 0x3fff;
    cvt.u64.u32 %wide, %t;
    or.b64 %desc_b, %wide, {b.descriptor():#x};
    setp.ne.u32 %more, %k, 0;
{new.join(products)}
{free}
{turn}
    setp.lt.u32 %p, %k, {blocks};
    @%p bra STEP;
{new.join(stores)}
    bra END;

PRODUCER:
    setp.ne.u32 %p, %me, 128;
    @%p bra END;
    mov.u32 %par, 1;
    mov.u32 %k0, 0;
LOAD:
    shl.b32 %t, %slot, 3;
    add.u32 %bar, %bars, %t;
    add.u32 %t, %bar, {8 * stages};
{wait("EMPTY", "%t", "%par", scope)}
    mad.lo.u32 %at, %slot, {stage}, %base;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {stage};
{new.join(loads)}
{turn}
    add.u32 %k0, %k0, {bk};
    setp.lt.u32 %p, %k, {blocks};
    @%p bra LOAD;
END:
    bar.warp.sync 0xffffffff;
{sync}"""
    registers = f"""    .reg .pred %p, %ok, %more, %always;
    .reg .b16 %mask;
    .reg .b32 %me, %base, %bars, %bar, %m0, %n0, %k0, %k, %slot, %par, %rank, %t, %u, %w, %at, %row, %col, %frag, %frag0, %a<16>;
    .reg .f32 %d<{n // 2}>;
    .reg .b64 %ma, %mb, %out, %wide, %da, %db, %desc_a, %desc_b;"""
    want = value_a @ value_b.T
    magnitude = np.abs(value_a) @ np.abs(value_b).T
    # fp8 products are summed by Hopper's tensor cores with about 13 bits below the largest of each instruction's terms.
    relative = 2.0**-12 if b.size == 1 else 2.0**-20
    m_tiles = -(-m_rows // 64)
    m_tiles = -(-m_tiles // cluster) * cluster
    where = "A regs" if a_regs else f"A {a_major} {a_swizzle}"
    params = ".param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128], .param .u64 out"
    kind = " (cluster)" if cluster > 1 else ""
    return Case(
        f"gemm{kind} {fmt} n{n} {where}, B {b_major} {b_swizzle}", kernel(params, registers, body, 160, cluster),
        (m_tiles, -(-n_cols // n), 1), 160, [map_a, map_b, out], [(out, want, magnitude * relative)], bars + 16 * stages, cluster,
        features="wgmma" + (", A in registers" if a_regs else "") + (", multicast" if cluster > 1 else ""), keep=[array_a, array_b],
    )  # fmt: skip
