"""Errors and hazards: what the emulator reports, and in which words."""

from __future__ import annotations

from dataclasses import asdict, dataclass


class EmulationError(RuntimeError):
    """The launch cannot go on: deadlock, illegal operand, access outside every allocation, unknown instruction."""


class Deadlock(EmulationError):
    """No warp can run and nothing asynchronous is pending. The message lists who waits on what."""


@dataclass(frozen=True)
class Hazard:
    """One finding. `kind` is a stable identifier (see docs); `ptx_line` is 1-based; `source` is "file:line" or "".

    `other_line` and `other_source` name the second of two conflicting accesses, 0 and "" where there is none.
    """

    kind: str
    message: str
    ptx_line: int
    source: str = ""
    other_line: int = 0
    other_source: str = ""
    cta: tuple[int, int, int] = (0, 0, 0)
    warp: int = -1

    def __str__(self) -> str:
        where = f"PTX line {self.ptx_line}" + (f" ({self.source})" if self.source else "")
        text = f"{self.kind}: {self.message} at {where}, CTA {self.cta}, warp {self.warp}"
        if self.other_line:
            text += f"; conflicts with PTX line {self.other_line}" + (f" ({self.other_source})" if self.other_source else "")
        return text

    def as_dict(self) -> dict:
        return asdict(self)


#: Every kind of finding. "strict": reported at that level only; "both": the strict level reports more cases of it.
KINDS: dict[str, tuple[str, str]] = {
    "race-read-after-write-*": ("default", "a read that is not ordered after a write (shared, tmem or global memory)"),
    "race-write-after-read-*": ("default", "a write that is not ordered after a read"),
    "race-write-after-write-*": ("default", "two writes in no order"),
    "proxy-fence": ("both", "an asynchronous access after a generic write, no fence.proxy.async between; strict: after a read too"),
    "uninitialised-shared": ("default", "a read of shared memory that nothing wrote"),
    "uninitialised-local": ("default", "a read of a thread's local memory that the thread did not write"),
    "uninitialised-tmem": ("default", "a read of tensor memory that nothing wrote since its allocation"),
    "uninitialised-register": ("default", "an unwritten register reaches a store, branch, address or other unit"),
    "out-of-bounds-global": ("default", "an access outside every allocation; ends the launch"),
    "out-of-bounds-shared": ("default", "an access outside the CTA's static and dynamic shared memory; ends the launch"),
    "out-of-bounds-local": ("default", "an access outside the thread's local frame; ends the launch"),
    "misaligned": ("default", "an access that is not aligned to its size; ends the launch"),
    "write-to-readonly": ("default", "a store to an allocation registered as read-only, or to a kernel parameter"),
    "mbarrier-uninitialised": ("default", "use of an mbarrier that nothing initialised; ends the launch"),
    "mbarrier-init-race": ("default", "use of an mbarrier without synchronising with its init"),
    "mbarrier-init-fence": ("default", "an asynchronous unit signals an mbarrier with no fence after its init"),
    "mbarrier-reinit": ("default", "init of a live mbarrier without inval"),
    "mbarrier-underflow": ("default", "more arrivals than a phase expects"),
    "mbarrier-phase-overrun": ("default", "a phase ends, not ordered after a wait for the phase before: the parity comes round"),
    "mbarrier-count": ("default", "an expected arrival count outside 1..2**20-1"),
    "mbarrier-parity": ("default", "a phase parity that is neither 0 nor 1"),
    "mbarrier-tx-overflow": ("default", "a tx-count outside +-(2**20-1)"),
    "mbarrier-tx-at-exit": ("both", "bytes completed and never expected; strict: also expected and never completed"),
    "mbarrier-arrivals-at-exit": ("strict", "a phase with some of its arrivals at exit: one too many, or one missing"),
    "mbarrier-overwritten": ("default", "a write over a live mbarrier object"),
    "mbarrier-remote-wait": ("default", "a wait on another CTA's mbarrier; ends the launch"),
    "st-async-barrier": ("default", "st.async whose mbarrier is not in the destination CTA"),
    "bulk-store-at-exit": ("default", "a thread exits before its bulk stores have read shared memory"),
    "bulk-alignment": ("default", "a bulk copy whose size or address is no multiple of 16; ends the launch"),
    "cp-async-size": ("default", "a source size above the copy size; ends the launch"),
    "multicast-mask": ("default", "a CTA mask that names CTAs outside the cluster; ends the launch"),
    "cluster-barrier": ("both", "a wait without an arrive; strict: two arrives without a wait between"),
    "cluster-rank": ("default", "a CTA rank outside the cluster; ends the launch"),
    "dsmem-after-exit": ("default", "an access to shared memory of another CTA that is not ordered before that one's exit"),
    "shared-at-exit": ("default", "a copy or a product under way in a CTA's shared memory when it exits"),
    "divergent-barrier": ("default", "an aligned barrier executed by part of a warp"),
    "divergent-aligned": ("default", "a .sync.aligned tensor instruction executed by part of a warp"),
    "shuffle-inactive-lane": ("strict", "a shuffle that reads a lane which does not take part"),
    "tcgen05-fence": ("strict", "tcgen05 accesses of different threads without tcgen05.fence on both sides"),
    "tcgen05-commit": ("default", "tcgen05.commit by a thread that issued none of the operations under way in its warp"),
    "tcgen05-order": ("strict", "mma, cp and shift of one thread that the ISA does not pipeline, over the same tensor memory"),
    "tcgen05-wait-ld": ("strict", "a register of a tcgen05.ld read before tcgen05.wait::ld"),
    "tmem-alloc": ("both", "an illegal column count, or alloc after relinquish; strict: sizes that grow"),
    "tmem-dealloc": ("default", "freeing columns that were not allocated so"),
    "tmem-dealloc-race": ("default", "freeing columns while an access is not ordered before it"),
    "tmem-leak": ("default", "columns still allocated at exit"),
    "tmem-unallocated": ("default", "an access to columns that are not allocated"),
    "tmem-address": ("default", "a tensor-memory address that differs between lanes"),
    "tmem-lane": ("strict", "lane quarter 0 named where the warp's own quarter is meant"),
    "cta-group": ("default", "cta_group::2 without a CTA pair; ends the launch"),
    "cta-group-mixed": ("default", "both cta_group values in one kernel"),
    "mma-many-threads": ("default", "tcgen05.mma issued by more than one thread"),
    "descriptor-layout": ("default", "a matrix descriptor that names no canonical layout"),
    "descriptor-swizzle": ("default", "a matrix descriptor of another swizzle than the tensor copy that wrote the tile"),
    "illegal-operand": ("default", "a descriptor, shape, coordinate or tensor map the ISA forbids; ends the launch"),
    "tcgen05-ld": ("default", "a register count that does not fit the shape; ends the launch"),
    "tcgen05-st": ("default", "a register count that does not fit the shape; ends the launch"),
    "wgmma": ("default", "a register count that does not fit the shape; ends the launch"),
    "wgmma-register": ("default", "a register that a wgmma not yet waited for reads or writes is used otherwise"),
    "wgmma-fence": ("default", "no wgmma.fence before the first wgmma, or since other instructions computed its accumulators"),
    "setmaxnreg": ("both", "inc below or dec above the present count (waiting shows as deadlock); strict: part of a warpgroup"),
    "deadlock": ("default", "no warp can run, or none has any effect any more"),
    "device-assertion": ("default", "__assertfail was called; ends the launch"),
    "fault": ("default", "any other error that ended the launch"),
}

#: What the default level forgives, and the sequence in published kernels that needs it.
RELAXATIONS: dict[str, str] = {
    "tcgen05.fence": "no tcgen05.fence is asked for: quack's GEMMs and FlashAttention-4 pass tensor memory between warps through "
    "mbarriers alone",
    "tcgen05.wait::ld": "a load counts as complete at a release, an MMA or a dealloc once one of its registers has been read: "
    "FlashAttention-4's forward has no wait::ld",
    "tcgen05.cp after mma": "a tcgen05.cp executes after the earlier tcgen05.mma of its thread, which the ISA does not promise: "
    "CUTLASS's block-scaled mainloop refills one set of scale factors in tensor memory for every tile of K, with no wait",
    "tcgen05.mma over A": "a tcgen05.mma executes after an earlier one of its thread whose A in tensor memory it overwrites, at "
    "both levels: FlashAttention-4 writes the next logits over the weights",
    "cp.async": "copies signalled through cp.async.mbarrier.arrive are visible to the async proxy of the waiter: "
    "FlashAttention-4's 64-key MLA kernel feeds tcgen05.mma so, with no fence.proxy.async",
    "cluster barrier": "arrive, arrive, wait, wait: FlashAttention-4's 2-CTA MLA kernel sets up two groups of barriers so; "
    "arrivals are counted, and barrier.cluster.arrive.relaxed after fence.mbarrier_init publishes the barriers",
    "expect_tx at exit": "a last mbarrier.arrive.expect_tx without a copy: the producer tail of CuTe DSL TMA pipelines",
    "lane quarter": "tcgen05.ld/st of warps 1-3 with lane 0 in the address: cudnn's head-64 sparse attention, "
    "NVIDIA's 1cta_mma_a_from_tmem example",
    "reads before the async proxy": "an asynchronous write after a generic read needs synchronisation only, no fence.proxy.async: "
    "CUTLASS's TMA pipelines document only the arrive of those who read a buffer that is refilled",
    "memory scopes": "every atomic, volatile, relaxed, acquire or release access synchronises through its address, at any scope",
    "lanes of a warp": "lanes of one warp are one actor: races between them are not looked for",
}
