"""Plans for packed sequences of which a few may have many queries, such as prompts next to decoding.

Only the GPU knows how many queries each sequence has, unless the caller states the longest and all must have
as many. So two kernels are launched: `fwd_8_split_kv` for the sequences of few queries and `fwd_6_wgmma` for
the others. Each skips the other's sequences. The second starts on SMs that the first leaves free: while its
last blocks end, or from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cufa.device import Device
from cufa.integers import ceil_div
from cufa.kernels import kernel_named
from cufa.plan import fwd_6_wgmma, fwd_8_split_kv
from cufa.plan.record import Decisions
from cufa.problem import Problem

FEW, MANY = "fwd_8_split_kv", "fwd_6_wgmma"
# From this many queries on, a partly filled tile of fwd_6_wgmma takes less time than several of 16 rows.
MANY_QUERIES = 16
# Sequences of few queries are assumed to have at most this many; blocks reread the keys for each tile.
MOST_TYPICAL = MANY_QUERIES // 2
# Two kernels are launched if they take at most this fraction of one kernel's time: if there may be no
# sequence of many queries, so that the second launch may be wasted, and if there must be some.
WORTHWHILE, WORTHWHILE_IF_SURE = 0.65, 0.85


@dataclass(frozen=True)
class Mix:
    """Typical sequences of few and of many queries, and whether each kernel starts on half of the SMs."""

    few: Problem
    many: Problem
    on_half: bool
    reason: str

    def decisions(
        self, problem: Problem, device: Device
    ) -> tuple[tuple[Problem, Decisions], tuple[Problem, Decisions]]:
        """The problem of sequences of few queries and that of many, each with what is decided for it."""
        few = replace(problem, features=replace(problem.features, most_queries=MANY_QUERIES - 1))
        of_few = fwd_8_split_kv.beside(few, device, self.few, self.on_half)
        many = _beside_few(problem)
        return (few, of_few), (many, fwd_6_wgmma.beside(many, device, _beside_few(self.many)))


def mix_of(problem: Problem, device: Device) -> Mix | None:
    """None if a single kernel takes about as long, or if nothing is known about the sequences."""
    taken_for = _few_and_many(problem)
    if taken_for is None or any(kernel_named(name).unsupported(problem, device) for name in (FEW, MANY)):
        return None
    few, many = taken_for
    sure = _some_have_many(problem)
    # Sequences that decode are anywhere between their first key and the last.
    half_way = replace(few, seqlen_k=few.seqlen_k // 2)
    time_of_few = fwd_8_split_kv.price(half_way, device)
    time_of_many = fwd_6_wgmma.price(_beside_few(many), device)
    by_two = in_a_row = time_of_few + time_of_many
    if sure and not problem.features.key_mask:  # launches that look at a mask come between the two
        on_half = fwd_8_split_kv.price_on_half(half_way, device)
        by_two = min(in_a_row, on_half + max(0, time_of_many - on_half / 2))
    by_one = min(
        time_of_few + fwd_8_split_kv.price(many, device, like=problem),
        fwd_6_wgmma.price(half_way, device) + fwd_6_wgmma.price(many, device),
    )
    if by_two > by_one * (WORTHWHILE_IF_SURE if sure else WORTHWHILE):
        return None
    at_once = by_two < in_a_row
    where = "half of the SMs for each at first" if at_once else "one after the other"
    reason = (
        f"{FEW} for sequences of fewer than {MANY_QUERIES} queries beside {MANY} for others, {where}: about "
        f"{by_two:.0f} us on an H200, {by_one:.0f} by one kernel, if {many.batch} of {problem.batch} "
        "sequences are long and the others have one query each"
    )
    return Mix(few, many, at_once, reason)


def _beside_few(problem: Problem) -> Problem:
    """The same for the kernel that skips sequences of few queries."""
    return replace(problem, features=replace(problem.features, least_queries=MANY_QUERIES))


def _few_and_many(problem: Problem) -> tuple[Problem, Problem] | None:
    """Assume the fewest sequences of many queries, each as long as possible; return both kinds.

    None if there are not both kinds.
    """
    features, batch = problem.features, problem.batch
    more = problem.seqlen_q - batch  # beyond one query each
    if not (features.packed and features.page_size and batch) or more < MANY_QUERIES:
        return None
    longest = problem.seqlen_k // batch
    if problem.max_seqlen_q is not None:
        longest = min(longest, problem.max_seqlen_q)
    long = ceil_div(more, longest - 1) if longest >= MANY_QUERIES else batch
    if long >= batch:
        return None
    queries_of_few = 1 if _some_have_many(problem) else min(ceil_div(problem.seqlen_q, batch), MOST_TYPICAL)
    return alike(problem, batch - long, queries_of_few), alike(problem, long, 1 + more // long)


def _some_have_many(problem: Problem) -> bool:
    """Whether some must: the longest has that many, or equal lengths would all be that long."""
    if problem.max_seqlen_q is not None:
        return problem.max_seqlen_q >= MANY_QUERIES
    return problem.seqlen_q > (MANY_QUERIES - 1) * problem.batch


def alike(problem: Problem, batch: int, queries: int) -> Problem:
    """`batch` of its sequences with `queries` queries each; not packed, so that tiles can be counted."""
    features = replace(problem.features, packed=False, seqused_k=True)
    keys = problem.seqlen_k // problem.batch
    return replace(problem, batch=batch, seqlen_q=queries, seqlen_k=keys, features=features)
