#!/usr/bin/env python3
"""Writes the figures of README.md and benchmarks/README.md from the records in benchmarks/.

No figure there is typed by hand.
"""

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import click
from peer_problems import DETERMINISTIC, HIDDEN, PRODUCTS, TOKENS, work_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cufa.kernels import KERNELS, Kernel, features_in_words  # noqa: E402 - from this checkout, installed or not
from cufa.messages import counted  # noqa: E402
from cufa.problem import DTYPES, FLOAT8  # noqa: E402

README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
CHECK_RECORD = ROOT / "benchmarks" / "gpu_check.json"
SPEEDS_RECORD = ROOT / "benchmarks" / "speeds.json"
PEERS_RECORD = ROOT / "benchmarks" / "peers.json"
HALF_RECORD = ROOT / "benchmarks" / "peers_float16.json"
SINGLE_RECORD = ROOT / "benchmarks" / "peers_float32.json"
RUNGS_RECORD = ROOT / "benchmarks" / "peers_mma.json"
HALF_RUNGS_RECORD = ROOT / "benchmarks" / "peers_mma_float16.json"
UNEVEN_RECORD = ROOT / "benchmarks" / "peers_192_128.json"
H100_RECORD = ROOT / "benchmarks" / "peers_h100.json"
DROPOUT_RECORD = ROOT / "benchmarks" / "peers_dropout.json"
FP8_RECORD = ROOT / "benchmarks" / "fp8.json"
TRAINING_RECORD = ROOT / "benchmarks" / "training.json"
DECODE_RECORD = ROOT / "benchmarks" / "decode.json"
SERVING_RECORD = ROOT / "benchmarks" / "serving.json"
LATENT_RECORD = ROOT / "benchmarks" / "latent.json"
FLEX_RECORD = ROOT / "benchmarks" / "flex.json"
BIAS_RECORD = ROOT / "benchmarks" / "bias.json"
CHOICE_RECORD = ROOT / "benchmarks" / "choice.json"
SHAPES_RECORD = ROOT / "benchmarks" / "shapes.json"
WIDE_RECORD = ROOT / "benchmarks" / "wide.json"
PACKED_RECORD = ROOT / "benchmarks" / "packed.json"
WINDOWS_RECORD = ROOT / "benchmarks" / "windows.json"
INSTALL_RECORD = ROOT / "benchmarks" / "install.json"

Row = dict[str, Any]

# Whom bench_peers.py compares rungs with that are not the fastest on a Hopper.
PEER_OF_RUNGS = "flash-attention-2"

# Beside which bench_flex.py times functions of one's own.
FLEX = "FlexAttention"

# Which of PyTorch's kernels has the gradient of a bias, and float32.
EFFICIENT = "efficient"

# What records call otherwise than their authors do.
CALLED = {"flash-attention-2": "FlashAttention-2", "cudnn": "cuDNN", EFFICIENT: "memory-efficient attention"}

# Beside whose installation the README has cufa's.
PYTORCH = "PyTorch (FlashAttention-2, cuDNN, FlexAttention)"

# What bench_decode.py times with 8 bits, in words.
IN_WORDS = {"in 8 bits": "Q, K and V in 8 bits", "in 8 bits but for q": "only K and V in 8 bits"}

# In the place of figures that nobody has taken yet.
NO_RECORD = "Not measured yet."

# Of a rung that is younger than the record.
NOT_MEASURED: Row = dict.fromkeys(
    ("seconds", "tflops", "speedup_over_rung_before", "speedup_over_cpu", "memory_bytes")
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def three_digits(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def scaled(value: float | None, units: Sequence[tuple[str, float]]) -> str:
    """In the first of the units that the value is at least one of, or in the last."""
    if value is None:
        return ""
    unit, scale = next((each for each in units if value >= each[1]), units[-1])
    return f"{three_digits(value / scale)} {unit}"


def duration(seconds: float | None) -> str:
    return scaled(seconds, (("s", 1), ("ms", 1e-3), ("us", 1e-6)))


def called(name: str) -> str:
    """A peer by the name that it is known by."""
    return CALLED.get(name, name)


def listed(names: Sequence[str]) -> str:
    """Peers as a sentence has them."""
    *others, last = map(called, names)
    return f"{', '.join(others)} and {last}"


def size(count: int | None) -> str:
    return "none" if count == 0 else scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))


def rung_link(name: str, page: Path = README) -> str:
    kernels = os.path.relpath(ROOT / "cufa" / "kernels", page.parent)
    return f"[{name}]({kernels}/{name}.cu)"


def ladder(record: Row) -> str:
    """The ladder itself, and how each rung does on the course's problem."""
    measured = record["ladder"]["course"]
    rows = {row["name"]: row for row in measured["rows"]}
    dtype = measured["problem"]["dtype"]
    lines = []
    for name, kernel in KERNELS.items():
        row = rows.get(name, NOT_MEASURED)
        lines.append(
            (
                rung_link(name),
                kernel.idea,
                kernel.paper,
                duration(row["seconds"])
                or ("not measured" if dtype in kernel.dtypes else f"not for {dtype}"),
                three_digits(row["tflops"]),
                three_digits(row["speedup_over_rung_before"]) or "-",
                three_digits(row["speedup_over_cpu"]),
                size(row["memory_bytes"]),
            )
        )
    header = ("rung", "what it is", "paper", "time", "TFLOP/s", "x rung before", "x CPU", "extra memory")
    problem = measured["problem"]
    cpu = next(row for row in measured["rows"] if row["name"].startswith("CPU"))
    caption = (
        f"Batch {problem['batch']}, length {problem['seqlen_q']}, {problem['heads']} head of "
        f"{problem['head_dim']}, {problem['dtype']}, not causal. Measured by `cufa ladder --preset course` "
        f'on an {measured["device"]}, {record["date"]}. "x rung before" is the speedup over the rung before, '
        '"x CPU" the speedup over the tiled algorithm in NumPy on '
        f"{cpu['name'].removeprefix('CPU, ')} of the same machine ({cpu['note']})."
    )
    return f"{table(header, lines)}\n\n{caption}"


def choice(_: Row) -> str:
    """What each rung that is made for use supports, for who wants to know which one his call gets."""
    kernels = [kernel for kernel in KERNELS.values() if not kernel.on_request]

    def of(direction: str) -> list[Kernel]:
        return [kernel for kernel in kernels if kernel.direction == direction]

    lines = []
    for kernel in [*reversed(of("forward")), *reversed(of("backward"))]:
        lines.append(
            (
                rung_link(kernel.name),
                gpus_of(kernel),
                "all" if kernel.dtypes == tuple(DTYPES) else ", ".join(kernel.dtypes),
                kernel.head_dims,
                features_in_words(kernel),
            )
        )
    return table(("rung", "GPU", "dtypes", "head dims", "features"), lines)


def gpus_of(kernel: Kernel) -> str:
    if kernel.only_arch:
        return f"sm_{kernel.only_arch}"
    if kernel.min_capability > min(each.min_capability for each in KERNELS.values()):
        return "from sm_{}{} on".format(*kernel.min_capability)
    return "with tensor cores" if kernel.tensor_cores else "any"


def measured(checked: Row, record: Row) -> str:
    """What the other presets, the JIT, the tests and the CPU path came to."""
    tests, jit = checked["tests"], record["jit"]
    slowest = max(jit["compile_seconds"].values())
    first = jit["warm_cache"]["first_ms"] - jit["warm_cache"]["later_ms"]
    tools = (line.split(" =")[0] for line in checked["sanitizer"].get("tools", ()))
    lines = [
        f"`scripts/gpu_check` on an {machine(checked)} ([gpu_check.json](gpu_check.json)):",
        "",
        "; ".join((f"- {tests['passed']} GPU tests passed, {tests.get('failed', 0)} failed", *tools)),
        "",
        f"And what it measured on an {machine(record)} ([speeds.json](speeds.json)):",
        "",
        f"- The slowest kernel variant compiles in {slowest:.1f} s on one core, with NVRTC "
        f"{'.'.join(map(str, jit['nvrtc']))}",
        f"- With the kernel in the disk cache, the first call of a process takes {first:.1f} ms longer than "
        "later calls",
        "- Host time of a call: "
        + ", ".join(f"{time:.0f} us ({name})" for name, time in jit["host_us"].items()),
        "",
        "TFLOP/s on other problems (`cufa ladder --preset ...`):",
        "",
        other_presets(record),
        "",
        cpu_path(record),
    ]
    return "\n".join(lines)


def machine(record: Row) -> str:
    """Of a record by `scripts/gpu_check`: the GPU, versions and the date."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    info = record["info"]
    return f"{info['gpu']['name']}, driver {info['driver']}, {versions}, {record['date']}"


def other_presets(record: Row) -> str:
    presets = {name: ladder for name, ladder in record["ladder"].items() if name != "course"}
    header = ["rung"]
    for name, ladder in presets.items():
        problem = ladder["problem"]
        heads = f"{problem['heads']}/{problem['kv_heads']} heads of {problem['head_dim']}"
        shape = f"{problem['batch']} x {problem['seqlen_q']}, {heads}"
        header.append(f"{name}: {shape}, {problem['dtype']}{', causal' if problem['causal'] else ''}")
    lines = []
    for kernel in KERNELS:
        rows = [
            next((row for row in ladder["rows"] if row["name"] == kernel), NOT_MEASURED)
            for ladder in presets.values()
        ]
        lines.append([kernel, *(three_digits(row["tflops"]) or "-" for row in rows)])
    return table(header, lines)


def cpu_path(record: Row) -> str:
    cpu = record["cpu"]
    results = {
        (row.get("heads", 1), row["seqlen"], row["direction"], row["implementation"]): row
        for row in cpu["results"]
    }
    lines = []
    for heads, seqlen, direction, implementation in results:
        if implementation == "standard":
            standard, tiled = (results[heads, seqlen, direction, name] for name in ("standard", "tiled"))
            lines.append(
                (
                    f"{direction}, {counted(heads, 'head')} of {seqlen:,} x {seqlen:,}",
                    duration(standard["seconds"]),
                    duration(tiled["seconds"]),
                    size(standard["peak_bytes"]),
                    size(tiled["peak_bytes"]),
                )
            )
    header = ("CPU path", "standard", "tiled", "standard, memory", "tiled, memory")
    head_dim = cpu["results"][0]["head_dim"]
    caption = (
        f"Heads of {head_dim}, float32, on the {record['info']['cpu_cores']} cores of the same machine, by "
        "`scripts/bench_cpu.py`. Memory is the peak growth of the process."
    )
    return f"{table(header, lines)}\n\n{caption}"


def peers(record: Row) -> str:
    """How cufa does beside its peers, over all lengths: each of them, and the best of them in each cell."""
    cells: dict[tuple[str, int, bool, str], list[Row]] = {}
    for point in record["points"]:
        key = (point["dtype"], point["head_dim"], point["causal"], point["direction"])
        cells.setdefault(key, []).append(point)
    names = list(dict.fromkeys(name for point in record["points"] for name in peers_in(point)))
    lines = []
    for (dtype, head_dim, causal, direction), points in cells.items():
        name = f"{direction}, {dtype}, head dim {head_dim}{', causal' if causal else ''}"
        best = max(point["tflops"]["cufa"] for point in points)
        worst = min(points, key=over_best_peer)
        lines.append(
            (
                name,
                three_digits(best),
                *(mean_ratio("cufa", peer, points) for peer in names),
                f"{statistics.geometric_mean(map(over_best_peer, points)):.2f}",
                f"{over_best_peer(worst):.2f} at {worst['seqlen']:,}",
            )
        )
    header = ("", "best TFLOP/s", *(f"x {called(name)}" for name in names), "x best peer", "worst")
    lengths = sorted({point["seqlen"] for point in record["points"]})
    versions = {"PyTorch": "torch", "cuDNN": "cudnn", "flash-attn-4": "flash-attn-4"}
    told = ", ".join(f"{name} {record[key]}" for name, key in versions.items() if record.get(key))
    caption = (
        f"Ratios are geometric means over lengths {lengths[0]} to {lengths[-1]:,}. The best peer is the one "
        "that is fastest at each length; the last column is the lowest ratio to it. A step is a forward and "
        f"a backward. Each problem has {TOKENS:,} tokens and a hidden size of {HIDDEN:,}. Measured on an "
        f"{record['gpu']}, driver {record['driver']}, {told}, {record['date']}, by `scripts/bench_peers.py` "
        "([peers.json](peers.json))."
    )
    return "\n\n".join((table(header, lines), caption, "\n".join(beside_peers(record)))).rstrip()


def headline(record: Row) -> str:
    """What all cells come to, in a sentence."""
    points = record["points"]
    forward, backward = (points_of(direction, record["points"]) for direction in ("forward", "backward"))
    over_best = [over_best_peer_in(direction, points) for direction in ("forward", "backward")]
    over_one = [mean_ratio("cufa", PEER_OF_RUNGS, cells) for cells in (forward, backward)]
    lengths = sorted({point["seqlen"] for point in points})
    dtypes = " and ".join(dict.fromkeys(point["dtype"] for point in points))
    return (
        f"On an {record['gpu']} in {dtypes}, cufa is {over_best[0]:.2f} times as fast forward and "
        f"{over_best[1]:.2f} times as fast backward as the fastest of {listed(peers_in(points[0]))} at each "
        f"length. Compared with {called(PEER_OF_RUNGS)} alone, it is {over_one[0]} and {over_one[1]} times "
        "as fast. These are geometric means over all measured problems, of lengths "
        f"{lengths[0]} to {lengths[-1]:,} ([measurements](benchmarks/README.md#beside-other-libraries))."
    )


def points_of(direction: str, points: Sequence[Row]) -> list[Row]:
    return [point for point in points if point["direction"] == direction]


def peers_in(point: Row) -> list[str]:
    return [name for name in point["tflops"] if not name.startswith("cufa") and name not in KERNELS]


def over_best_peer(point: Row) -> float:
    tflops = point["tflops"]
    return float(tflops["cufa"] / max(tflops[name] for name in peers_in(point)))


def over_best_peer_in(direction: str, points: Sequence[Row]) -> float:
    """The mean of one direction beside the faster peer of each cell."""
    return statistics.geometric_mean(over_best_peer(point) for point in points_of(direction, points))


def mean_ratio(name: str, other: str, points: Sequence[Row]) -> str:
    """Of the speeds of two in those points that have both."""
    both = [point["tflops"] for point in points if {name, other} <= point["tflops"].keys()]
    return (
        f"{statistics.geometric_mean(tflops[name] / tflops[other] for tflops in both):.2f}" if both else "-"
    )


def beside_peers(record: Row) -> Iterator[str]:
    """What else the record has, an item each: determinism, the backward's parts, the host."""
    points = record["points"]
    for name in dict.fromkeys(name for point in points for name in point["tflops"]):
        if name == DETERMINISTIC:
            yield f"- {name}: {mean_ratio(name, 'cufa', points)} of cufa's default speed"
    shares: dict[int, list[float]] = {}
    for part in record.get("parts", ()):
        shares.setdefault(part["seqlen"], []).append(share_beside_products(part, points))
    if shares:
        # At longer ones than 4,096 it is less than times differ by from one call to the next.
        short = [seqlen for seqlen in shares if seqlen <= 4096] or [min(shares)]
        told = (
            f"{min(shares[seqlen]):.0%} to {max(shares[seqlen]):.0%} at length {seqlen:,}"
            for seqlen in sorted({min(short), max(short)})
        )
        yield f"- Share of a backward's time outside the kernel with the products: {', '.join(told)}"
    for direction, times in record.get("host_us", {}).items():
        told = (f"{time:.0f} us ({called(name)})" for name, time in times.items())
        yield f"- Host time of a call ({direction}, bfloat16): {', '.join(told)}"


def share_beside_products(part: Row, points: Sequence[Row]) -> float:
    """Of the time of a backward call. Its kernels overlap, so that their times say more than they take."""
    problem = ("dtype", "head_dim", "causal", "seqlen")
    backward = next(
        point
        for point in points
        if point["direction"] == "backward" and all(point[key] == part[key] for key in problem)
    )
    work = work_of("backward", part["seqlen"], part["causal"], part["head_dim"], part.get("value_dim"))
    return 1 - part["seconds"]["key_tiles"] / (work / backward["tflops"]["cufa"] / 1e12)


def other_dtype(record: Row) -> str:
    """The same in another dtype, which is all that the record has."""
    dtype, names = record["points"][0]["dtype"], peers_in(record["points"][0])
    peers = f"PyTorch's {called(EFFICIENT)}" if names == [EFFICIENT] else fastest_of(names)
    told = []
    for direction in dict.fromkeys(point["direction"] for point in record["points"]):
        points = points_of(direction, record["points"])
        worst = min(points, key=over_best_peer)
        told.append(
            f"{direction} {statistics.geometric_mean(map(over_best_peer, points)):.2f} "
            f"(worst {over_best_peer(worst):.2f}, head dim {worst['head_dim']} at {worst['seqlen']:,})"
        )
    return (
        f"**{dtype}**, relative to {peers}, at lengths {lengths_in(record)}: "
        f"{', '.join(told)}. Each is the geometric mean of {len(points)} cells, measured on an "
        f"{record['gpu']} ([peers_{dtype}.json](peers_{dtype}.json))."
    )


def lengths_in(record: Row) -> str:
    return ", ".join(f"{seqlen:,}" for seqlen in sorted({point["seqlen"] for point in record["points"]}))


def fastest_of(names: Sequence[str]) -> str:
    return f"the {'fastest' if len(names) > 2 else 'faster'} of {listed(names)}"


def uneven(record: Row) -> str:
    """Keys of more head dims than values have."""
    first = record["points"][0]
    return (
        f"**Head dim {first['head_dim']} with values of {first['value_dim']}**, {first['dtype']} "
        f"([peers_192_128.json](peers_192_128.json)):\n\n{over_each_peer(record)}"
    )


def dropout(record: Row) -> str:
    """With some weights dropped."""
    first = record["points"][0]
    return (
        f"**Dropout** ({first['dropout_p']:.0%}), {first['dtype']}, at lengths {lengths_in(record)} "
        f"([peers_dropout.json](peers_dropout.json)):\n\n{over_each_peer(record)}"
    )


def other_gpu(record: Row) -> str:
    """The same on another GPU."""
    first = record["points"][0]
    return (
        f"**On an {record['gpu']}**, {first['dtype']}, at lengths {lengths_in(record)} "
        f"([peers_h100.json](peers_h100.json)):\n\n{over_each_peer(record)}"
    )


def over_each_peer(record: Row) -> str:
    """How fast each direction is, and how many times as fast as each peer and the fastest of each cell."""
    of_each = {direction: points_of(direction, record["points"]) for direction in PRODUCTS}
    best = (max(point["tflops"]["cufa"] for point in cells) for cells in of_each.values())
    lines = [("best TFLOP/s", *map(three_digits, best))]
    for peer in peers_in(record["points"][0]):
        lines.append((f"x {called(peer)}", *(beside("cufa", peer, cells) for cells in of_each.values())))
    lines.append(("x best peer", *(mean_and_worst(cells, over_best_peer) for cells in of_each.values())))
    caption = (
        f"Each is the geometric mean of {len(of_each['forward'])} cells, with the worst cell in parentheses. "
        f"Measured on an {record['gpu']}, {record['date']}."
    )
    return f"{table(('', *of_each), lines)}\n\n{caption}"


def rungs(record: Row, half: Row) -> str:
    """The kernels for every GPU beside the peer that multiplies as they do, in a sentence for each."""
    points = record["points"] + half["points"]
    told = []
    for kernel, dtype in product(
        ("fwd_5_mma", "bwd_3_mma"), dict.fromkeys(point["dtype"] for point in points)
    ):
        cells = [point for point in points if point["dtype"] == dtype and kernel in point["tflops"]]
        told.append(f"{rung_link(kernel, BENCHMARKS)} in {dtype} {beside(kernel, PEER_OF_RUNGS, cells)}")
    return (
        f"**Kernels that use `mma.sync`**, relative to {called(PEER_OF_RUNGS)}, which uses it too: "
        f"{', '.join(told)}. Each is the geometric mean of {len(cells)} cells, with the worst cell in "
        "parentheses ([peers_mma.json](peers_mma.json), [peers_mma_float16.json](peers_mma_float16.json))."
    )


def beside(name: str, other: str, points: Sequence[Row]) -> str:
    """The mean of the ratio of two speeds, and where it is least."""
    return mean_and_worst(points, lambda point: point["tflops"][name] / point["tflops"][other])


def mean_and_worst(points: Sequence[Row], ratio_of: Callable[[Row], float]) -> str:
    """The mean of a ratio, and where it is least."""
    ratios = list(map(ratio_of, points))
    least = min(ratios)
    worst = points[ratios.index(least)]
    causal = ", causal" if worst["causal"] else ""
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.2f} ({least:.2f}, head dim {worst['head_dim']}{causal} at {worst['seqlen']:,})"


def decode(record: Row) -> str:
    """How long one query takes with many keys, beside other libraries."""
    points = record["points"]
    peers, in_pages, in_bytes = (others_of(points, kind) for kind in ("peers", "in pages", "in 8 bits"))
    lines = []
    for point in points:
        heads = f"{point['heads']}/{point['kv_heads']}"
        dims = dict.fromkeys((point["head_dim"], point["value_dim"]))
        seconds = point["seconds"]
        lines.append(
            (
                f"{point['batch']} x {point['seqlen_k']:,}, {heads} heads of {'/'.join(map(str, dims))}",
                duration(seconds["cufa"]),
                f"{point['bytes'] / seconds['cufa'] / 1e12:.2f}",
                *(times_as_fast(point, name) for name in (*peers, *in_pages, *in_bytes)),
            )
        )
    others = (IN_WORDS.get(name, name) for name in (*in_pages, *in_bytes))
    header = ("batch x keys", "time", "TB/s", *(f"x {called(name)}" for name in peers), *others)
    means = " and ".join(
        f"{mean_speedup(name, points):.2f} times as fast as {called(name)}" for name in peers
    )
    slower = " and ".join(f"{mean_speedup(name, points):.2f} times as long {name}" for name in in_pages)
    paged = f" Pages are shuffled: a call takes {slower}." if in_pages else ""
    halved = "".join(
        f" It takes {mean_speedup(name, points):.2f} times as long with {IN_WORDS[name]}."
        for name in in_bytes
    )
    caption = (
        "One query per head, in bfloat16. Where heads are of 576/512, values are the first 512 columns of "
        "keys, as in multi-head latent attention. TB/s counts the bytes of K and V, shared ones once. The "
        "columns after the peers are the time of a call relative to contiguous keys in bfloat16. "
        "Geometric means: cufa is "
        f"{means}.{paged}{halved} Measured on an {record['gpu']}, driver {record['driver']}, PyTorch "
        f"{record['torch']}, cuDNN {record['cudnn']}, {record['date']}, by `scripts/bench_decode.py` "
        "([decode.json](decode.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def serving(record: Row) -> str:
    """How long a server's batches take, beside FlashInfer's kernels."""
    what = (
        f"{record['heads']}/{record['kv_heads']} heads, unless the row names others, of {record['head_dim']} "
        f"in bfloat16, keys in shuffled pages of {record['page_size']}, causal. Lengths range from a "
        "sixteenth of the longest to the longest. TB/s counts the bytes of K and V."
    )
    return beside_flashinfer(record, what, SERVING_RECORD)


def latent(record: Row) -> str:
    """How long latent attention of a server's batches takes, beside FlashInfer's kernels."""
    what = (
        f"{record['heads']} heads, unless the row names others, of {record['head_dim']}/"
        f"{record['value_dim']} in bfloat16 with one KV head, values in keys, which are in shuffled pages of "
        f"{record['page_size']}, causal. Lengths range from a sixteenth of the longest to the longest. "
        "TB/s counts the bytes of K."
    )
    return beside_flashinfer(record, what, LATENT_RECORD)


def beside_flashinfer(record: Row, what: str, path: Path) -> str:
    """The times of batches beside those of FlashInfer's kernels, and what was measured."""
    points = record["points"]
    peers = peers_of(points)
    lines = [
        (
            point["batch"],
            duration(point["seconds"]["cufa"]),
            three_digits(point["flops"] / point["seconds"]["cufa"] / 1e12),
            f"{point['bytes'] / point['seconds']['cufa'] / 1e12:.2f}",
            *(times_as_fast(point, name) for name in peers),
        )
        for point in points
    ]
    header = ("requests", "time", "TFLOP/s", "TB/s", *(f"x {name}" for name in peers))
    fastest = over_flashinfer(points)
    plans = statistics.median(min(point["plan_seconds"].values()) for point in points)
    caption = (
        f"{what} Compared with the fastest FlashInfer kernel for each batch, cufa is "
        f"{statistics.geometric_mean(fastest):.2f} times as fast (geometric mean; worst {min(fastest):.2f}). "
        f"FlashInfer's planning on the host for these lengths is not counted; its median is "
        f"{duration(plans)}. Measured on an {record['gpu']}, driver {record['driver']}, FlashInfer "
        f"{record['flashinfer']}, PyTorch {record['torch']}, {record['date']}, by "
        f"`scripts/bench_{path.stem}.py` ([{path.name}]({path.name}))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def over_flashinfer(points: Sequence[Row]) -> list[float]:
    """How many times as fast as the fastest of FlashInfer's kernels each batch is."""
    if any(point["seconds"].keys() == {"cufa"} for point in points):
        sys.exit("serving.json or latent.json lacks FlashInfer: measure it where FlashInfer is installed")
    return [
        min(seconds for name, seconds in point["seconds"].items() if name != "cufa")
        / point["seconds"]["cufa"]
        for point in points
    ]


def others_of(points: Sequence[Row], kind: str) -> list[str]:
    """What is timed beside cufa with its keys in one piece: peers, or cufa "in pages" or "in 8 bits"."""
    names = [name for name in points[0]["seconds"] if name != "cufa"]
    if kind == "peers":
        return [name for name in names if not name.startswith("in ")]
    return [name for name in names if name.startswith(kind)]


def mean_speedup(name: str, points: Sequence[Row]) -> float:
    both = [point["seconds"] for point in points if name in point["seconds"]]
    return statistics.geometric_mean(seconds[name] / seconds["cufa"] for seconds in both)


def times_as_fast(point: Row, name: str) -> str:
    seconds = point["seconds"]
    return f"{seconds[name] / seconds['cufa']:.2f}" if name in seconds else "-"


def fp8(record: Row) -> str:
    """How much faster 8 bits are than 16, and what they cost."""
    points = record["points"]
    lengths = sorted({point["seqlen"] for point in points})
    lines = []
    for head_dim, causal in dict.fromkeys((point["head_dim"], point["causal"]) for point in points):
        of_line = [point for point in points if (point["head_dim"], point["causal"]) == (head_dim, causal)]
        speeds = {point["seqlen"]: point["tflops"] for point in of_line}
        for name in speeds[lengths[0]]:
            if name == "bfloat16":
                continue
            problem = f"head dim {head_dim}{', causal' if causal else ''}"
            lines.append(
                (
                    problem + name.removeprefix(FLOAT8),
                    three_digits(max(tflops[name] for tflops in speeds.values())),
                    *(f"{speeds[n][name] / speeds[n]['bfloat16']:.2f}" for n in lengths),
                )
            )
    errors = [point["error"] for point in points]
    header = (FLOAT8, "best TFLOP/s", *(f"x bfloat16 at {length:,}" for length in lengths))
    caption = (
        'The problems are those of "Beside other libraries". The error of the output is '
        f"{min(errors):.1%} to {max(errors):.1%} (root mean square), relative to float64 on the same 8-bit "
        f"arrays. Measured on an {record['gpu']}, driver {record['driver']}, {record['date']}, by "
        "`scripts/bench_fp8.py` ([fp8.json](fp8.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def flex(record: Row) -> str:
    """How fast functions of one's own are beside those of another library, case by case."""
    points = record["points"]
    directions = tuple(dict.fromkeys(point["direction"] for point in points))
    seconds = {(p["case"], p["head_dim"], p["direction"]): p["seconds"] for p in points}
    lines = []
    for case, head_dim in dict.fromkeys((point["case"], point["head_dim"]) for point in points):
        of_line = [seconds[case, head_dim, direction] for direction in directions]
        cells = ((duration(each["cufa"]), f"{each[FLEX] / each['cufa']:.2f}") for each in of_line)
        lines.append((f"{case}, head dim {head_dim}", *chain.from_iterable(cells)))
    small: dict[str, set[str]] = {}
    for point in points:
        if point["kernel_options"]:
            options = " ".join(f"{name}={value}" for name, value in point["kernel_options"].items())
            small.setdefault(options, set()).add(f"{point['case']}, head dim {point['head_dim']}")
    told = "".join(
        f" FlexAttention runs with {options} where its default tiles need more shared memory than the GPU "
        f"has: {'; '.join(sorted(cases))}."
        for options, cases in small.items()
    )
    header = ("", *chain.from_iterable((direction, f"x {FLEX}") for direction in directions))
    caption = (
        f"{record['batch']} x {record['seqlen']:,} tokens, {record['heads']} heads, in {record['dtype']}. "
        f"Geometric means: cufa is {times_in_mean(FLEX, points)} as {FLEX}.{told} Measured on an "
        f"{record['gpu']}, driver {record['driver']}, PyTorch {record['torch']}, {record['date']}, by "
        "`scripts/bench_flex.py` ([flex.json](flex.json))."
    )
    return f"{table(header, lines)}\n\n{caption}\n\n{flex_decoding(record['decoding'])}"


def flex_decoding(record: Row) -> str:
    """The same for one query of each sequence."""
    seconds = {point["case"]: point["seconds"] for point in record["points"]}
    lines = [
        (case, duration(each["cufa"]), f"{each[FLEX] / each['cufa']:.2f}") for case, each in seconds.items()
    ]
    caption = (
        f"Decoding in the same run: {record['batch']} sequences of {record['seqlen_k']:,} keys, "
        f"{record['heads']} heads and {record['kv_heads']} KV heads of {record['head_dim']} dims."
    )
    return f"{table(('decoding', 'forward', f'x {FLEX}'), lines)}\n\n{caption}"


def bias(record: Row) -> str:
    """How fast it is with a bias and its gradient, case by case."""
    points = record["points"]
    directions = tuple(dict.fromkeys(point["direction"] for point in points))
    of_line: dict[str, dict[str, Row]] = {}
    for point in points:
        told = f"{point['bias']}, {point['dtype']}, {point['seqlen']:,} of {point['head_dim']}"
        of_line.setdefault(told, {})[point["direction"]] = point
    lines = [
        (
            told,
            *chain.from_iterable(
                (duration(of_way[way]["seconds"]["cufa"]), times_as_fast(of_way[way], EFFICIENT))
                for way in directions
            ),
        )
        for told, of_way in of_line.items()
    ]
    header = ("bias", *chain.from_iterable((way, "x PyTorch's") for way in directions))
    caption = (
        f"{record['batch']} sequences, {record['heads']} heads. The backward includes the gradient of the "
        f"bias. Geometric means: cufa is {times_in_mean(EFFICIENT, points)} as PyTorch's memory-efficient "
        f"attention. Measured on an {record['gpu']}, driver {record['driver']}, PyTorch {record['torch']}, "
        f"{record['date']}, by `scripts/bench_bias.py` ([bias.json](bias.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def chosen_rungs(record: Row) -> str:
    """How much longer than the fastest rung the chosen one takes."""
    slower: dict[tuple[str, str], list[float]] = {}
    for point in record["points"]:
        ratio = point["seconds"][point["chosen"]] / min(point["seconds"].values())
        slower.setdefault((point["direction"], point["dtype"]), []).append(ratio)
    lines = [
        (
            *of_calls,
            str(len(ratios)),
            f"{statistics.geometric_mean(ratios):.3f}",
            f"{statistics.quantiles(ratios, n=20)[-1]:.2f}",
            f"{max(ratios):.2f}",
        )
        for of_calls, ratios in sorted(slower.items(), reverse=True)
    ]
    header = ("direction", "dtype", "calls", "geometric mean", "95 % are below", "most")
    caption = (
        f"Measured on an {record['gpu']}, driver {record['driver']}, "
        f"{record['date']}, by `scripts/bench_choice.py` ([choice.json](choice.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def times_in_mean(peer: str, points: Sequence[Row]) -> str:
    """The mean of how many times as fast as a peer each direction is."""
    told = (
        f"{mean_speedup(peer, points_of(direction, points)):.2f} times as fast {direction}"
        for direction in dict.fromkeys(point["direction"] for point in points)
    )
    return " and ".join(told)


def shapes(record: Row) -> str:
    """How fast shapes beside the grid are, shape by shape."""
    points = record["points"]
    directions = tuple(dict.fromkeys(point["direction"] for point in points))
    peers = peers_of(points)
    of_shape: dict[tuple[str, str], list[Row]] = {}
    for point in points:
        of_shape.setdefault((point["group"], shape_told(point)), []).append(point)
    lines = [(*told, *cells_of(of_directions, peers)) for told, of_directions in of_shape.items()]
    header = ("", "batch x length, heads", *columns_of(directions, peers))
    caption = (
        f"In {record['dtype']}. Geometric means relative to {fastest_of(peers)}: "
        f"{'; '.join(over_fastest(direction, points) for direction in directions)}. Measured on an "
        f"{record['gpu']}, driver {record['driver']}, PyTorch {record['torch']}, cuDNN {record['cudnn']}, "
        f"{record['date']}, by `scripts/bench_shapes.py` ([shapes.json](shapes.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def wide(record: Row) -> str:
    """How fast head dims over 256 are, case by case."""
    of_direction = {way: points_of(way, record["points"]) for way in ("forward", "backward")}
    peers = {way: peers_of(points) for way, points in of_direction.items()}
    lines = [
        (
            f"{forward['head_dim']}{', causal' * forward['causal']}, "
            f"{record['tokens'] // forward['seqlen']} x {forward['seqlen']:,}",
            *(
                cell
                for way, point in (("forward", forward), ("backward", backward))
                for cell in (
                    duration(point["seconds"]["cufa"]),
                    f"{tflops_of_wide(point):.0f}",
                    *(times_as_fast(point, name) for name in peers[way]),
                )
            ),
        )
        for forward, backward in zip(*of_direction.values(), strict=True)
    ]
    header = [
        "head dim, batch x length",
        *(
            column
            for way, names in peers.items()
            for column in (way, "TFLOP/s", *(f"x {called(name)}" for name in names))
        ),
    ]
    means = "; ".join(
        " and ".join(f"{mean_speedup(name, points):.2f} times {called(name)} {way}" for name in peers[way])
        for way, points in of_direction.items()
    )
    caption = (
        f"{record['heads']} heads and {record['kv_heads']} KV heads, in {record['dtype']}. Geometric means: "
        f"cufa's speed is {means}. Measured on an {record['gpu']}, driver {record['driver']}, PyTorch "
        f"{record['torch']}, {record['date']}, by `scripts/bench_wide.py` ([wide.json](wide.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def tflops_of_wide(point: Row) -> float:
    """How many operations cufa makes in a second, in trillions."""
    operations = sum(PRODUCTS[point["direction"]]) * point["flops_of_product"]
    return float(operations / point["seconds"]["cufa"] / 1e12)


def columns_of(directions: Sequence[str], names: Sequence[str]) -> list[str]:
    """Of each direction: its time, and what it is compared with."""
    return [column for way in directions for column in (way, *(f"x {called(name)}" for name in names))]


def cells_of(of_directions: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What is in those columns."""
    return [
        cell
        for point in of_directions
        for cell in (duration(point["seconds"]["cufa"]), *(times_as_fast(point, name) for name in names))
    ]


def packed(record: Row) -> str:
    """How fast packed sequences are, for each set of lengths."""
    points = record["points"]
    peers, directions = others_of(points, "peers"), ("forward", "backward")
    columns = (*peers, *others_of(points, "in a batch"))
    of_line: dict[tuple[str, str], list[Row]] = {}
    for point in points:
        masked = ", causal" if point["causal"] else ""
        told = f"{point['heads']} of {point['head_dim']}{masked}"
        of_line.setdefault((point["lengths"], told), []).append(point)
    lines = [(*told, *cells_of(of_directions, columns)) for told, of_directions in of_line.items()]
    header = ("lengths", "heads", *columns_of(directions, columns))
    caption = (
        f"In {record['dtype']}, with as many keys as queries. The last column of each "
        "direction is the time of the same arrays as a batch, relative to that of packed sequences. "
        f"Geometric means relative to {fastest_of(peers)}: {means_told(points)}. Measured on an "
        f"{record['gpu']}, driver {record['driver']}, PyTorch {record['torch']}, flash-attn-4 "
        f"{record['flash-attn-4']}, {record['date']}, by "
        "`scripts/bench_packed.py` ([packed.json](packed.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def windows(record: Row) -> str:
    """How fast layers with windows, soft caps and sinks are."""
    points = record["points"]
    peers, directions = others_of(points, "peers"), ("forward", "backward")
    of_line: dict[tuple[str, str, str], list[Row]] = {}
    for point in points:
        shape = f"{point['batch']} x {point['seqlen']:,}, {point['heads']}/{point['kv_heads']}"
        told = point["layer"], f"{shape} of {point['head_dim']}", features_told(point)
        of_line.setdefault(told, []).append(point)
    lines = [(*told, *cells_of(of_directions, peers)) for told, of_directions in of_line.items()]
    header = ("as in", "batch x length, heads", "sees", *columns_of(directions, peers))
    caption = (
        f"In {record['dtype']}. Geometric means relative to {fastest_of(peers)}: {means_told(points)}. "
        f"Measured on an {record['gpu']}, driver {record['driver']}, PyTorch {record['torch']}, "
        f"flash-attn-4 {record['flash-attn-4']}, {record['date']}, by `scripts/bench_windows.py` "
        "([windows.json](windows.json))."
    )
    return f"{table(header, lines)}\n\n{caption}"


def features_told(point: Row) -> str:
    before, after = point["window"]
    if before is None:
        seen = "all keys before"
    elif after == 0:
        seen = f"{before:,} keys before"
    else:
        seen = f"{before:,} keys before, {after:,} after"
    return f"{seen}{', soft cap' * bool(point['softcap'])}{', sink' * point['sink']}"


def over_faster_peer(points: Sequence[Row]) -> dict[str, list[float]]:
    """Of each direction: how many times as fast as the fastest peer each point is."""
    peers, ratios = others_of(points, "peers"), dict[str, list[float]]()
    for point in points:
        seconds = point["seconds"]
        fastest = min(seconds[name] for name in peers if name in seconds)
        ratios.setdefault(point["direction"], []).append(fastest / seconds["cufa"])
    return ratios


def means_told(points: Sequence[Row]) -> str:
    """Their geometric mean and the worst, of each direction."""
    return "; ".join(
        f"{direction} {statistics.geometric_mean(ratios):.2f} (worst {min(ratios):.2f})"
        for direction, ratios in over_faster_peer(points).items()
    )


def shape_told(point: Row) -> str:
    keys = f" x {point['seqlen_k']:,} keys" if point["seqlen_k"] != point["seqlen_q"] else ""
    causal = ", causal" if point["causal"] else ""
    return (
        f"{point['batch']:,} x {point['seqlen_q']:,}{keys}, {point['heads']}/{point['kv_heads']} of "
        f"{point['head_dim']}{causal}"
    )


def peers_of(points: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in point["seconds"] if name != "cufa"))


def ratios_over_fastest(direction: str, points: Sequence[Row]) -> dict[str, float]:
    """How many times as fast as the fastest peer each shape is that a peer takes."""
    ratios = {}
    for point in points:
        others = [seconds for name, seconds in point["seconds"].items() if name != "cufa"]
        if point["direction"] == direction and others:
            ratios[shape_told(point)] = min(others) / point["seconds"]["cufa"]
    return ratios


def mean_over_fastest(direction: str, points: Sequence[Row]) -> float:
    return statistics.geometric_mean(ratios_over_fastest(direction, points).values())


def over_fastest(direction: str, points: Sequence[Row]) -> str:
    """The mean of one direction beside the faster peer of each shape, and the worst shape."""
    ratios = ratios_over_fastest(direction, points)
    worst = min(ratios, key=lambda told: ratios[told])
    return f"{direction} {mean_over_fastest(direction, points):.2f} (worst {ratios[worst]:.2f}, {worst})"


def training(record: Row) -> str:
    """Whether 16 bits train as well as float32."""
    ours, standard = record["summary"]["cufa"], record["summary"]["standard"]
    options, seeds = record["options"], len(record["runs"]["cufa"])
    trained, reference = (
        (name, f"{result['loss']:.3f}", f"{result['tokens_per_second']:,.0f}")
        for name, result in ((f"cufa, {options['dtype']}", ours), ("standard, float32", standard))
    )
    return (
        f"On an {record['gpu']}, {options['layers']} layers with {options['heads']} heads of "
        f"{options['width'] // options['heads']} at length {options['length']} reach this in "
        f"{options['steps']} steps:\n\n"
        f"{table(('attention', 'loss', 'tokens/s'), (trained, reference))}\n\n"
        f"Losses are means of {seeds} seeds, in nats; those of standard attention have a standard deviation "
        f"of {standard['deviation']:.3f}. The cufa kernels are {' and '.join(record['kernels'])} "
        f"({record['date']}, `scripts/bench_training.py`, "
        "[benchmarks/training.json](benchmarks/training.json))."
    )


def installed(record: Row) -> str:
    """What an installation takes of time and room beside PyTorch's, in a line."""

    def words(name: str) -> str:
        measured = record["installations"][name]
        return f"{measured['seconds']:.0f} s and {measured['bytes'] / 1e9:.2g} GB"

    return (
        f"An installation takes {words('cufa')}; PyTorch takes {words(PYTORCH)} "
        "([measurements](benchmarks/README.md#installing))."
    )


def install(record: Row) -> str:
    """The same beside those of all other libraries."""
    installations = record["installations"]
    lines = [
        (
            name,
            f"{measured['seconds']:.0f} s",
            f"{measured['bytes'] / 1e9:.2g} GB",
            str(len(measured["packages"])),
        )
        for name, measured in installations.items()
    ]
    caption = (
        f"Each installs into an empty environment with Python {record['python']}, on {record['cores']} cores "
        f"and the same network, {record['date']}, by `scripts/bench_install.py` "
        "([install.json](install.json))."
    )
    return f"{table(('pip install', 'time', 'disk space', 'packages'), lines)}\n\n{caption}"


def summary(
    peers: Row,
    h100: Row,
    single: Row,
    shapes: Row,
    widest: Row,
    packed: Row,
    windows: Row,
    fp8: Row,
    decode: Row,
    serving: Row,
    latent: Row,
    rungs: Row,
    flex: Row,
    biased: Row,
    dropped: Row,
    check: Row,
) -> str:
    """What the other page says, in a few lines."""
    best = {
        direction: max(point["tflops"]["cufa"] for point in points_of(direction, peers["points"]))
        for direction in ("forward", "backward")
    }
    wide = [point for point in fp8["points"] if point["head_dim"] > 64]
    over_16_bits, over_by_transposed = (
        [point["tflops"][name] / point["tflops"]["bfloat16"] for point in wide]
        for name in (FLOAT8, f"{FLOAT8}, V transposed")
    )
    fastest = max(max(point["tflops"].values()) for point in wide)
    error = max(point["error"] for point in fp8["points"])
    over_packed, over_windows = (
        " and ".join(
            f"{statistics.geometric_mean(ratios):.2f} times as fast {direction}"
            for direction, ratios in over_faster_peer(record["points"]).items()
        )
        for record in (packed, windows)
    )
    points = decode["points"]
    keys = [point["seqlen_k"] for point in points]
    others = others_of(points, "peers")
    decoding = " and ".join(
        f"{mean_speedup(name, points):.2f} times as fast as {called(name)}" for name in others
    )
    in_bytes = others_of(points, "in 8 bits")
    halved = "".join(
        f" With {IN_WORDS[name]}, a call takes {mean_speedup(name, points):.2f} times as long."
        for name in in_bytes
    )
    by_mma = " and ".join(
        f"{kernel} {mean_ratio(kernel, PEER_OF_RUNGS, rungs['points'])}"
        for kernel in ("fwd_5_mma", "bwd_3_mma")
    )
    in_float32 = [
        f"{mean_ratio('cufa', 'efficient', points_of(direction, single['points']))} times as fast {direction}"
        for direction in ("forward", "backward")
    ]
    in_order = [mean_ratio(DETERMINISTIC, "cufa", record["points"]) for record in (peers, single)]
    fastest_single = max(point["tflops"]["cufa"] for point in single["points"])
    fastest_of_wide = {
        way: max(map(tflops_of_wide, points_of(way, widest["points"]))) for way in ("forward", "backward")
    }
    over_serving, over_latent = (
        statistics.geometric_mean(over_flashinfer(record["points"])) for record in (serving, latent)
    )
    slowest = max(check["jit"]["compile_seconds"].values())
    host = check["jit"]["host_us"]
    lines = (
        f"**bfloat16** on an {peers['gpu']}: up to {best['forward']:.0f} TFLOP/s forward and "
        f"{best['backward']:.0f} backward.",
        f"**bfloat16** on an {h100['gpu']}: {over_best_peer_in('forward', h100['points']):.2f} times as fast "
        f"forward and {over_best_peer_in('backward', h100['points']):.2f} times as fast backward as "
        f"{fastest_of(peers_in(h100['points'][0]))}.",
        f"**float32** on an {single['gpu']}: up to {fastest_single:.0f} TFLOP/s; {' and '.join(in_float32)} "
        "as PyTorch's memory-efficient attention.",
        f"**`deterministic=True`**: a backward keeps {in_order[0]} of its speed in bfloat16, {in_order[1]} "
        "in float32.",
        f"**Other shapes** ({shapes['problems_done']}: odd head dims and lengths, few KV heads, few heads, "
        f"many short sequences): {mean_over_fastest('forward', shapes['points']):.2f} times as fast forward "
        f"and {mean_over_fastest('backward', shapes['points']):.2f} times as fast backward as "
        f"{fastest_of(peers_of(shapes['points']))}.",
        f"**Head dims over 256**, which PyTorch's FlashAttention-2 and cuDNN do not take: up to "
        f"{fastest_of_wide['forward']:.0f} TFLOP/s forward and {fastest_of_wide['backward']:.0f} backward in "
        f"bfloat16, {times_in_mean(EFFICIENT, widest['points'])} as its memory-efficient attention.",
        f"**Packed sequences** of many lengths: {over_packed} as "
        f"{fastest_of(others_of(packed['points'], 'peers'))}.",
        f"**Windows, soft caps and sinks**, in layers of models: {over_windows} as "
        f"{fastest_of(others_of(windows['points'], 'peers'))}.",
        f"**float8_e4m3fn**, forward: {min(over_16_bits):.2f} to {max(over_16_bits):.2f} times as fast as "
        f"bfloat16 at head dims 128 and 256, {min(over_by_transposed):.2f} to {max(over_by_transposed):.2f} "
        f"times with V transposed; up to {fastest:.0f} TFLOP/s. The error of the output is at most "
        f"{error:.1%} (root mean square), beside what rounding the inputs to 8 bits costs.",
        f"**Decoding** (one query, {min(keys):,} to {max(keys):,} keys): {decoding}.{halved}",
        f"**Serving** (keys in pages, a different length for each request): {over_serving:.2f} times as fast "
        f"as the fastest FlashInfer kernel; multi-head latent attention {over_latent:.2f} times.",
        f"**`mma.sync`**, which all GPUs since Turing have: {by_mma} times as fast as "
        f"{called(PEER_OF_RUNGS)}.",
        f"**`score_mod` and `mask_mod`**: {times_in_mean(FLEX, flex['points'])} as {FLEX}.",
        f"**Bias**, with its gradient in the backward: {times_in_mean(EFFICIENT, biased['points'])} as "
        "PyTorch's memory-efficient attention.",
        f"**Dropout**: {over_best_peer_in('forward', dropped['points']):.2f} times as fast forward and "
        f"{over_best_peer_in('backward', dropped['points']):.2f} times as fast backward as "
        f"{fastest_of(peers_in(dropped['points'][0]))}.",
        f"**Overhead**: a kernel compiles once, in at most {slowest:.1f} s. A call takes "
        f"{host['attention']:.0f} us of host time, the first of each length "
        f"{host['attention, of one key more each time']:.0f} us.",
    )
    return "\n".join(f"- {line}" for line in lines)


# Of each page the sections of figures, each from a record or some.
PAGES: dict[Path, dict[str, tuple[Callable[..., str], tuple[Path, ...]]]] = {
    README: {
        "headline": (headline, (PEERS_RECORD,)),
        "install": (installed, (INSTALL_RECORD,)),
        "ladder": (ladder, (SPEEDS_RECORD,)),
        "choice": (choice, (SPEEDS_RECORD,)),
        "summary": (
            summary,
            (
                PEERS_RECORD,
                H100_RECORD,
                SINGLE_RECORD,
                SHAPES_RECORD,
                WIDE_RECORD,
                PACKED_RECORD,
                WINDOWS_RECORD,
                FP8_RECORD,
                DECODE_RECORD,
                SERVING_RECORD,
                LATENT_RECORD,
                RUNGS_RECORD,
                FLEX_RECORD,
                BIAS_RECORD,
                DROPOUT_RECORD,
                SPEEDS_RECORD,
            ),
        ),
        "training": (training, (TRAINING_RECORD,)),
    },
    BENCHMARKS: {
        "measured": (measured, (CHECK_RECORD, SPEEDS_RECORD)),
        "peers": (peers, (PEERS_RECORD,)),
        "h100": (other_gpu, (H100_RECORD,)),
        "half": (other_dtype, (HALF_RECORD,)),
        "single": (other_dtype, (SINGLE_RECORD,)),
        "uneven": (uneven, (UNEVEN_RECORD,)),
        "dropout": (dropout, (DROPOUT_RECORD,)),
        "rungs": (rungs, (RUNGS_RECORD, HALF_RUNGS_RECORD)),
        "fp8": (fp8, (FP8_RECORD,)),
        "decode": (decode, (DECODE_RECORD,)),
        "serving": (serving, (SERVING_RECORD,)),
        "latent": (latent, (LATENT_RECORD,)),
        "flex": (flex, (FLEX_RECORD,)),
        "bias": (bias, (BIAS_RECORD,)),
        "choice": (chosen_rungs, (CHOICE_RECORD,)),
        "shapes": (shapes, (SHAPES_RECORD,)),
        "wide": (wide, (WIDE_RECORD,)),
        "packed": (packed, (PACKED_RECORD,)),
        "windows": (windows, (WINDOWS_RECORD,)),
        "install": (install, (INSTALL_RECORD,)),
    },
}


def text_of(section: Callable[..., str], records: Sequence[Path]) -> str:
    """A section, which ends with how far a record came if that was not to the end."""
    if not all(record.exists() for record in records):
        return NO_RECORD
    read = [json.loads(record.read_text()) for record in records]
    text = section(*read)
    for path, record in zip(records, read, strict=True):
        done, problems = record.get("problems_done"), record.get("problems")
        if done != problems:
            text += f"\n\nThe run of {path.name} was stopped after {done} of {problems} problems."
    return text


def filled(page: Path) -> str:
    written = page.read_text()
    for name, (section, records) in PAGES[page].items():
        pattern = rf"(<!-- figures: {name} -->\n).*?(<!-- end -->)"
        text = text_of(section, records)
        written, count = re.subn(
            pattern, lambda match, text=text: f"{match[1]}{text}\n{match[2]}", written, flags=re.DOTALL
        )
        assert count == 1, f"{page} must have one section of figures called {name}"
    return written


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page differs.")
def main(check: bool) -> None:
    differ = [page for page in PAGES if filled(page) != page.read_text()]
    for page in differ:
        if check:
            print(f"{page} differs from benchmarks/; run scripts/readme_figures.py", file=sys.stderr)
        else:
            page.write_text(filled(page))
    sys.exit(int(check and bool(differ)))


if __name__ == "__main__":
    main()
