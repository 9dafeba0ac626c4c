"""What a GPT's parallel plan communicates in one step, derived by hand: the oracle of the Megatron tests.

Bytes follow nccl-tests: the whole (gathered) tensor for all_gather and reduce_scatter, the tensor for all_reduce, what
a rank sends in all for all_to_all.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16 = 2
FP32 = 4


@dataclass(frozen=True)
class Plan:
    """A GPT and how it is cut. Without ``llama``: LayerNorm with bias, one MLP matrix of ``ffn``."""

    layers: int = 4
    hidden: int = 64
    ffn: int = 0
    heads: int = 8
    groups: int = 0
    seq: int = 32
    vocab: int = 128
    batch: int = 2
    micro_batches: int = 2
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    dp: int = 1
    experts: int = 0
    topk: int = 2
    llama: bool = False
    sp: bool = False
    cp_comm: str = "p2p"

    # ---- the model ----

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def kv(self) -> int:
        """Width of key (and of value)."""
        return (self.groups or self.heads) * self.hidden // self.heads

    @property
    def norm(self) -> int:
        return self.hidden if self.llama else 2 * self.hidden

    @property
    def attention_weights(self) -> int:
        return self.hidden * (self.hidden + 2 * self.kv) + self.hidden**2

    @property
    def mlp_weights(self) -> int:
        return self.hidden * self.inner * (3 if self.llama else 2)

    @property
    def replicated(self) -> int:
        """Of one layer, whole on every tensor-parallel rank: two norms, and the router."""
        return 2 * self.norm + self.hidden * self.experts

    @property
    def whole(self) -> int:
        """All parameters of the model."""
        layer = self.attention_weights + self.replicated + self.mlp_weights * max(self.experts, 1)
        return self.layers * layer + 2 * self.vocab * self.hidden + self.norm

    # ---- one rank ----

    def stage(self, rank: int) -> int:
        return rank // (self.tp * self.cp * self.dp)

    @property
    def local_layers(self) -> int:
        return self.layers // self.pp

    @property
    def tokens(self) -> int:
        """Of one micro-batch on a rank, before sequence parallelism cuts them."""
        return self.seq // self.cp * self.batch

    def shared_parameters(self, rank: int) -> int:
        """Of one rank, experts left out."""
        dense = self.attention_weights + (0 if self.experts else self.mlp_weights)
        count = self.local_layers * (dense // self.tp + self.replicated)
        count += self.vocab // self.tp * self.hidden * ((self.stage(rank) == 0) + (self.stage(rank) == self.pp - 1))
        return count + (self.norm if self.stage(rank) == self.pp - 1 else 0)

    @property
    def expert_parameters(self) -> int:
        return self.local_layers * (self.experts // self.ep) * self.mlp_weights // (self.etp or self.tp)

    # ---- one step ----

    def expected(self, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
        """(group, operation) -> calls and bytes, for tensor, context and pipeline parallelism of a dense model."""
        first, last = self.stage(rank) == 0, self.stage(rank) == self.pp - 1
        steps = self.local_layers * self.micro_batches
        table: dict[tuple[str, str], list[int]] = {}

        def add(group, operation, calls, size):
            if calls:
                row = table.setdefault((group, operation), [0, 0])
                row[0] += calls
                row[1] += calls * size

        if self.tp > 1:
            self._tensor_parallel(add, steps, first, last)
        if self.cp > 1:
            self._context_parallel(add, steps)
        if self.pp > 1:
            activation = self.tokens // (self.tp if self.sp else 1) * self.hidden * BF16
            neighbours = (not first) + (not last)
            add("pp", "send", self.micro_batches * neighbours, activation)
            add("pp", "recv", self.micro_batches * neighbours, activation)
        return {key: (calls, size) for key, (calls, size) in table.items()}

    def expected_of_experts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes of the all-to-all dispatcher in a step, with as many tokens for each expert."""
        steps, etp = self.local_layers * self.micro_batches, self.etp or self.tp
        rows = self.tokens // (self.tp if self.sp else 1) * self.topk  # each rank sends as many as it gets
        rows_bytes, probabilities = rows * self.hidden * BF16, rows * BF16
        # Forward tokens and probabilities go there and results come back, backward the other way.
        table = {("ep", "all_to_all"): (6 * steps, steps * (4 * rows_bytes + 2 * probabilities))}
        # How many tokens each rank has for each expert (int64).
        table["tp-ep", "all_gather"] = (steps, steps * self.ep * etp * self.experts * 8)
        if etp > 1:
            both = (3 * steps, steps * etp * (2 * rows_bytes + probabilities))
            table["etp", "all_gather"] = table["etp", "reduce_scatter"] = both
        return table

    def _tensor_parallel(self, add, steps: int, first: bool, last: bool) -> None:
        activation = self.tokens * self.hidden * BF16
        blocks = 1 if self.experts else 2  # attention and MLP; experts have tensor parallelism of their own
        if self.sp:
            # Each block: gather, scatter; backward: gather of the gradient, scatter, and the input gathered again.
            add("tp", "all_gather", 3 * blocks * steps, activation)
            add("tp", "reduce_scatter", 2 * blocks * steps, activation)
            m = self.micro_batches
            add("tp", "reduce_scatter", m * (first + last), activation)  # embedding; output layer, backward
            add("tp", "all_gather", m * (first + 2 * last), activation)  # embedding backward; output layer, twice
            norms = self.local_layers * self.replicated + (self.norm if last else 0)
            add("tp", "all_reduce", 1, FP32 * norms)
        else:
            # Each block: one all-reduce forward, one backward; embedding forward, output layer backward.
            add("tp", "all_reduce", 2 * blocks * steps + self.micro_batches * (first + last), activation)
        if last:  # maximum, target's logit and sum of exponentials of each token
            add("tp", "all_reduce", 3 * self.micro_batches, self.tokens * FP32)

    def _context_parallel(self, add, steps: int) -> None:
        q, k = (self.tokens * width // self.tp * BF16 for width in (self.hidden, self.kv))
        n = self.cp
        if self.cp_comm == "p2p":
            # Keys and values go round; backward they do again, and their gradients: one exchange more.
            for operation in ("send", "recv"):
                add("cp", operation, steps * (n - 1), 2 * k)
                add("cp", operation, steps * 2, 2 * k)  # first: keys and values; last: gradients
                add("cp", operation, steps * (n - 2), 4 * k)
        elif self.cp_comm == "all_gather":
            add("cp", "all_gather", 4 * steps, n * k)
            add("cp", "reduce_scatter", 2 * steps, n * k)
        elif self.cp_comm == "a2a":
            add("cp", "all_to_all", 4 * steps, q)  # query and output, forward and backward
            add("cp", "all_to_all", 4 * steps, k)  # key and value
