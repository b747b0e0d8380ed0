"""Union of the top-k lists of up to 8 tokens, with the mask that says which token listed which key: the device side.

One CTA per group, no sort: a bitmap over the keys, a prefix sum over its words, and a key's rank is the number of set bits before
it. The CTA's story:

    locate    warp 0 finds the group's rows (with cu_seqlens_q: a scan over the requests, 32 at a time, no host knows the bounds)
    range     the keys [base, base + 131,072 or 524,288), usually all of them:
      clear   the bitmap's words
      set     every thread reads its share of the lists: red.or of each counted key's bit; keys past the range: their minimum
      scan    popcount of each thread's words, scan over lanes and warps; before[w] = the range's keys below word w
      emit    a warp takes 32 words; lane l of turn i finds their set bit number 32 * i + l: whole 128-byte lines of union_indices
      mark    the lists again (from L2): rank = total + before[w] + popcount below, red.or of bit rank into the slot's mask
      window  when the 16,384 ranks of the mask in shared memory are complete: written out, cleared, and `mark` again for the next
    next      the range of the smallest key not yet seen, so that empty ranges are never visited
    write     the last mask window, union_length, token_map, and the padding

Barriers: bar.sync 0 of all threads, between any two of these steps that share data (clear | set | scan | scan's sums | emit and
mark | clear). Both atomics are ORs, so the result does not depend on their order.

Mask window: 16-byte pieces [block of 128 ranks][slot ^ block % 8]. Without the exclusive or, the bits of one slot would all lie in
4 of the 32 banks.

Budgets: 32 registers a thread, so that all 2,048 threads of an SM run: 4 CTAs of 512 with 49,424 bytes of shared memory, or 2 of
1,024 with 114,960 for more than 131,072 keys (every range costs a pass over the lists: 8 small ranges took 0.9 ms where one takes
0.13). The lists are read twice instead of being kept in 32 registers: 4 CTAs of 64 KiB on 132 SMs stay in the 50 MiB L2.

Overflow: ranks at or past the capacity are counted and not written; union_length is the needed length, the caller's flag.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32, const_expr
from cutlass.utils import SmemAllocator

BLOCK = 128  # ranks per mask block
NO_KEY = 2**31 - 1  # never a key: s_kv is at most this


class GroupTopk:
    """One compiled variant.

    Args:
        wide: rows of the lists start at multiples of 16 bytes and topk is a multiple of 4.
        has_length: topk_length is given. has_requests: cu_seqlens_q is given.
        padded: write -1 and zero masks up to the capacity; otherwise only up to the end of the union's last block of 128.
        large: ranges of 524,288 keys; group_size * topk must be below 65,536.
    """

    WINDOW = 16384  # ranks whose masks are in shared memory: 8 lists of 2,048 without a common key

    def __init__(self, wide: bool, has_length: bool, has_requests: bool, padded: bool, large: bool) -> None:
        self.wide, self.has_length, self.has_requests, self.padded = wide, has_length, has_requests, padded
        self.vec = 4 if wide else 1
        self.threads, self.min_blocks, self.words = (1024, 2, 16384) if large else (512, 4, 4096)
        self.rank = Uint16 if large else Int32  # of before[]
        self.warps = self.threads // 32
        self.range = 32 * self.words
        smem = self.words * (4 + self.rank.width // 8) + self.WINDOW // BLOCK * 128 + 4 * (32 + 32 + 4)
        assert self.min_blocks * (smem + 1024) <= 228 * 1024 and self.min_blocks * self.threads * 32 <= 65536 and self.warps <= 32

    @cute.jit
    def __call__(
        self,
        indices: cute.Tensor,  # [s_q, 1, topk] int32
        topk_length: cute.Tensor | None,  # [s_q] int32
        requests: cute.Tensor | None,  # [R + 1] int32
        union: cute.Tensor,  # [n, 1, u] int32
        length: cute.Tensor,  # [n] int32
        mask: cute.Tensor,  # [n, u / 128, 128] uint8
        token_map: cute.Tensor,  # [n, group_size] int32
        s_kv: Int32,
        stream,
    ):
        self.kernel(indices, topk_length, requests, union, length, mask, token_map, s_kv).launch(
            grid=[token_map.shape[0], 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        topk_length: cute.Tensor | None,
        requests: cute.Tensor | None,
        union: cute.Tensor,
        length: cute.Tensor,
        mask: cute.Tensor,
        token_map: cute.Tensor,
        s_kv: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        s_q, size, u = Int32(indices.shape[0]), Int32(token_map.shape[1]), Int32(union.shape[2])

        allocator = SmemAllocator()
        marks = allocator.allocate_array(Uint32, self.WINDOW // BLOCK * 32, byte_alignment=16)
        bits = allocator.allocate_array(Uint32, self.words, byte_alignment=16)
        before = allocator.allocate_array(self.rank, self.words, byte_alignment=16)
        sums = allocator.allocate_array(Int32, 32, byte_alignment=16)  # of each warp's bits
        nexts = allocator.allocate_array(Int32, 32, byte_alignment=16)  # smallest key past the range, of each warp
        rows = allocator.allocate_array(Int32, 4, byte_alignment=16)  # the group's first row, its tokens

        # ---- locate, and an empty mask window
        for piece in cutlass.range(tid, self.WINDOW // 16, self.threads, unroll=1):
            self.store4(marks + 4 * piece, Int32(0))
        row, count = group * size, cutlass.min(size, s_q - group * size)
        if const_expr(self.has_requests):
            if warp == 0:
                first, tokens = self.locate(requests, group, size, s_q, lane)
                if lane == 0:
                    rows.store(first)
                    (rows + 1).store(tokens)
            cute.arch.sync_threads()
            row, count = rows.load(), (rows + 1).load()
        if tid < size:
            token_map[group, tid] = cutlass.select_(tid < count, row + tid, Int32(-1))

        base, total, window = Int32(0), Int32(0), Int32(0)
        more = Int32(1) if count > 0 and s_kv > 0 else Int32(0)
        while more != 0:
            words = cutlass.min(Int32(self.words), ((s_kv - base - 1) >> 5) + 1)

            # ---- clear
            for w in cutlass.range(4 * tid, words, 4 * self.threads, unroll=1):
                self.store4(bits + w, Int32(0))
            cute.arch.sync_threads()

            # ---- set
            smallest = Int32(NO_KEY)
            for slot in cutlass.range(count, unroll=1):
                limit, address = self.list_of(indices, topk_length, row + slot)
                for p in cutlass.range(self.vec * tid, limit, self.vec * self.threads, unroll=1):
                    keys = self.load(address + Int64(p) * 4)
                    for e in cutlass.range_constexpr(self.vec):
                        offset = self.offset(keys[e], p + e, limit, s_kv, base)
                        if Uint32(offset) < Uint32(self.range):
                            cute.arch.atomic_or(bits + (offset >> 5), Uint32(1) << Uint32(offset & 31), sem="relaxed", scope="cta")
                        elif offset > 0:
                            smallest = cutlass.min(smallest, keys[e])
            smallest = cute.arch.warp_redux_sync(smallest, "min")
            if lane == 0:
                (nexts + warp).store(smallest)
            cute.arch.sync_threads()

            # ---- scan: this thread's words are neighbours, an odd number of them for the sake of the banks
            share = ((words + (self.threads - 1)) // self.threads) | 1
            begin = cutlass.min(tid * share, words)
            end = cutlass.min(begin + share, words)
            own = Int32(0)
            for w in cutlass.range(begin, end, unroll=1):
                own = own + Int32(cute.arch.popc((bits + w).load()))
            inclusive = own
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(inclusive, offset=1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    inclusive = inclusive + other
            if lane == 31:
                (sums + warp).store(inclusive)
            cute.arch.sync_threads()
            of_warp = (sums + lane).load() if lane < self.warps else Int32(0)
            smallest = (nexts + lane).load() if lane < self.warps else Int32(NO_KEY)
            smallest = cute.arch.warp_redux_sync(smallest, "min")
            found = cute.arch.warp_redux_sync(of_warp, "add")
            earlier = cute.arch.warp_redux_sync(of_warp if lane < warp else Int32(0), "add")
            running = earlier + inclusive - own
            for w in cutlass.range(begin, end, unroll=1):
                (before + w).store(self.rank(running))
                running = running + Int32(cute.arch.popc((bits + w).load()))
            cute.arch.sync_threads()

            # ---- emit
            here = union.iterator + (Int64(group) * Int64(u) + total)
            for first in cutlass.range(32 * warp, words, self.threads, unroll=1):
                self.emit(here, bits, before, first, words, base, u - total, lane)

            # ---- mark, window by window
            marking = Int32(1)
            while marking != 0:
                ranks = cutlass.min(Int32(self.WINDOW), u - window)
                for slot in cutlass.range(count, unroll=1):
                    limit, address = self.list_of(indices, topk_length, row + slot)
                    for p in cutlass.range(self.vec * tid, limit, self.vec * self.threads, unroll=1):
                        keys = self.load(address + Int64(p) * 4)
                        for e in cutlass.range_constexpr(self.vec):
                            offset = self.offset(keys[e], p + e, limit, s_kv, base)
                            if Uint32(offset) < Uint32(self.range):
                                w, bit = offset >> 5, Uint32(1) << Uint32(offset & 31)
                                below = cute.arch.popc(Uint32((bits + w).load()) & (bit - Uint32(1)))
                                rank = total + self.count_before(before, w) + Int32(below) - window
                                if Uint32(rank) < Uint32(ranks):
                                    piece = self.piece(rank >> 7, slot)
                                    at = marks + (4 * piece + ((rank >> 5) & 3))
                                    cute.arch.atomic_or(at, Uint32(1) << Uint32(rank & 31), sem="relaxed", scope="cta")
                cute.arch.sync_threads()
                marking = Int32(0)
                if total + found >= window + self.WINDOW and window + self.WINDOW < u:
                    self.write_masks(mask, marks, group, u, window, window + self.WINDOW, tid)
                    cute.arch.sync_threads()
                    window = window + self.WINDOW
                    marking = Int32(1)

            total = total + found
            base = smallest & ~31
            more = Int32(1) if smallest != NO_KEY else Int32(0)

        # ---- write
        cute.arch.sync_threads()
        kept = cutlass.min(total, u)
        last = u if const_expr(self.padded) else cutlass.min((kept + (BLOCK - 1)) & ~(BLOCK - 1), u)
        self.write_masks(mask, marks, group, u, window, last, tid)
        if tid == 0:
            length[group] = total
        pad = union.iterator + Int64(group) * Int64(u)
        aligned = (kept + 3) & ~3
        if kept + tid < aligned:
            (pad + kept + tid).store(Int32(-1))
        for r in cutlass.range(aligned + 4 * tid, last, 4 * self.threads, unroll=1):
            self.store4(pad + r, Int32(-1))

    # ---------------------------------------------------------------------------------------------------- steps
    @cute.jit
    def locate(self, requests: cute.Tensor, group: Int32, size: Int32, s_q: Int32, lane: Int32):
        """(first row, tokens) of a group, in every lane of one warp; tokens 0 for an unused group.

        Bounds are data: clamped to [0, s_q] and made ascending, as the reference does.
        """
        n = Int32(requests.shape[0]) - 1
        row, tokens = Int32(0), Int32(0)
        done = Int32(0)  # groups of the requests before `first`
        highest = Int32(0)  # bound before them
        first = Int32(0)
        while first < n and done <= group:
            i = first + lane
            begin = cutlass.min(cutlass.max(requests[cutlass.min(i, n)], 0), s_q)
            end = cutlass.min(cutlass.max(requests[cutlass.min(i + 1, n)], 0), s_q)
            begin = cutlass.max(begin, highest)
            for step in cutlass.range_constexpr(5):
                begin = cutlass.max(begin, cute.arch.shuffle_sync_up(begin, offset=1 << step, mask_and_clamp=0))
            end = cutlass.max(begin, end)
            groups = (end - begin + (size - 1)) // size if i < n else Int32(0)
            upto = groups
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    upto = upto + other
            mine = group - (done + upto - groups)  # index of the group in this lane's request
            found = Int32(1) if mine >= 0 and mine < groups else Int32(0)
            start = begin + mine * size
            row = row + cute.arch.warp_redux_sync(start if found != 0 else Int32(0), "add")
            tokens = tokens + cute.arch.warp_redux_sync(cutlass.min(size, end - start) if found != 0 else Int32(0), "add")
            done = done + cute.arch.shuffle_sync(upto, offset=31)
            highest = cute.arch.shuffle_sync(end, offset=31)
            first = first + 32
        return row, tokens

    @cute.jit
    def emit(
        self,
        to: cute.Pointer,
        bits: cute.Pointer,
        before: cute.Pointer,
        first: Int32,
        words: Int32,
        base: Int32,
        room: Int32,
        lane: Int32,
    ):
        """The keys of words [first, first + 32) to their places among the range's; those at or past `room` are dropped.

        A thread per word would be simpler, but its stores touch an L2 sector for each key: with 16,384 keys a group that took 220
        to 550 of 340 to 660 us (21,000 tokens on an H200).
        """
        word, rank = Uint32(0), Int32(0)
        if first + lane < words:
            word, rank = Uint32((bits + first + lane).load()), self.count_before(before, first + lane)
        start = cute.arch.shuffle_sync(rank, offset=0)
        size = Int32(cute.arch.popc(word))
        keys = cute.arch.warp_redux_sync(size, "add")
        # the first of this word's keys among the 32 words'; behind the last word: past all of them
        place = rank - start if first + lane < words else keys
        for turn in cutlass.range(0, keys, 32, unroll=1):
            mine = turn + lane
            at = Int32(0)  # the last word whose first key is not behind mine
            for step in cutlass.range_constexpr(5):
                further = at + (16 >> step)
                if cute.arch.shuffle_sync(place, offset=further) <= mine:
                    at = further
            nth = mine - cute.arch.shuffle_sync(place, offset=at)
            rest = Uint32(cute.arch.shuffle_sync(word, offset=at))
            bit = Int32(0)
            for step in cutlass.range_constexpr(5):
                half = 16 >> step
                low = Int32(cute.arch.popc(rest & Uint32((1 << half) - 1)))
                if nth >= low:
                    nth = nth - low
                    rest = Uint32(rest >> Uint32(half))
                    bit = bit + half
            if mine < keys and start + mine < room:
                (to + start + mine).store(base + 32 * (first + at) + bit)

    @cute.jit
    def list_of(self, indices: cute.Tensor, topk_length: cute.Tensor | None, row: Int32):
        """(number of positions, address) of a token's list."""
        limit = Int32(indices.shape[2])
        if const_expr(self.has_length):
            limit = cutlass.min(cutlass.max(topk_length[row], 0), limit)
        return limit, indices.iterator.toint() + Int64(row) * Int64(indices.stride[0]) * 4

    @cute.jit
    def count_before(self, before: cute.Pointer, w: Int32):
        """before[w], of which 16 bits are loaded with a sign."""
        value = Int32((before + w).load())
        return value & 0xFFFF if const_expr(self.rank.width == 16) else value

    @cute.jit
    def load(self, address: Int64):
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * self.vec)
        return cute.make_tensor(pointer, cute.make_layout(self.vec)).load()

    @cute.jit
    def offset(self, key: Int32, position: Int32, limit: Int32, s_kv: Int32, base: Int32):
        """key - base, or -1 for what does not count (which keys of earlier ranges are like)."""
        counts = Uint32(key) < Uint32(s_kv)
        if const_expr(self.wide and self.has_length):
            counts = counts and position < limit
        return cutlass.select_(counts, key - base, Int32(-1))

    def piece(self, block: Int32, slot: Int32):
        """Place of the 16 mask bytes of (block of the window, slot)."""
        return 8 * block + (slot ^ (block & 7))

    @cute.jit
    def store4(self, pointer: cute.Pointer, value: Int32):
        """Four equal words at a pointer that is a multiple of 16 bytes."""
        values = cute.make_rmem_tensor((4,), Int32)
        values.fill(value)
        to = cute.make_ptr(Int32, pointer.toint(), pointer.memspace, assumed_align=16)
        cute.make_tensor(to, cute.make_layout(4)).store(values.load())

    @cute.jit
    def write_masks(self, mask: cute.Tensor, marks: cute.Pointer, group: Int32, u: Int32, window: Int32, last: Int32, tid: Int32):
        """Ranks [window, last) of the mask to global memory; the window is empty afterwards. Past the window: zeros."""
        to = mask.iterator.toint() + Int64(group) * Int64(u)  # 1 byte per rank: 8 slots x 1 bit
        for i in cutlass.range(tid, (last - window) >> 4, self.threads, unroll=1):
            target = cute.make_ptr(Int32, to + window + 16 * Int64(i), cute.AddressSpace.gmem, assumed_align=16)
            values = cute.make_rmem_tensor((4,), Int32)
            values.fill(0)
            if i < self.WINDOW // 16:
                at = marks + 4 * self.piece(i >> 3, i & 7)
                source = cute.make_ptr(Int32, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                values.store(cute.make_tensor(source, cute.make_layout(4)).load())
                self.store4(at, Int32(0))
            cute.make_tensor(target, cute.make_layout(4)).store(values.load())
