"""One training step, kernel by kernel, beside what the hardware can do: the same report as llm.c
prints of its step.

Times come from the profiler. Bytes and operations are counted, not measured: each kernel of
ops.py and each op of torch is charged with its inputs read once and its outputs written once,
and matmuls and attention with their multiplications and additions. A kernel's ideal time is the
longer of two: its bytes at the rate of a large copy, and its operations at the rate of a large
matmul, both measured in the same run."""

from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
from training import ops as training

KINDS = {  # by what a row's name contains
    "product": ("mm", "linear"),
    "attention": ("attention",),
    "classifier": ("cross_entropy",),
    "norm": ("rmsnorm", "column_sum"),
    "rope, swiglu": ("rope", "swiglu"),
    "optimiser": ("foreach", "adam", "vector_norm"),
}


def kind_of(name):
    return next(
        (kind for kind, signs in KINDS.items() if any(sign in name for sign in signs)), "other"
    )


def size(tensors):
    return sum(
        t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)
    )


class Counting(TorchDispatchMode):
    """Counts bytes and operations of every op by name; those of ops.py's kernels where they are
    launched."""

    def __init__(self):
        super().__init__()
        self.bytes = defaultdict(float)
        self.operations = defaultdict(float)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._overloadpacket.__name__
        schema = op._schema
        if schema.is_mutable or not any(r.alias_info for r in schema.returns):  # not a view
            written = [
                a for a, s in zip(args, schema.arguments) if s.alias_info and s.alias_info.is_write
            ]
            named = schema.arguments[len(args) :]
            written += [
                (kwargs or {}).get(s.name) for s in named if s.alias_info and s.alias_info.is_write
            ]
            self.bytes[f"aten::{name}"] += size(args) + size(written or out)
        self.operations[f"aten::{name}"] += operations(name, args)
        return out

    def launch(self, kernel, grid, device, *args, warps=4, stages=1, **constants):
        name = kernel.__name__
        self.bytes[name] += size(args)
        if name == "_cross_entropy_kernel":
            self.bytes[name] += size(args[0]) if args[2] is not None else 0  # the gradient
        elif name == "_rope_forward_kernel":  # in place, without v
            self.bytes[name] += size(args[0]) * (2 * constants["TURNED"] / constants["HEADS"] - 1)
        elif name == "_scale_kernel":
            self.bytes[name] -= size(args[0])  # the factor is 1
        self.launched(kernel, grid, device, *args, warps=warps, stages=stages, **constants)

    def __enter__(self):
        self.launched = training.launch
        training.launch = self.launch
        return super().__enter__()

    def __exit__(self, *exception):
        training.launch = self.launched
        return super().__exit__(*exception)


def operations(name, args):
    """Multiplications and additions of a matmul or of causal attention."""
    if name in ("mm", "bmm"):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * args[1].numel() * args[2].shape[-1]
    if "scaled_dot_product" in name:
        # Causal: half of the positions are seen
        if "backward" in name:
            return 5.0 * args[1].numel() * args[2].shape[-2]
        return 2.0 * args[0].numel() * args[1].shape[-2]
    return 0.0


def timed(parts, device):
    """Name -> (seconds, count) of what ran, and the seconds of each part. On a GPU the names are
    those of our kernels and, for kernels that torch launches, those of its ops; on a CPU, those of
    the ops."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU] + [activity.CUDA] * gpu) as profiler:
        for name, part in parts.items():
            with torch.profiler.record_function(f"part {name}"):
                part()
                bench.synchronize(device)
    events = profiler.events()
    spans = {
        e.name[5:]: e.time_range
        for e in events
        if e.name.startswith("part ") and e.device_type.name == "CPU"
    }
    found = defaultdict(lambda: [0.0, 0])

    def add(name, microseconds, count=1):
        found[name][0] += microseconds * 1e-6
        found[name][1] += count

    if not gpu:
        for e in events:
            if e.name.startswith("aten::"):
                add(e.name, e.self_cpu_time_total)
        return found, {name: span.elapsed_us() * 1e-6 for name, span in spans.items()}
    ran = [
        e
        for e in events
        if e.device_type.name == "CUDA" and not e.name.startswith(("part ", "Optimizer."))
    ]
    for e in ran:
        add(e.name, e.time_range.elapsed_us())
    for e in events:
        if e.device_type.name == "CPU" and e.name.startswith("aten::"):
            for kernel in e.kernels:
                add(kernel.name, -kernel.duration, -1)
                add(outermost(e), kernel.duration)
    within = dict.fromkeys(spans, 0.0)
    for e in ran:
        for name, span in spans.items():
            if span.start <= e.time_range.start < span.end:
                within[name] += e.time_range.elapsed_us() * 1e-6
    return {name: value for name, value in found.items() if value[1] > 0}, within


def outermost(event):
    """The outermost op among the nested calls around this one, apart from composite ones."""
    name = event.name
    while event.cpu_parent is not None:
        event = event.cpu_parent
        if event.name.startswith("aten::") and event.name not in COMPOSITE:
            name = event.name
    return name


COMPOSITE = tuple(
    f"aten::{name}"
    for name in "to linear matmul dropout contiguous scaled_dot_product_attention".split()
)


def report(parts, device):
    """Run a step, given as its parts in order, a few times, and show in tables what it costs."""
    for _ in range(3):
        for part in parts.values():
            part()
    with Counting() as counted:
        for part in parts.values():
            part()
    found, within = timed(parts, device)
    copy = bench.copy_ceiling(device)
    product = bench.product_ceiling(device, torch.bfloat16)
    total = sum(s for s, _ in found.values())
    rows = []
    kinds = defaultdict(lambda: [0.0, 0.0])
    for name, (seconds, count) in sorted(found.items(), key=lambda item: -item[1][0]):
        moved = counted.bytes.get(name, 0.0)
        done = counted.operations.get(name, 0.0)
        best = max(moved / copy, done / product)
        kinds[kind_of(name)][0] += seconds
        # What is not counted is assumed to run at its ceiling
        kinds[kind_of(name)][1] += min(best, seconds) if best else seconds
        if seconds > 0.002 * total:
            rows.append({
                "kernel": name[:48],
                "ms": 1e3 * seconds,
                "count": count,
                "GB/s": moved / seconds / 1e9,
                "% of copy": 100 * moved / copy / seconds,
                "% of product": 100 * done / product / seconds,
            })  # fmt: skip
    sums = [
        {"": k, "ms": 1e3 * s, "% of time": 100 * s / total, "% of ceiling": 100 * i / s}
        for k, (s, i) in kinds.items()
    ]
    spans = [{"": k, "ms": 1e3 * s, "% of time": 100 * s / total} for k, s in within.items()]
    ideal = sum(i for _, i in kinds.values())
    share = f"efficiency {100 * ideal / total:.1f}%"
    closing = (
        f"{1e3 * total:.2f} ms of kernels; each at its own ceiling {1e3 * ideal:.2f} ms: {share}"
    )
    for table in (rows, sums, spans):
        bench.show(table)
        print()
    print(closing)
