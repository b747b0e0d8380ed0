"""wgmma, mma.sync, ldmatrix, stmatrix and movmatrix, through the datapath's fragment maps."""

from __future__ import annotations

import numpy as np

from ..ptx.ir import Imm, Instr, Vec
from .hazards import EmulationError
from .ops_async import AsyncOp, agent, check_swizzle, fine_granules, shared_read
from .ops_mem import check_shared_read, check_shared_write
from .ops_warp import warp_sync
from .optable import Wait, address, getter, op, scalar, unsupported


def _shape(ins: Instr) -> str:
    shape = next((m for m in ins.mods if m[0] == "m" and "n" in m[1:] and m[1].isdigit()), None)
    if shape is None:
        raise unsupported(ins, "no shape")
    return shape


def _everyone(w, m):
    return 0xFFFFFFFF


# ---- wgmma
@op("wgmma")
def _wgmma(ins: Instr):
    kind = ins.mods[0]
    if kind == "fence":
        return False, lambda w, m, ins: None
    if kind == "commit_group":
        return False, _commit_group
    if kind == "wait_group":
        return _wait_group(ins)
    if kind != "mma_async" or "sp" in ins.mods:
        raise unsupported(ins)
    return _mma_async(ins)


def _commit_group(w, m, ins) -> None:
    w.wg_groups.append((w.wg_open, w.machine.agent_tick(w.cta.cluster, w.tpipe) if w.clock is not None else 0))
    w.wg_open = []


def _wait_group(ins: Instr):
    keep = int(ins.operands[0].value)

    def wait(w, s, m, ins):
        late = list(w.wg_groups)[: max(0, len(w.wg_groups) - keep)]
        ops = [o for g, _ in late for o in g]
        if any(not o.done for o in ops):
            return Wait(lambda: all(o.done for o in ops), lambda: f"wgmma.wait_group {keep}", ins.line, wants=lambda o: o in ops)
        for _ in late:
            group, _tick = w.wg_groups.popleft()
            if w.clock is not None:
                # The operation is one for the warpgroup: its completion covers what all four warps' shares read.
                for actor, tick in (mark for o in group for mark in o.marks):
                    w.clock[0, actor] = max(w.clock[0, actor], tick)
        return None

    return True, wait


def _mma_async(ins: Instr):
    """All four warps of a warpgroup meet at the instruction; the last to arrive issues it for all."""
    shape = _shape(ins)
    n = int(shape[1:].split("n")[1].split("k")[0])
    types = [m for m in ins.mods if m in ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "s32")]
    if len(types) != 3:
        raise unsupported(ins, "types")
    dtype, atype, btype = types
    d, a, b, *rest = ins.operands
    d_regs = [o.index for o in d.items]
    from_regs = isinstance(a, Vec)
    a_regs = [o.index for o in a.items] if from_regs else None
    get_a = None if from_regs else scalar(a, "X")
    get_b = scalar(b, "X")
    scale_d = getter(rest.pop(0), "P") if rest else None
    imms = [int(o.value) for o in rest if isinstance(o, Imm)]
    scale_a, scale_b = (imms + [1, 1])[:2] if len(imms) >= 2 else (1, 1)
    trans = imms[2:]
    trans_b = bool(trans[-1]) if trans else False
    trans_a = bool(trans[0]) if len(trans) == 2 else False
    sat = "satfinite" in ins.mods

    def issue(w, m, ins, warps):
        from ..datapath.wgmma import plan_wgmma

        machine = w.machine
        plan = machine.cached_plan(
            plan_wgmma, n, dtype, atype, btype, None if from_regs else get_a(w, m), get_b(w, m),
            trans_a=trans_a, trans_b=trans_b, scale_a=scale_a, scale_b=scale_b, satfinite=sat,
        )  # fmt: skip
        for text in plan.lints:
            machine.report("descriptor-layout", w, ins, text)
        accumulate = True if scale_d is None else bool(scale_d(w)[m.argmax()])
        if plan.d_registers != len(d_regs):
            machine.fatal("wgmma", w, ins, f"{len(d_regs)} D registers; the shape has {plan.d_registers}")
        warps = sorted(warps, key=lambda x: x.index)
        marks: list[tuple[int, int]] = []
        if w.clock is not None:
            check_swizzle(w, w.cta, plan, ins)
            for x in warps:
                actor, clock = agent(x, x.tpipe)
                marks.append((actor, int(clock[0, actor])))
                shared_read(x, x.cta, fine_granules(plan.smem_granules, machine.granule_cache), actor, clock, ins, proxy=True)
        machine.tensor_cycles += plan.cycles
        machine.tensor_flops += plan.flops
        w.role_tensor(plan.cycles)
        smem = w.cta.smem

        def effect():
            old = np.concatenate([x.regs.w[d_regs] for x in warps], axis=1)
            ar = np.concatenate([x.regs.w[a_regs] for x in warps], axis=1) if from_regs else None
            new = plan.apply(smem, old, accumulate, ar)
            for k, x in enumerate(warps):
                x.regs.w[d_regs] = new[:, 32 * k : 32 * k + 32]

        o = AsyncOp("wgmma", ins, w, ("wgmma", w.cta, w.index // 4), effect)  # one order, whichever warp came last
        o.marks = marks
        for x in warps:
            x.wg_open.append(o)
        machine.submit(o)

    def run(w, s, m, ins):
        cta = w.cta
        group = w.index // 4
        if s.state is None:
            if not s.full:
                w.machine.report("divergent-aligned", w, ins, "executed by part of the warp")
            key = (group, ins.index)
            meet = cta.meets.get(key)
            if meet is None:
                meet = cta.meets[key] = {"warps": [], "done": False}
            meet["warps"].append(w)
            if len(meet["warps"]) == 4:
                del cta.meets[key]
                meet["done"] = True
                w.machine.events += 1
                issue(w, m, ins, meet["warps"])
                return None
            w.machine.events += 1
            s.state = ("wgmma", meet)
        meet = s.state[1]
        if meet["done"]:
            s.state = None
            return None
        return Wait(lambda: meet["done"], lambda: f"wgmma: {len(meet['warps'])} of 4 warps of the warpgroup have arrived", ins.line)

    return True, run


# ---- mma.sync
@op("mma")
def _mma(ins: Instr):
    if "sp" in ins.mods or "block_scale" in ins.mods or "sp::ordered_metadata" in ins.mods:
        raise unsupported(ins)
    shape = _shape(ins)
    types = [m for m in ins.mods if m in ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s32", "e4m3", "e5m2")]
    if len(types) != 4 or "row" not in ins.mods or "col" not in ins.mods:
        raise unsupported(ins, "types or layouts")
    dtype, atype, btype, ctype = types
    from ..datapath.errors import IllegalOperand
    from ..datapath.mma_sync import plan_mma_sync

    try:
        plan = plan_mma_sync(shape, dtype, atype, btype, ctype, "satfinite" in ins.mods)
    except IllegalOperand as e:
        raise unsupported(ins, str(e)) from e
    regs = [[o for o in (x.items if isinstance(x, Vec) else [x])] for x in ins.operands]
    view = "X" if dtype == "f64" else "U"
    gets = [[getter(o, view) for o in group] for group in regs[1:]]
    dest = [o.index for o in regs[0]]

    def body(w, m, ins, members):
        a, b, c = (np.stack([g(w) for g in group]) for group in gets)
        out = plan.apply(a, b, c)
        rows = w.X if view == "X" else w.U
        for k, r in enumerate(dest):
            np.copyto(rows[r], out[k], where=m)
        flops = 2 * plan.m * plan.n * plan.k
        w.machine.tensor_flops += flops

    return True, warp_sync("mma.sync", body, member=_everyone)


# ---- ldmatrix and friends
def _matrix_num(ins: Instr) -> int:
    return next((int(m[1:]) for m in ins.mods if m in ("x1", "x2", "x4")), 1)


def _row_offsets(w, addrs: np.ndarray, num: int, ins) -> np.ndarray:
    off = (addrs & np.uint32(0xFFFFFF)).astype(np.int64)
    rows = off[: 8 * num]
    if int(rows.max()) + 16 > w.cta.smem_limit or int(rows.min()) < 1024:
        raise EmulationError(f"out-of-bounds shared access at PTX line {ins.line}{w.machine.where(ins)}: byte {int(rows.max())}")
    return off


@op("ldmatrix")
def _ldmatrix(ins: Instr):
    if "m8n8" not in ins.mods or "b16" not in ins.mods:
        raise unsupported(ins)
    num, trans = _matrix_num(ins), "trans" in ins.mods
    d, mem = ins.operands
    dest = [o.index for o in (d.items if isinstance(d, Vec) else [d])]
    if len(dest) != num:
        raise unsupported(ins, f"{len(dest)} registers for x{num}")
    get = _address32(ins, mem)

    def body(w, m, ins, members):
        from ..datapath.mma_sync import ldmatrix

        off = _row_offsets(w, get(w), num, ins)
        if w.cta.shadow is not None:
            check_shared_read(w, w.cta, off[: 8 * num], 16, ins)
        rows = ldmatrix(w.cta.smem, off, num, trans)
        for k, r in enumerate(dest):
            np.copyto(w.U[r], rows[k], where=m)
        w.machine.bytes["shared-load"] += 128 * num

    return True, warp_sync("ldmatrix.sync", body, member=_everyone)


@op("stmatrix")
def _stmatrix(ins: Instr):
    if "m8n8" not in ins.mods or "b16" not in ins.mods:
        raise unsupported(ins)
    num, trans = _matrix_num(ins), "trans" in ins.mods
    mem, s = ins.operands
    items = s.items if isinstance(s, Vec) else [s]
    if len(items) != num:
        raise unsupported(ins, f"{len(items)} registers for x{num}")
    gets = [getter(o, "U") for o in items]
    get = _address32(ins, mem)

    def body(w, m, ins, members):
        from ..datapath.mma_sync import stmatrix

        off = _row_offsets(w, get(w), num, ins)
        if w.cta.shadow is not None:
            check_shared_write(w, w.cta, off[: 8 * num], 16, ins)
        stmatrix(w.cta.smem, off, np.stack([g(w) for g in gets]), trans)
        w.machine.events += 1
        w.machine.bytes["shared-store"] += 128 * num

    return True, warp_sync("stmatrix.sync", body, member=_everyone)


def _address32(ins: Instr, mem):
    if any(m.startswith("shared") for m in ins.mods):
        return address(mem, "U")
    get = address(mem, "X")
    return lambda w: get(w).astype(np.uint32)


@op("movmatrix")
def _movmatrix(ins: Instr):
    d, a = ins.operands
    get = getter(a, "U")

    def body(w, m, ins, members):
        from ..datapath.mma_sync import movmatrix

        np.copyto(w.U[d.index], movmatrix(get(w)), where=m)

    return True, warp_sync("movmatrix.sync", body, member=_everyone)
