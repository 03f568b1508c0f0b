"""Trains the four networks with PyTorch alone, for ``candle-p1 bench gpu --peer FILE``.

    python torch_peer.py FILE [--device cpu] [--size small] [--budget SECONDS]

Shapes, batch sizes, optimizers, penalties and dropout are the benchmarks'; the data are random, and
on the device, a few batches in turn, so that PyTorch waits for no input. Each network is trained in
TF32, bfloat16 (autocast) and float32, eagerly and by torch.compile; the file has what has been
measured so far after every one. Needs nothing but PyTorch.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

NUM_BATCHES, MIN_BLOCKS, WARM_UP_STEPS, BLOCK_STEPS = 4, 3, 10, 20
SIZES = {
    "full": {"nt3": 60_483, "p1b1": 60_483, "p1b2": 28_204, "p1b3": 29_532},
    "small": {"nt3": 60, "p1b1": 300, "p1b2": 300, "p1b3": 2_801},
}
BATCH_SIZES = {"nt3": 20, "p1b1": 100, "p1b2": 60, "p1b3": 100}
PRECISIONS = {"tf32": ("high", False), "bfloat16": ("high", True), "float32": ("highest", False)}
L2, RATE = 1e-5, 0.001


def dense(sizes: Sequence[int], activation: Callable[[], Any], dropout: float = 0.0) -> list[Any]:
    """Returns linear layers, each with its activation and dropout."""
    layers: list[Any] = []
    for inputs, units in pairwise(sizes):
        layers += [nn.Linear(inputs, units), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return layers


class Penalized(nn.Module):  # type: ignore[misc]
    """P1B2's network: returns logits, and the L2 penalty on kernels and activities."""

    def __init__(self, sizes: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(*each) for each in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Returns logits and penalty for inputs of shape (samples, features)."""
        penalty = 0.0
        for layer in self.hidden:
            x = torch.sigmoid(layer(x))
            penalty = penalty + layer.weight.square().sum() + x.float().square().sum() / len(x)
        return self.output(x), L2 * penalty


def make(name: str, num_inputs: int, size: str) -> tuple[Any, Callable[..., Any], Any, int]:
    """Returns a network, its loss, its optimizer's class, and the classes; 0: a regression."""
    sgd, mse, entropy = torch.optim.SGD, functional.mse_loss, functional.cross_entropy
    if name == "nt3":
        sizes = [128 * ((num_inputs - 19 - 9) // 10), 200, 20]
        model = nn.Sequential(
            *(nn.Conv1d(1, 128, 20), nn.ReLU(), nn.Conv1d(128, 128, 10), nn.ReLU()),
            *(nn.MaxPool1d(10), nn.Flatten(), *dense(sizes, nn.ReLU, 0.1), nn.Linear(20, 2)),
        )
        return model, lambda x, y: entropy(x.float(), y), sgd, 2
    if name == "p1b1":
        sizes = [num_inputs, 2000, 600, 2, 600, 2000]
        model = nn.Sequential(*dense(sizes, nn.ReLU), nn.Linear(2000, num_inputs), nn.Sigmoid())
        return model, lambda x, y: mse(x.float(), y), torch.optim.Adam, 0
    if name == "p1b2":
        num = 20 if size == "full" else 10
        model = Penalized([num_inputs, 1024, 512, 256], num)
        return model, lambda x, y: entropy(x[0].float(), y) + x[1], torch.optim.RMSprop, num
    model = nn.Sequential(*dense([num_inputs, 1000, 500, 100, 50], nn.ReLU, 0.1), nn.Linear(50, 1))
    return model, lambda x, y: mse(x.float()[:, 0], y), sgd, 0


def measure(name: str, precision: str, how: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `candle-p1 bench gpu` reads of a variant."""
    products, is_mixed = PRECISIONS[precision]
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = products == "high"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    num_inputs, num = SIZES[args.size][name], BATCH_SIZES[name]
    model, loss, kind, classes = make(name, num_inputs, args.size)
    model.to(args.device).train()
    options = {"fused": True} if args.device == "cuda" and kind is not torch.optim.RMSprop else {}
    optimizer = kind(model.parameters(), lr=RATE, **options)
    shape = (NUM_BATCHES, num, *((1,) if name == "nt3" else ()), num_inputs)
    inputs = torch.rand(shape, device=args.device)
    targets = inputs if name == "p1b1" else torch.rand(shape[:2], device=args.device)
    targets = (targets * classes).long() if classes else targets
    forward = torch.compile(model) if how == "compiled" else model

    def train(num_steps: int) -> None:
        for step in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(args.device, torch.bfloat16, enabled=is_mixed):
                value = loss(forward(inputs[step % NUM_BATCHES]), targets[step % NUM_BATCHES])
            value.backward()
            optimizer.step()
        value.item()  # waits for the device

    begin = time.perf_counter()
    train(1)
    first_step_s = time.perf_counter() - begin
    train(WARM_UP_STEPS)
    blocks_s, begin = list[float](), time.perf_counter()
    while len(blocks_s) < MIN_BLOCKS or time.perf_counter() - begin < args.seconds:
        start = time.perf_counter()
        train(BLOCK_STEPS)
        blocks_s.append((time.perf_counter() - start) / BLOCK_STEPS)
    found = {"benchmark": name, "precision": precision, "variant": how, "batch_size": num}
    times_s = {"step_s": statistics.median(blocks_s), "range_s": [min(blocks_s), max(blocks_s)]}
    return {**found, **times_s, "first_steps_s": [first_step_s]}


def main() -> None:
    """Measures all variants, in TF32 first, as far as the time allows."""
    parser = argparse.ArgumentParser(description="Train the four networks with PyTorch.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each variant")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds, then end")
    args = parser.parse_args()
    begin, on_gpu = time.monotonic(), args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.exit(2, "torch_peer: PyTorch finds no CUDA device; --device cpu tries it without\n")
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    results: list[dict[str, Any]] = []
    found = {"peer": f"PyTorch {torch.__version__}", "device": device, "results": results}
    for precision, name, how in product(PRECISIONS, BATCH_SIZES, ("eager", "compiled")):
        if time.monotonic() - begin > args.budget:
            break
        torch.compiler.reset()
        results.append(measure(name, precision, how, args))
        unfinished = args.file.with_suffix(".part")
        unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(args.file)
        print(name, precision, how, f"{1000 * results[-1]['step_s']:.3g} ms a step", flush=True)


if __name__ == "__main__":
    main()
