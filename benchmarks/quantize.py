"""Times of quantization on a CUDA device: `python -m benchmarks.quantize [--json FILE]`.

Device time in CUDA graphs of calls over rotated inputs (at least 260 MB of them where that is not 10,000),
medians of 9 replays, torch bf16 of random normal data. Bytes are those read and written; the share is that of a
copy of one tensor to another of the same size in the same process.
"""

import argparse
import statistics

import torch

from moqext import ops

ROTATED = 260e6


def replay_time(calls, repeat=9):
    """Median seconds of one call, of a graph of them all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    del graph
    return statistics.median(times[1:])


def copy_rate():
    a = [torch.randn(1 << 28, device="cuda").view(torch.uint8) for _ in range(2)]
    b = torch.empty_like(a[0])
    return 2 * b.numel() / replay_time([lambda: b.copy_(a[0]), lambda: b.copy_(a[1])] * 5)


def sets(m, k):
    """How many inputs are rotated over."""
    return max(2, min(64, round(ROTATED / (m * k * 2))))


def quantize_calls(m, k, scheme, **options):
    made = []
    for _ in range(sets(m, k)):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        results = ops.quantize(x, scheme, **options)
        made.append((x, results[0], None if options.get("scale") is not None else results[1]))
    calls = [
        lambda x=x, out=out, scale=scale: ops.quantize(x, scheme, out=out, scale_out=scale, **options)
        for x, out, scale in made
    ]
    return calls * max(1, round(20 / len(calls)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.parse_args()
    rate = copy_rate()
    print(f"copy {rate / 1e12:.3f} TB/s")
    given = torch.tensor([0.02], device="cuda")
    schemes = {
        "static": ("fp8_tensor", {"scale": given}),
        "dynamic": ("fp8_tensor", {}),
        "token": ("fp8_token", {}),
        "group": ("fp8_group", {}),
    }
    for k in (4096, 8192):
        for m in (1, 16, 64, 256, 2048, 8192, 32768):
            cells = []
            for name, (scheme, options) in schemes.items():
                t = replay_time(quantize_calls(m, k, scheme, **options))
                cells.append(f"{name} {t * 1e6:8.2f} us {m * k * 3 / t / rate:5.2f}")
            print(f"m {m:6d} k {k:6d}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
