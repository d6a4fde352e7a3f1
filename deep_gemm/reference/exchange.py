"""Who computes which row: the routing plan, dispatch and collect, over one rank or a torch.distributed group.

An *entry* is one (token, slot) pair of this rank, index t*K + k. Entries whose expert is -1 are not sent. A rank works on *rows*: the entries
of all ranks that go to its experts, in the order (local expert, source rank, token, slot). That is the order in which one rank would hold the
rows of the concatenated tokens of all ranks, so every expert's matmul has the same operands, and the same bits, whatever the number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """ValueError for the first id that is neither -1 nor an expert; reads the values on the host."""
    if topk_idx.numel() == 0:
        return
    low, high = torch.aminmax(topk_idx)
    if low >= -1 and high < num_experts:
        return
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    token, slot = bad.nonzero()[0].tolist()
    raise ValueError(
        f"topk_idx[{token}, {slot}] = {topk_idx[token, slot].item()}, but num_experts = {num_experts} (valid: -1 or 0..{num_experts - 1})"
    )


class Exchange:
    """The plan of one call. Collective: every rank of `process_group` makes it, and calls the same methods in the same order.

    topk_idx       [T, K] integer, -1 = no expert; T may differ between ranks and be 0. An expert named twice by one token counts twice.
    num_experts    E, divisible by the number of ranks; rank r owns experts r*E_l .. (r+1)*E_l - 1
    process_group  None = one rank; else a torch.distributed group whose backend has all_to_all on the tensors' device (gloo on CPU)

    `counts`       rows of each local expert, [E_l] Python ints (the host reads them: this is the oracle, not the fast path)
    `num_rows`     their sum
    """

    def __init__(self, topk_idx: torch.Tensor, num_experts: int, process_group: dist.ProcessGroup | None = None):
        self._group = process_group
        num_ranks = 1 if process_group is None else process_group.size()
        if num_experts % num_ranks:
            raise ValueError(f"num_experts = {num_experts}: expected a multiple of the number of ranks, {num_ranks}")
        check_ids(topk_idx, num_experts)
        flat = topk_idx.reshape(-1).long()
        self._num_entries, self._num_topk = flat.numel(), topk_idx.shape[1]
        order = torch.argsort(flat, stable=True)
        self._entries = order[(flat < 0).sum() :]  # entry of each row that this rank sends; -1 sorts first
        sent = torch.bincount(flat[self._entries], minlength=num_experts).view(num_ranks, -1)
        received = self._all_to_all(sent, [1] * num_ranks, [1] * num_ranks)  # [source rank, local expert]
        self._send_splits, self._receive_splits = sent.sum(1).tolist(), received.sum(1).tolist()
        self.counts: list[int] = received.sum(0).tolist()
        self.num_rows = sum(self.counts)
        # Rows arrive as (source rank, local expert, ...); a stable sort by expert makes them (local expert, source rank, ...).
        local_expert = torch.arange(received.shape[1], device=flat.device).repeat(num_ranks)
        self._to_rows = torch.argsort(local_expert.repeat_interleave(received.reshape(-1)), stable=True)

    def _all_to_all(self, rows: torch.Tensor, send_splits: list[int], receive_splits: list[int]) -> torch.Tensor:
        if self._group is None:
            return rows
        received = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        # As bytes, because gloo does not know every dtype (bfloat16 among them).
        dist.all_to_all_single(
            received.view(torch.uint8), rows.contiguous().view(torch.uint8), receive_splits, send_splits, group=self._group
        )
        return received

    def dispatch_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[T, W] of this rank's tokens -> [num_rows, W], each token once per expert that it names."""
        return self._dispatch(values[self._entries // self._num_topk])

    def dispatch_entries(self, values: torch.Tensor) -> torch.Tensor:
        """[T*K, W], one per entry -> [num_rows, W]."""
        return self._dispatch(values[self._entries])

    def _dispatch(self, sent: torch.Tensor) -> torch.Tensor:
        return self._all_to_all(sent, self._send_splits, self._receive_splits)[self._to_rows]

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, W] -> [T*K, W] on the owners of the entries; zeros where the expert is -1."""
        arrived = torch.empty_like(rows).index_copy(0, self._to_rows, rows)
        returned = self._all_to_all(arrived, self._receive_splits, self._send_splits)
        return returned.new_zeros((self._num_entries, rows.shape[1])).index_copy(0, self._entries, returned)

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Each flag, or-ed over the ranks."""
        if self._group is None:
            return flags
        united = torch.tensor(flags, dtype=torch.int32, device=self._entries.device)
        dist.all_reduce(united, dist.ReduceOp.MAX, group=self._group)
        return united.bool().tolist()
