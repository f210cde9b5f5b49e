"""Times a training step, forward and backward, with several ways to average gradients, in turns with Gloo.

Prints CSV: milliseconds, medians of the rounds.

torchrun --nproc-per-node 2 python/benches/training_step.py [--rounds N] [--model resnet50|gpt2]

The networks are ResNet-50 (25.6 million parameters in 161 tensors) and GPT-2 small (124.4 million in 148). Batches are
so small that a step takes about a second. `ddp` is DDP with its defaults. `call_for_each` is a step without DDP, then
one call for each parameter. `all_in_buckets` makes only the calls, of 25 MiB each. Overlapping is useful only if a step
takes less time than `all_in_buckets` and a step without calls together. The gradients of all ways are compared.
"""

import argparse
import functools
import os
import statistics
import time

import collectives_torch  # noqa: F401  registers the backend
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BUCKET = 25 << 20


def convolution(inputs, outputs, size, stride=1):
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """A block of three convolutions beside a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        inner = [*convolution(inputs, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(), *convolution(width, outputs, 1)]
        self.residual = nn.Sequential(*inner)
        self.shortcut = nn.Sequential(*(convolution(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else []))

    def forward(self, x):
        return functional.relu(self.residual(x) + self.shortcut(x))


def resnet50():
    layers, inputs = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Gpt2(nn.Module):
    """A transformer with the shape of GPT-2 small. Its embedding is also its last layer."""

    def __init__(self, vocabulary=50257, width=768, layers=12, positions=1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        block = functools.partial(nn.TransformerEncoderLayer, width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.last = nn.ModuleList(block() for _ in range(layers)), nn.LayerNorm(width)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return functional.linear(self.last(x), self.tokens.weight)


def resnet_loss(model):
    return functional.cross_entropy(model(torch.rand(4, 3, 64, 64)), torch.randint(1000, (4,)))


def gpt2_loss(model):
    tokens = torch.randint(50257, (1, 17))
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {"resnet50": (resnet50, resnet_loss, 25_557_032), "gpt2": (Gpt2, gpt2_loss, 124_439_808)}


class Ways:
    """Steps of one network, each with the same data."""

    def __init__(self, make, loss, groups):
        self.loss, self.groups = loss, groups
        torch.manual_seed(1)
        self.bare = make()
        self.wrapped = {}
        for backend, group in groups.items():
            model = make()
            model.load_state_dict(self.bare.state_dict())
            self.wrapped[backend] = DistributedDataParallel(model, process_group=group)

    def all(self):
        ways = {("alone", ""): self.alone}
        for backend in self.groups:
            for way in (self.all_in_buckets, self.call_for_each, self.ddp):
                ways[way.__name__, backend] = functools.partial(way, backend)
        return ways

    def step(self, model):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(dist.get_rank())
        self.loss(model).backward()
        return [parameter.grad for parameter in model.parameters()]

    def alone(self):
        return self.step(self.bare)

    def ddp(self, backend):
        return self.step(self.wrapped[backend])

    def call_for_each(self, backend):
        gradients = self.step(self.bare)
        for gradient in reversed(gradients):
            dist.all_reduce(gradient.div_(dist.get_world_size()), group=self.groups[backend])
        return gradients

    def all_in_buckets(self, backend):
        for bucket in self.buckets:
            dist.all_reduce(bucket, group=self.groups[backend])

    @functools.cached_property
    def buckets(self):
        elements = sum(parameter.numel() for parameter in self.bare.parameters())
        return torch.zeros(elements).split(BUCKET // 4)


def timed(way):
    dist.barrier()
    began = time.perf_counter()
    gradients = way()
    return (time.perf_counter() - began) * 1e3, gradients


def assert_alike(ways):
    """Checks that all ways give the average. DDP may sum in another order."""
    expected = [gradient.clone() for gradient in ways["call_for_each", "gloo"]()]
    for (name, backend), way in ways.items():
        if name in ("ddp", "call_for_each"):
            for mine, other in zip(way(), expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name} {backend}: {text}")


def compare(name, groups, rounds):
    make, loss, elements = MODELS[name]
    ways = Ways(make, loss, groups)
    assert sum(parameter.numel() for parameter in ways.bare.parameters()) == elements
    ways = ways.all()
    assert_alike(ways)
    times = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            times[way].append(timed(call)[0])
    if dist.get_rank() == 0:
        for (way, backend), taken in times.items():
            print(f"{name},{dist.get_world_size()},{way},{backend},{statistics.median(taken):.1f},{min(taken):.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", choices=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "collectives")}
    if dist.get_rank() == 0:
        print("model,ranks,way,backend,median_ms,least_ms")
    for name in MODELS:
        if arguments.model in (None, name):
            compare(name, groups, arguments.rounds)
    dist.destroy_process_group()


main()
